"""What measurements share: options as in nccl-tests, and processes that send results over pipes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from pccl.cli.arguments import master, output, whole_number

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes from text such as 4096, 4K or 256M. Raises argparse.ArgumentTypeError."""
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 4096, 4K, 256M or 1G")
    return int(number) * unit


def add_sizes(parser: argparse.ArgumentParser, begin: str, end: str, factor: int) -> None:
    """Adds -b, -e and -f with these defaults."""
    parser.add_argument(
        "-b", "--minbytes", type=size, default=begin, metavar="SIZE", help="smallest (%(default)s)"
    )
    parser.add_argument(
        "-e", "--maxbytes", type=size, default=end, metavar="SIZE", help="largest (%(default)s)"
    )
    parser.add_argument(
        "-f",
        "--stepfactor",
        type=whole_number(2),
        default=factor,
        metavar="N",
        help="from one size to the next (%(default)s)",
    )


def add_iterations(parser: argparse.ArgumentParser, iterations: int, warmups: int) -> None:
    """Adds -n and -w with these defaults."""
    parser.add_argument(
        "-n",
        "--iters",
        type=whole_number(1),
        default=iterations,
        metavar="N",
        help="timed iterations of each size; the table shows their median (%(default)s)",
    )
    parser.add_argument(
        "-w",
        "--warmup_iters",
        type=whole_number(0),
        default=warmups,
        metavar="N",
        help="iterations before those that are timed (%(default)s)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds --peers and --master: which processes measure together."""
    parser.add_argument(
        "--peers",
        type=whole_number(2, PEERS_MAX),
        default=2,
        metavar="N",
        help="processes (%(default)s)",
    )
    parser.add_argument(
        "--master",
        type=master,
        metavar="HOST[:PORT]",
        help="be one of the peers of a run on several machines, whose master is there",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds -J."""
    parser.add_argument(
        "-J", "--json", type=output, metavar="FILE", help="write the results here too"
    )


def sizes(args: argparse.Namespace) -> list[int]:
    """The sizes in bytes that -b, -e and -f ask for."""
    found = []
    nbytes = args.minbytes
    while nbytes <= args.maxbytes:
        found.append(nbytes)
        nbytes *= args.stepfactor
    return found


PEERS_MAX = 16  # sums of so many values below 16 are exact in bfloat16
LEAVE_S = 10.0  # for the processes to end by themselves after the last result


class BenchError(Exception):
    """A process could not measure; the text says why."""


@contextmanager
def processes(
    number: int, work: Callable[..., None], *arguments: object
) -> Iterator[list[Connection]]:
    """Starts processes that run work(i, *arguments, connection); gives the other ends."""
    context = multiprocessing.get_context("spawn")
    started = []
    results = []
    try:
        for index in range(number):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(index, *arguments, sender), daemon=True)
            process.start()
            sender.close()  # the process has its own, so that its end is the end of the pipe
            started.append(process)
            results.append(receiver)
        yield results
        for process in started:
            process.join(LEAVE_S)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()


def collect(results: Sequence[Connection]) -> list[Any]:
    """One result of every process. Raises BenchError if one sends text instead, or nothing."""
    found: dict[int, Any] = {}
    waiting = dict(enumerate(results))
    while waiting:
        ready = wait(waiting.values())
        for number in [number for number, result in waiting.items() if result in ready]:
            try:
                message = waiting.pop(number).recv()
            except EOFError:
                raise BenchError(f"process {number} ended before it had measured all") from None
            if isinstance(message, str):
                raise BenchError(f"process {number}: {message}")
            found[number] = message
    return [found[number] for number in range(len(results))]


def follow_parent() -> None:
    """In such a process: ends when the parent does, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
