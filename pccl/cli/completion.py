"""`pccl completion`: a script for a shell, made by shtab, that completes commands and options."""

from __future__ import annotations

import argparse
from pathlib import Path

from pccl.cli.arguments import option, output

SHELLS = {  # what turns completion on
    "bash": 'eval "$(pccl completion bash)"                     # in ~/.bashrc',
    "zsh": "pccl completion zsh > DIRECTORY-OF-fpath/_pccl     # before compinit in ~/.zshrc",
    "fish": "pccl completion fish > ~/.config/fish/completions/pccl.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["use:", *(f"  {use}" for use in SHELLS.values())])
    option(parser, "shell SHELL", ", ".join(SHELLS), choices=list(SHELLS))


def run(args: argparse.Namespace) -> int:
    import shtab

    from pccl.cli.main import COMMANDS
    from pccl.cli.main import parser as parser_of

    parser = parser_of(*COMMANDS)
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Completes file names for options that take one, and for the program of `pccl run`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below, files)
        elif (
            action.type in (Path, output)
            or action.metavar in ("FILE", "DIR")
            or action.nargs == argparse.REMAINDER
        ):
            action.complete = files  # type: ignore[attr-defined]
