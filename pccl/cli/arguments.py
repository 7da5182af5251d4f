"""The arguments that several commands share: declarations, types that reject invalid values before
anything starts, and the program after `--`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pccl.cli.terminal import Refused
from pccl.support import address_text, parse_address, parse_listening

T = TypeVar("T")


def option(
    parser: argparse._ActionsContainer,
    names: str,
    text: str,
    default: object = None,
    kind: Callable[[str], object] = str,
    **more: Any,
) -> None:
    """Adds an argument.

    `names` ends with the metavar: "-n --iters N", or "log LOG" for a positional one. Without a
    metavar it is one of `choices`, or a flag. The help shows the default.
    """
    *flags, metavar = names.split()
    if not metavar.startswith("-"):
        more |= {"metavar": metavar, "type": kind, "default": default}
    else:
        flags.append(metavar)
        more |= {"default": default} if "choices" in more else {"action": "store_true"}
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(*flags, help=text + shown, **more)


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest or (highest and int(text) > highest):
            limits = f"at least {lowest}" + (f" and at most {highest}" if highest else "")
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {limits}")
        return int(text)

    return number


def _real(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (fits(found) and found < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return found

    return number


positive = _real("a positive number", lambda number: number > 0)
duration = _real("a number of seconds", lambda number: number >= 0)

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """The number of bytes in text such as 4096, 4K or 256M."""
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 4096, 4K, 256M or 1G")
    return int(number) * unit


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type from a function that raises ValueError, whose text argparse would not show."""

    def kind(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return kind


master = _parsed(lambda text: address_text(*parse_address(text)))  # with its port
http_port = _parsed(parse_listening)  # an address of --http: HOST:PORT, or PORT on this machine


def output(text: str) -> Path:
    """A writable file, whose content stays until the command writes it."""
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


def add_program(parser: argparse.ArgumentParser, epilog: str) -> None:
    """Adds the program to the arguments of a command. The help shows `epilog` unchanged."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} [options] -- COMMAND [ARGUMENT ...]"
    parser.epilog = epilog
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def program(args: argparse.Namespace) -> list[str]:
    """The program and its arguments. Raises Refused: they are missing."""
    found: list[str] = args.command_line[args.command_line[:1] == ["--"] :]
    if not found:
        raise Refused(f"which program? pccl {args.command} [options] -- COMMAND ...")
    return found
