"""The program that a command runs: the words after `--`."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser, name: str, epilog: str) -> None:
    """Adds the program to the arguments of the command `name`, and keeps the lines of `epilog`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{name} [options] -- COMMAND [ARGUMENT ...]"
    parser.epilog = epilog
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def words(args: argparse.Namespace, name: str) -> list[str]:
    """The program and its arguments; none, after a message, if it is missing."""
    found: list[str] = args.command_line[args.command_line[:1] == ["--"] :]
    if not found:
        print(f"{name}: which program? {name} [options] -- COMMAND ...", file=sys.stderr)
    return found
