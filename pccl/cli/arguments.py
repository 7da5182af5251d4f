"""Argument types for argparse that several commands share, which reject invalid values early."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pccl.master import DEFAULT_PORT
from pccl.support.text import parse_address, parse_listening


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `lowest` to `highest`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest or (highest and int(text) > highest):
            limits = f"at least {lowest}" + (f" and at most {highest}" if highest else "")
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {limits}")
        return int(text)

    return number


def master(text: str) -> str:
    """The address of a master: HOST:PORT, or HOST, whose port is the usual one."""
    bare = ":" not in text or text.endswith("]")
    address = f"{text}:{DEFAULT_PORT}" if bare else text
    try:
        parse_address(address)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return address


def http_port(text: str) -> tuple[str, int]:
    """Where a master shows its run: HOST:PORT, or PORT on this machine."""
    try:
        return parse_listening(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output(text: str) -> Path:
    """A file that can be written. What is in it stays there until then."""
    path = Path(text)
    exists = path.exists()
    if exists and not (path.is_file() or path.is_dir()):
        return path  # a pipe, a terminal: to open it might wait, or be seen
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    if not exists:
        path.unlink()
    return path
