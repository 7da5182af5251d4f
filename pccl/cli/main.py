"""The `pccl` command: mounts one module for each sub-command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pccl import __version__, master
from pccl.cli import bench, demo, doctor, keys
from pccl.errors import PCCLError

# name -> (help, module with add_arguments and run)
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[..., int]]] = {
    "master": ("serve as the master of a run", master.add_arguments, master.run),
    "keys": ("make the keys of an encrypted run", keys.add_arguments, keys.run),
    "demo": (
        "train a small GPT over several peers while one is killed and another joins",
        demo.add_arguments,
        demo.run,
    ),
    "bench": ("measure collectives, in the manner of nccl-tests", bench.add_arguments, bench.run),
    "doctor": ("say what this installation runs on, and test it", doctor.add_arguments, doctor.run),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="pccl",
        description="Fault-tolerant collective communications for training over the internet.",
    )
    top.add_argument("--version", action="version", version=f"pccl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_arguments(command)
        command.set_defaults(run=run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command; the exit code is 1 where pccl has an error to tell."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PCCLError as error:
        print(f"pccl {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
