"""`pccl top`: shows in a terminal what `pccl status` prints, and refreshes it."""

from __future__ import annotations

import argparse
import sys
import time

from pccl.cli.arguments import option, whole_number
from pccl.cli.status import add_address, ask, lines
from pccl.cli.terminal import Screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    kind = whole_number(1, 3600)
    option(parser, "--interval", "SECONDS", kind, "time between two refreshes", 1)


def run(args: argparse.Namespace) -> int:
    """Shows the run until Ctrl-C; the exit code is 1 if the first answer does not come."""
    if not sys.stdout.isatty():
        raise OSError("it needs a terminal; pccl status prints the same once")
    shown = list(lines(ask(*args.address).status))
    state = ""
    try:
        with Screen() as screen:
            while True:
                screen.show([state, *shown] if state else shown)
                time.sleep(args.interval)
                try:
                    shown, state = list(lines(ask(*args.address).status)), ""
                except OSError as error:  # the last answer stays on the screen
                    since = state.partition(": ")[0] or f"since {time.strftime('%H:%M:%S')}"
                    state = f"{since}: {error}"
    except KeyboardInterrupt:
        return 0
