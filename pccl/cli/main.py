"""The `pccl` command: one module for each sub-command, imported only when it is used.

So a master starts quickly, even on a machine without numpy.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module

from pccl import __version__
from pccl.cli.terminal import Refused, complain
from pccl.errors import PCCLError
from pccl.runtime.config import Config
from pccl.runtime.signals import ended_by, interrupt

COMMANDS = {  # name -> its help
    "master": "serve as the master of a run",
    "run": "run copies of a program on this machine, and restart those that die",
    "chaos": "run copies of a program under faults, and check that the run survives",
    "keys": "make the keys of an encrypted run",
    "demo": "train a small GPT over several peers while one is killed and another joins",
    "bench": "measure collectives, in the manner of nccl-tests",
    "status": "print the state of a run, as its master sees it",
    "top": "show a run in the terminal, refreshed every second",
    "replay": "show which peers waited for which, from a master's event log",
    "cflags": "print what a C compiler needs for programs that use pccl",
    "libs": "print what a linker needs for C programs that use pccl",
    "plan": "recommend settings for a model, its machines and their links",
    "doctor": "check this machine, and its connection to a master",
    "completion": "print a script that completes these commands",
}
# the module of a command, with `add_arguments` and `run`; by default pccl.cli.NAME
MODULES = {
    "master": "pccl.master", "top": "pccl.cli.status",
    "cflags": "pccl.cli.flags", "libs": "pccl.cli.flags",
}  # fmt: skip


EXAMPLES = """examples:
  pccl demo                                      a small model on four processes, one of them killed
  pccl master --listen-address 0.0.0.0:48148     on a machine that all others reach
  pccl run -n 8 --master HOST -- python train.py
  pccl status HOST:8080                          where the master has --http 0.0.0.0:8080
  pccl doctor HOST"""


def parser(*asked: str) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of these commands."""
    top = argparse.ArgumentParser(
        prog="pccl",
        description="Fault-tolerant collective communications for training over the internet.",
    )
    top.epilog = EXAMPLES
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("--version", action="version", version=f"pccl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in asked:
            module = import_module(MODULES.get(name, f"pccl.cli.{name}"))
            command.set_defaults(run=module.run, parser=command)
            module.add_arguments(command)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        The exit code: 1 if what it checks is bad, 2 if it cannot do its work.
    """
    argv = sys.argv[1:] if argv is None else argv
    asked = next((word for word in argv if not word.startswith("-")), "")
    try:
        try:
            return _run(asked, argv)
        finally:
            print(end="", flush=True)  # else Python does it at its end, and complains
    except BrokenPipeError:  # the reader of the output has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
    except (PCCLError, OSError, Refused) as error:
        complain(asked, error)
    except ModuleNotFoundError as error:
        complain(asked, f"it needs {error.name}: pip install {error.name}")
    except ValueError:
        try:
            Config.from_env()
        except ValueError as error:
            complain(asked, error)
        else:
            raise
    except KeyboardInterrupt:
        return 130
    return 2


def _run(asked: str, argv: list[str]) -> int:
    if not argv:
        parser().print_help()
        return 0
    args, unknown = parser(asked).parse_known_args(argv)
    if unknown:  # argparse itself would show the usage of all commands
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    with ended_by(interrupt):
        return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
