"""`pccl replay`: tells from a master's event log who waited for whom, checks it, and exports it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pccl.cli.arguments import output
from pccl.cli.replay.source import Case, Check, Source
from pccl.cli.replay.story import Story, Teller, Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl replay`."""
    parser.add_argument("log", type=Path, metavar="LOG", help="what the master's --event-log says")
    parser.add_argument(
        "--longer-than",
        type=_seconds,
        default=0.1,
        metavar="SECONDS",
        help="leave out calls in which nobody waited for longer, unless they failed (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="feed the log to the master's state machine, and compare what it does",
    )
    parser.add_argument(
        "--to-test",
        type=output,
        metavar="FILE",
        help="write a test for pytest that feeds the log to the state machine, up to the first "
        "exception",
    )
    parser.add_argument(
        "--trace", type=output, metavar="FILE", help="write a trace for Perfetto or Chrome (JSON)"
    )


def run(args: argparse.Namespace) -> int:
    """Tells, or checks; the exit code is 1 if the log is damaged or a replay differs."""
    source = Source(args.log)
    check = Check() if args.check else None
    case = None if args.to_test is None else Case()
    teller = Teller(args.longer_than)
    trace = None if args.trace is None else Trace()
    story = Story()
    for line in source.lines():
        happened = story.tell(line)
        if check is None:
            _print(teller.tell(line.unix_s, happened))
        else:
            check.feed(line)
        if trace is not None:
            trace.add(line.unix_s, happened)
        if case is not None:
            case.add(line)
    ended = story.end()
    if trace is not None:
        trace.end(source.last_unix_s, ended)
        args.trace.write_bytes(trace.encode())
    if case is not None:
        args.to_test.write_text(case.text(args.log), encoding="utf-8")
    if check is None:
        _print(teller.end(ended))
    else:
        print(check.summary())
    for problem in source.problems:
        print(f"pccl replay: {problem}", file=sys.stderr)
    return int(source.damaged or (check is not None and check.failed))


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
