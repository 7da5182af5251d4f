"""`pccl top`: refreshes in a terminal what `pccl status` prints."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from pccl.cli.arguments import option, whole_number
from pccl.cli.status import add_address, ask, lines
from pccl.cli.status import shown as styled

BEGIN, END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, without a cursor
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    option(parser, "--interval", "SECONDS", whole_number(1, 3600), "from one look to the next", 1)


def run(args: argparse.Namespace) -> int:
    """Shows it until Ctrl-C; the exit code is 1 where the first answer does not come."""
    if not sys.stdout.isatty():
        raise OSError("it needs a terminal; pccl status prints the same once")
    shown = list(lines(ask(*args.address).status))
    state = ""
    try:
        sys.stdout.write(BEGIN)
        while True:
            _draw([state, *shown] if state else shown)
            time.sleep(args.interval)
            try:
                shown, state = list(lines(ask(*args.address).status)), ""
            except OSError as error:  # what was shown last stays there
                since = state.partition(": ")[0] or f"since {time.strftime('%H:%M:%S')}"
                state = f"{since}: {error}"
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(END)
        sys.stdout.flush()


def _draw(shown: list[str]) -> None:
    """Cuts lines and the end of the run to what fits."""
    columns, rows = shutil.get_terminal_size()
    if len(shown) > rows:
        shown = [*shown[: rows - 1], f"and {len(shown) - rows + 1} more lines"]
    # at the last column, some terminals would clear what was written there
    text = "\n".join(styled(line, columns - 1) + REST_OF_LINE for line in shown)
    sys.stdout.write(HOME + text + REST_OF_SCREEN)
    sys.stdout.flush()
