"""What every run under faults is judged by: its master's event log, and what the master holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pccl.cli.chaos.director import Director
from pccl.cli.replay.check import Check
from pccl.cli.replay.source import Source

GROWTH_MAX = 40, 4, 64  # descriptors, threads, MiB of the master: more is a leak
SIZES_MIN = 20  # of one master, to be compared


def master_violations(event_log: Path, director: Director) -> Iterator[str]:
    """Another master must do the same again, and this one must not have grown."""
    try:
        source = Source(event_log)
        check = Check()
        for line in source.lines():
            check.feed(line)
    except OSError as error:
        yield f"the master's event log cannot be read: {error}"
        return
    if source.damaged:
        yield f"the master's event log is damaged: {'; '.join(source.problems)}"
    if check.failed:
        yield f"another master, given the same events, decides otherwise: {check.summary()}"
    yield from growth(director.chronicle.sizes)


def growth(sizes: list[tuple[int, int, int]]) -> Iterator[str]:
    """Whether a process holds more at the end than in the middle of its life."""
    if len(sizes) < SIZES_MIN:
        return
    half, last = len(sizes) // 2, len(sizes) // 4
    early, late = (
        tuple(max(column) for column in zip(*some, strict=True))
        for some in (sizes[last:half], sizes[-last:])
    )
    if any(b - a > limit for a, b, limit in zip(early, late, GROWTH_MAX, strict=True)):
        yield f"the master has grown from {early} to {late} descriptors, threads and MiB"
