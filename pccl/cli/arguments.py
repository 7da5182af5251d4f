"""Arguments of several commands: their types, which reject invalid values before anything starts,
and the program that a command runs, which is all words after `--`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pccl.support.text import address_text, parse_address, parse_listening


def option(
    parser: argparse._ActionsContainer,
    flags: str,
    metavar: str,
    kind: Callable[[str], object],
    text: str,
    default: object = None,
) -> None:
    """Adds an argument with one or more flags, such as "-n --iters". Its help has the default."""
    text = text if default is None else f"{text} (default: %(default)s)"
    names = flags.split()
    parser.add_argument(*names, metavar=metavar, type=kind, default=default, help=text)


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest or (highest and int(text) > highest):
            limits = f"at least {lowest}" + (f" and at most {highest}" if highest else "")
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {limits}")
        return int(text)

    return number


def positive(text: str) -> float:
    if not (number := _finite(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def duration(text: str) -> float:
    """Seconds: a number of at least 0."""
    if not (number := _finite(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return float("nan")
    return number if number < float("inf") else float("nan")


_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes from text such as 4096, 4K or 256M."""
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: say 4096, 4K, 256M or 1G")
    return int(number) * unit


def master(text: str) -> str:
    """The address of a master, with its port."""
    try:
        return address_text(*parse_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def http_port(text: str) -> tuple[str, int]:
    """Where a master shows its run: HOST:PORT, or PORT on this machine."""
    try:
        return parse_listening(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output(text: str) -> Path:
    """A file that can be written. Its content stays until it is written."""
    path = Path(text)
    exists = path.exists()
    if exists and not (path.is_file() or path.is_dir()):
        return path  # opening a pipe might block, and the other end would see it
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    if not exists:
        path.unlink()
    return path


def add_program(parser: argparse.ArgumentParser, name: str, epilog: str) -> None:
    """Adds the program to the arguments of the command `name`. The help shows `epilog` as it is."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{name} [options] -- COMMAND [ARGUMENT ...]"
    parser.epilog = epilog
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def program(args: argparse.Namespace, name: str) -> list[str]:
    """The program and its arguments. If they are missing: an empty list, after a message."""
    found: list[str] = args.command_line[args.command_line[:1] == ["--"] :]
    if not found:
        print(f"{name}: which program? {name} [options] -- COMMAND ...", file=sys.stderr)
    return found
