"""Follows a run by its master's event log, and measures it."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.eventlog import Gap, Line, Told
from pccl.runtime.server.eventlog import Head

READ_BYTES = 1 << 20
DECODER: msgspec.json.Decoder[Head | Line | Gap] = msgspec.json.Decoder(Head | Line | Gap)
VOTES = (
    m.TopologyVote,
    m.PendingVote,
    m.OptimizeVote,
    m.StartVote,
    m.SyncVote,
    m.FinishVote,
    m.FetchedVote,
)
ANSWERS = ("SyncResult", "TopologyResult", "OptimizeResult")
MOMENTS = {
    "between-votes": "some have entered a call, and others have not",
    "admission": "a newcomer waits",
    "collective": "a collective is under way",
    "transfer": "shared state is under way",
    "optimization": "links are measured",
}


class Follower:
    """Reads an event log as it grows, through all its files. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._rest = b""

    def lines(self) -> Iterator[Line]:
        """The lines written since the last call."""
        while data := self._read():
            *whole, self._rest = (self._rest + data).split(b"\n")
            for text in whole:
                with contextlib.suppress(msgspec.DecodeError):  # torn: `pccl replay` reports it
                    if text and isinstance(item := DECODER.decode(text), Line):
                        yield item

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> bytes:
        try:
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
            if data := self._file.read(READ_BYTES):
                return data
            renamed = not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return b""
        if not renamed:
            return b""
        rest = self._file.read(READ_BYTES)  # written before that
        if not rest:
            self.close()
            self._rest = b""
            return self._read()
        return rest


def moments(line: Line) -> set[str]:
    """The names of the moments that a line begins."""
    found = set()
    said = getattr(line.input, "message", None)
    if isinstance(line.input, inputs.Received) and isinstance(said, VOTES) and not line.told:
        found.add("between-votes")
    for told in line.told:
        if told.say == "Welcome":
            found.add("admission")
        elif told.say == "Started" and not told.final:
            found.add("collective")
        elif told.say == "SyncPlan" and told.fetches:
            found.add("transfer")
        elif told.say == "Probe":
            found.add("optimization")
    return found


class Watch:
    """The state of a run, from its master's event log; times are of the monotonic clock."""

    def __init__(self) -> None:
        self.masters = 0  # masters that have begun
        self.accepted: set[int] = set()  # peers
        self.collectives_s: list[float] = []  # when they were committed
        self.rounds = 0  # calls of any kind that were answered
        self.last_s = float("-inf")  # when the last one was
        self.moments: dict[str, float] = {}  # the last time of each
        self.failures: list[str] = []

    def feed(self, line: Line) -> None:
        if isinstance(line.input, inputs.Began):
            self.masters += not line.input.why
            self.accepted.clear()  # the earlier peers come back
        if line.failed:
            self.failures.append(f"the master failed: {line.failed}")
        for moment in moments(line):
            self.moments[moment] = line.at_s
        for told in line.told:
            if told.say in ("Admitted", "Resumed"):
                self.accepted.update(told.to)
        if any(told.ok and _is_end(told) for told in line.told):
            self.collectives_s.append(line.at_s)
        if any(_is_answer(told) for told in line.told):
            self.rounds += 1
            self.last_s = line.at_s
        self.accepted.difference_update(line.gone)


def _is_end(told: Told) -> bool:
    return told.say == "Finished" or (told.say == "Started" and told.final)


def _is_answer(told: Told) -> bool:
    return told.say == "PendingResult" or (told.ok and (_is_end(told) or told.say in ANSWERS))


# ---- figures of a run ----


class Metrics(NamedTuple):
    steps: int  # how many there were
    goodput: float  # the share of undisturbed speed that was reached
    recoveries_s: list[float]  # for each fault, how long it took to the next step

    def words(self) -> str:
        text = f"{self.steps} steps; goodput {self.goodput:.0%}"
        if times := sorted(self.recoveries_s):
            p95_s = times[min(len(times) - 1, int(len(times) * 0.95))]
            text += f"; {len(times)} recoveries: median {statistics.median(times):.2f} s"
            text += f", p95 {p95_s:.2f} s"
        return text


def measure(steps_s: Sequence[float], faults_s: Sequence[float]) -> Metrics:
    """The metrics of a run, from the times of its steps, and of faults that may stop all peers."""
    moments = sorted(steps_s)
    recoveries = []
    for at_s in faults_s:
        later = bisect.bisect(moments, at_s)
        if later < len(moments):
            recoveries.append(moments[later] - at_s)
    times = [after - before for before, after in itertools.pairwise(moments)]
    goodput = 0.0
    if times and sum(times) > 0:
        goodput = min(1.0, statistics.median(times) * len(times) / sum(times))
    return Metrics(len(moments), goodput, recoveries)
