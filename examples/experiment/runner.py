"""Makes one run: starts its peers, kills some if it must, and collects their reports."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import pccl
from experiment.runs import (
    Averaged,
    Finished,
    Loaded,
    Point,
    Report,
    Result,
    Settings,
    Task,
    Variant,
    decode,
    encode,
)
from pccl.cli.processes import Fleet
from pccl.support.closing import Closing


class Pool(Closing):
    """Gives a process to each peer of a run; none outlives `close`."""

    def __init__(self) -> None:
        self._fleet = Fleet("experiment.peer", str(Path(__file__).parents[1]))
        self._idle: list[int] = []
        self._processes: dict[int, int] = {}  # by the number of the peer
        self._started = 0

    def close(self) -> None:
        """Ends them all."""
        self._fleet.close()

    def start(self, number: int, task: str) -> None:
        """Has a process load what it needs to be peer `number`."""
        if not self._idle:
            self._fleet.start(self._started)
            self._idle.append(self._started)
            self._started += 1
        process = self._processes[number] = self._idle.pop()
        self._fleet.say(process, task)

    def go(self, number: int) -> None:
        """Lets a peer join the run."""
        self._fleet.say(self._processes[number], "go")

    def kill(self, number: int) -> None:
        """Ends a peer as a power cut would; nothing more is heard of it."""
        self._fleet.kill(self._processes.pop(number))

    def free(self, number: int) -> None:
        """A peer has finished: its process may be another one."""
        self._idle.append(self._processes.pop(number))

    def hear(self, timeout_s: float) -> tuple[int, str | int]:
        """The number of a peer and a line that it has said, or its exit status.

        Raises:
            queue.Empty: no process has written a line in time.
        """
        while True:
            process, news = self._fleet.heard.get(timeout=timeout_s)
            for number, of_peer in self._processes.items():
                if of_peer == process:
                    return number, news

    def errors(self, number: int) -> str:
        """The end of what its process has written to stderr."""
        return self._fleet.errors(self._processes[number])


_SILENCE_S = 180.0


class Failed(Exception):
    """A run has not come to its end."""


def run(pool: Pool, settings: Settings, variant: Variant, tell: Callable[[Point], None]) -> Result:
    """Makes one run; `tell` hears of each point of its curve.

    Raises:
        Failed: a peer failed, or the peers do not hold the same bits.
    """
    with pccl.MasterNode("127.0.0.1:0") as master:
        observed = Run(pool, Task(master.address, settings, variant), tell)
        observed.follow()
    return observed.result()


class Run:
    """Follows a run, kills peers, and lets others take their place.

    Each peer has a slot, that is, a part of each batch. Peer 0 is never killed. The others are
    killed in turn. The process that takes over a slot has been loaded before, like a machine on
    standby, because the time of a start on this machine would not be that on others.
    """

    def __init__(self, pool: Pool, task: Task, tell: Callable[[Point], None]) -> None:
        self._pool = pool
        self._task = task
        self._tell = tell
        self._peers = task.variant.peers
        self._last = task.variant.rounds or task.settings.rounds
        self._living: set[int] = set()
        self._loading: set[int] = set()
        self._ready: list[int] = []  # loaded, and not let go yet
        self._in_slot = list(range(self._peers))
        self._finished: dict[int, Finished] = {}
        self._tx_bytes: dict[int, int] = {}
        self._points: list[Point] = []
        self._rounds: list[Averaged] = []
        self._parameters = 0
        self._kills = 0
        self._killed_at = 0.0  # in rounds or seconds
        for number in self._in_slot:
            self._start(number)

    def follow(self) -> None:
        """Follows the run until all peers have ended."""
        last_s = time.monotonic()
        while self._living:
            try:
                number, news = self._pool.hear(timeout_s=1.0)
            except queue.Empty:
                if time.monotonic() - last_s > _SILENCE_S:
                    raise Failed(f"no peer has said anything for {_SILENCE_S:.0f} s") from None
                continue
            last_s = time.monotonic()
            if isinstance(news, int):
                errors = self._pool.errors(number)
                raise Failed(f"peer {number} has ended with exit status {news}\n{errors}")
            self._heard(number, decode(news))

    def result(self) -> Result:
        """The result of the run."""
        if len({report.digest for report in self._finished.values()}) != 1:
            raise Failed("the peers do not hold the same bits at the end")
        return Result(
            settings=self._task.settings,
            variant=self._task.variant,
            parameters=self._parameters,
            validation=self._finished[0].validation,
            tx_bytes=sum(self._tx_bytes.values()) / self._peers,
            curve=tuple(self._points),
            rounds=tuple(self._rounds),
            kills=self._kills,
            load=os.getloadavg()[0],
        )

    def _start(self, number: int) -> None:
        self._living.add(number)
        self._loading.add(number)
        self._pool.start(number, encode(msgspec.structs.replace(self._task, number=number)))

    def _heard(self, number: int, report: Report) -> None:
        match report:
            case Loaded(parameters):
                self._loaded(number, parameters)
            case Point():
                self._points.append(report)
                self._tell(report)
            case Averaged(tx_bytes=tx_bytes):
                self._tx_bytes[number] = tx_bytes
                if number == 0:
                    self._rounds.append(report)
                    self._kill_if_due(report)
            case Finished(tx_bytes=tx_bytes):
                self._tx_bytes[number] = tx_bytes
                self._finished[number] = report
                self._living.discard(number)
                self._pool.free(number)
                if number == 0:
                    self._dismiss_strangers()

    def _loaded(self, number: int, parameters: int) -> None:
        self._parameters = parameters
        self._loading.discard(number)
        self._ready.append(number)
        if number < self._peers and not self._loading:
            while self._ready:
                self._pool.go(self._ready.pop())
            self._have_spare()

    def _have_spare(self) -> None:
        churn = self._task.variant.churn
        if churn.every_rounds or churn.every_s:
            self._start(self._in_slot[self._next_slot] + self._peers)

    @property
    def _next_slot(self) -> int:
        return 1 + self._kills % (self._peers - 1)

    def _kill_if_due(self, report: Averaged) -> None:
        churn = self._task.variant.churn
        now, every = float(report.outer_step), float(churn.every_rounds)
        if churn.every_s:
            now, every = report.seconds, churn.every_s
        late = report.outer_step > self._last - 3
        if not every or now < self._killed_at + every or late or not self._ready:
            return
        slot, spare = self._next_slot, self._ready.pop()
        self._pool.kill(self._in_slot[slot])
        self._living.discard(self._in_slot[slot])
        self._pool.go(spare)
        self._in_slot[slot] = spare
        self._kills += 1
        self._killed_at += every
        self._have_spare()

    def _dismiss_strangers(self) -> None:
        """Kills peers that have come too late for any round: they would wait for another run."""
        for number in self._living - self._tx_bytes.keys():
            self._pool.kill(number)
            self._living.discard(number)
