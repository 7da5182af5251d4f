"""One peer of `pccl bench --master`: measures with processes on other machines.

Each process runs the same command. They meet at the master, and exchange their measurements by a
collective, so that all print the same table. With `--device cuda`, LOCAL_RANK says which GPU of its
machine a process uses; by default the first one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

import pccl
from pccl.cli.bench import places
from pccl.cli.bench.peer import Job, Measured, join, measure


def measured(master: str, job: Job) -> Iterator[list[Measured]]:
    """What all peers have measured, for one size after the other.

    Args:
        master: HOST:PORT.

    Raises:
        PCCLError: the master cannot be reached, a peer was lost, or others measure something else.
    """
    place = places.of_process(job.device, int(os.environ.get("LOCAL_RANK", "0")))
    with join(master, job) as comm:
        for count in job.counts:
            yield _exchange(comm, measure(comm, job, count, place))


def _exchange(comm: pccl.Communicator, own: Measured) -> list[Measured]:
    """The measurements of all peers; numbers below 2**53 survive as float64."""
    names = list(own.times_s)
    checked = bool(own.wrong)
    counts = [*own.sent.values(), *own.wrong.values()]
    times = [own.times_s[name] for name in names]
    row = np.array([*counts, *np.ravel(times)], np.float64)
    found = []
    for values in comm.all_gather(row):
        sent, rest = values[: len(names)], values[len(names) :]
        wrong, rest = (rest[: len(names)], rest[len(names) :]) if checked else ([], rest)
        found.append(
            Measured(
                dict(zip(names, rest.reshape(len(names), -1).tolist(), strict=True)),
                dict(zip(names, map(int, wrong), strict=checked)),
                dict(zip(names, map(int, sent), strict=True)),
            )
        )
    return found
