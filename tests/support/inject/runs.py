"""Runs of a master and three peers, each with one fault, one after the other.

    LD_PRELOAD=fail.so python runs.py      reads faults as JSON, a line each; answers each likewise

Each run forks its processes off this one, which has no threads: so they start at once. First three
peers take steps together; then a newcomer joins, then a peer leaves, and then all end. All that are
without a fault must get so far, within LIMIT_S; a master that has died is started again, as an
operator would. The process with the fault may end with an error, but must end.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer
from faults import Fault

LIMIT_S = float(os.environ.get("RUN_LIMIT_S", "30"))
STACKS_S = 1.0  # for a process that hangs to say where
INTERVAL_S = 0.01
GRACE_S = 2.0  # for a process with a fault to take part, if it can
LEAVER = {"peer2": 1}  # who leaves where that peer has the fault; else peer 2


class StandStill(Exception):
    """A run that does not come where it should."""


@dataclass
class Child:
    """A process of a run, as the driver sees it."""

    role: str
    pid: int
    pipe: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None  # as waitpid says it
    rest: bytes = b""

    @property
    def world(self) -> int:
        """How many took part in its last step."""
        steps = [report for report in self.reports if "step" in report]
        return int(steps[-1]["world"]) if steps else 0

    def has(self, key: str) -> bool:
        return any(key in report for report in self.reports)

    def last(self, key: str) -> Any:
        return next((each[key] for each in reversed(self.reports) if key in each), None)


class Run:
    """A master and its peers; one has a fault."""

    def __init__(self, fault: Fault, directory: Path) -> None:
        self._fault = fault
        self._directory = directory
        self._signs = mmap.mmap(-1, 64)
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._ended_masters: list[Child] = []
        self._address = "127.0.0.1:0"
        self._until = time.monotonic() + LIMIT_S
        self._grace_until = 0.0
        self._ending = False

    # ---- processes ----

    def _start(self, role: str, fault: Fault | None = None) -> Child:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(ours)
                fault = fault or self._fault
                status = peer.begin(
                    role, self._address, self._signs, theirs, str(self._directory), fault
                )
            finally:
                os._exit(status)
        os.close(theirs)
        os.set_blocking(ours, False)
        child = self._children[role] = Child(role, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _start_master(self, fault: Fault | None = None) -> None:
        self._start("master", fault)

    def _read(self, child: Child) -> None:
        try:
            data = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(child.pipe)
            os.close(child.pipe)
            _, child.status = os.waitpid(child.pid, 0)
            return
        *lines, child.rest = (child.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                child.reports.append(json.loads(line))
            elif child.role == "master" and b"listening on" in line:
                self._address = line.decode().split()[-1]
                child.reports.append({"listening": self._address})

    def _pump(self) -> None:
        for key, _ in self._selector.select(0.05):
            self._read(key.data)
        master = self._children["master"]
        if master.status is not None and not self._ending:
            self._ended_masters.append(master)
            if len(self._ended_masters) > 1:
                raise StandStill("the master without a fault has ended")
            del self._children["master"]
            self._start_master(Fault("nobody", "memory"))

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        while not done():
            self._pump()
            for child in self._healthy():
                error = child.last("error")
                if error is not None:
                    raise StandStill(f"{child.role}: {error}: {child.last('text')}")
            if time.monotonic() > self._until:
                raise StandStill(f"after {LIMIT_S:g} s: {what}")

    def _healthy(self) -> list[Child]:
        return [
            child
            for child in self._children.values()
            if child.role not in ("master", self._fault.at)
        ]

    # ---- the story ----

    def play(self) -> None:
        """All of it.

        Raises:
            StandStill: somebody without a fault has not got where it should.
        """
        self._start_master()
        self._wait("the master does not listen", lambda: self._children["master"].has("listening"))
        for number in range(3):
            self._start(f"peer{number}")
        self._grace_until = time.monotonic() + GRACE_S
        self._wait("the first peers do not take steps together", lambda: self._together())
        self._start("newcomer")
        self._grace_until = time.monotonic() + GRACE_S
        self._wait("the newcomer takes no steps with the others", lambda: self._together())
        leaver = f"peer{LEAVER.get(self._fault.at, 2)}"
        self._signs[peer.LEAVE + int(leaver[-1])] = 1
        self._wait(f"{leaver} does not leave", lambda: self._children[leaver].status is not None)
        counts = {child.role: len(child.reports) for child in self._healthy()}
        stay = [child for child in self._healthy() if child.role != leaver]
        self._wait(
            "those that stay take no more steps",
            lambda: all(len(child.reports) > counts[child.role] + 8 for child in stay),
        )
        self._signs[peer.FINISH] = 1
        self._wait("not all end", lambda: all(c.status is not None for c in self._peers()))
        self._ending = True
        master = self._children["master"]
        if master.status is None:
            os.kill(master.pid, signal.SIGTERM)
        self._wait("the master does not end", lambda: master.status is not None)

    def _peers(self) -> list[Child]:
        return [child for child in self._children.values() if child.role != "master"]

    def _together(self) -> bool:
        """Whether all peers that run take steps together; but those with faults may be missing."""
        healthy = self._healthy()
        concerned = self._children.get(self._fault.at)
        running = [child for child in self._peers() if child.status is None]
        missed = concerned in running and time.monotonic() < self._grace_until
        return all(child.world >= len(running if missed else healthy) for child in healthy)

    def close(self) -> dict[str, str]:
        """Ends all processes. Returns what those that were still there stood in."""
        stacks = {}
        left = [child for child in self._children.values() if child.status is None]
        for child in left:
            os.kill(child.pid, signal.SIGUSR1)
        until_s = time.monotonic() + STACKS_S
        for child in left:  # the last line of a dump is that of the program
            while not self.log(child.role).rstrip().endswith("in <module>"):
                if time.monotonic() > until_s:
                    break
                select.select([], [], [], INTERVAL_S)
        for child in self._children.values():
            if child.status is None:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                os.close(child.pipe)
                stacks[child.role] = self.log(child.role)
        self._selector.close()
        self._signs.close()
        return stacks

    def log(self, role: str) -> str:
        path = self._directory / f"{role}.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    # ---- what is to be seen in the end ----

    def disagreement(self) -> str:
        """Whether two peers had different outcomes of one step, or a wrong one."""
        outcomes: dict[int, tuple[int, int]] = {}
        for child in self._peers():
            for report in child.reports:
                if "step" not in report:
                    continue
                outcome = report["world"], report["value"]
                if outcomes.setdefault(report["step"], outcome)[1] != outcome[1]:
                    return f"step {report['step']}: {outcome} and {outcomes[report['step']]}"
        return ""

    def result(self) -> dict[str, Any]:
        """How it has gone."""
        concerned = self._children.get(self._fault.at)
        if self._fault.at == "master" and self._ended_masters:
            concerned = self._ended_masters[0]
        how = "never started"
        if concerned is not None:
            how = _how(concerned.status)
            if concerned.has("error"):
                how = f"{concerned.last('error')}: {concerned.last('text')}"
        longest = [(child.last("longest"), child.role) for child in self._peers()]
        return {
            "fault": self._fault.record(),
            "what": str(self._fault),
            "how": how,
            "seen": concerned.last("seen") if concerned is not None else None,
            "longest": max(((*each, role) for each, role in longest if each), default=None),
            "restarted": len(self._ended_masters),
            "disagreement": self.disagreement(),
            "log": self.log(self._fault.at),
        }


def _how(status: int | None) -> str:
    if status is None:
        return "runs"
    code = os.waitstatus_to_exitcode(status)
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


def run(fault: Fault) -> dict[str, Any]:
    """One run."""
    os.environ["PCCL_TRANSPORT"] = "tcp" if fault.tcp else "auto"
    if fault.tcp:
        os.environ["PCCL_ADVERTISE"] = "localhost"
    else:
        os.environ.pop("PCCL_ADVERTISE", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        one = Run(fault, Path(directory))
        stood = ""
        try:
            one.play()
        except StandStill as error:
            stood = str(error)
        stacks = one.close()
        found = one.result()
    return {**found, "stood": stood, "stacks": stacks, "seconds": time.monotonic() - began}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(run(Fault(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
