"""Injects a schedule of faults into a program, and records what happens."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pccl.cli.chaos import kinds
from pccl.cli.chaos.kinds import Fault, Kind, Schedule, Target
from pccl.cli.chaos.network import Undo
from pccl.cli.chaos.stage import Copy, Stage, burn
from pccl.cli.chaos.watch import Follower, Metrics, Watch, measure
from pccl.cli.processes import held

TICK_S = 0.005
MOMENT_MAX_S = 1.0  # a fault waits no longer for its moment
SIZES_S = 1.0  # between two looks at the memory and descriptors of the master
SETTLE_S = 3.0  # after this time the master knows whether a copy is still there
NOBODY = "there was no copy for it"


@dataclass
class Done:
    """A fault that has happened, or was skipped."""

    fault: Fault  # as it was drawn
    at_s: float  # when it happened
    over_s: float | None = None  # when it was undone
    copy: int = -1  # the copy that it hit; -1: the master, or all copies
    moment: str = ""  # the moment that it waited for, if that came
    skipped: str = ""  # why it did not happen


@dataclass
class Chronicle:
    """The events of a run; all times are of the monotonic clock."""

    began_s: float = field(default_factory=time.monotonic)
    faults_s: float = 0.0  # when they began
    ended_s: float = 0.0
    done: list[Done] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    # descriptors, threads and MiB of the master, from time to time
    sizes: list[tuple[int, int, int]] = field(default_factory=list)


class Program:
    """A program whose copies run under faults, observed only by its master's event log."""

    steered = False  # whether copies read orders from their stdin
    settings: Mapping[str, str] = {}  # settings of the program, saved in the schedule
    environment: Mapping[str, str] = {}  # variables of all processes, besides this one's
    faults: Mapping[str, Kind] = {}  # those that copies inflict on themselves
    curve_dir = ""  # keys, for an encrypted run

    def __init__(
        self,
        title: str,
        copies: int,  # the most that run at once
        words: tuple[list[str], list[str]],  # the command, before the options of a run and after
        command: Sequence[str],  # the command of a copy
        grace_s: float | None = None,  # for copies to end by themselves; None: they are told to
    ) -> None:
        self.title, self.copies, self.words, self.grace_s = title, copies, words, grace_s
        self._command = command

    def begin(self, directory: Path) -> None:
        """A run begins, with its files in that directory."""
        self._alive: set[int] = set()
        self._changed_s = 0.0

    def command(self, number: int, alive: Sequence[Copy]) -> Sequence[str]:
        """The command line of a new copy; `alive` are the others."""
        return self._command

    def observe(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Marks the copies that could go on alone: they are in the run, and have its state.

        All copies are in the run when it has had as many peers for a while and makes progress.
        """
        now_s = time.monotonic()
        alive = {copy.number for copy in copies if copy.ended_s is None}
        if alive != self._alive or any(copy.stopped for copy in copies):
            self._alive, self._changed_s = alive, now_s
        if len(watch.accepted) == len(alive) and watch.last_s > self._changed_s + SETTLE_S:
            for copy in copies:
                if not copy.befell or copy.befell[-1][0] + SETTLE_S < watch.last_s:
                    copy.settled = True

    def group(self, copy: Copy) -> int:
        """The group of a copy: copies of one group share a state."""
        return 0

    def leave(self, copy: Copy) -> None:
        copy.process.signal(signal.SIGTERM)

    def judge(self, directory: Path, director: Director) -> tuple[list[str], Metrics]:
        """The violations of a run that is over, and its speed: each collective is a step."""
        stopping = (kinds.KILL, kinds.KILL_MOST, kinds.RESTART)
        happened = (done for done in director.chronicle.done if not done.skipped)
        faults = [done.at_s for done in happened if done.fault.what in stopping]
        return [], measure(director.watch.collectives_s, faults)


class Director:
    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        table: dict[str, Kind],  # by name
        program: Program,
        bound_s: float,  # the longest time that the run may stand still
        restart_s: float | None,  # until another copy takes the place of one that has ended
        told: Callable[[Done | None], None],  # called with each fault, and with None at each tick
    ) -> None:
        self.watch = Watch()  # what the master's event log says
        self.chronicle = Chronicle()  # what has happened
        self.stage = stage
        self.schedule = schedule
        self._table, self._program, self._told = table, program, told
        self._bound_s, self._restart_s = bound_s, restart_s
        self._replaced = 0  # copies that have ended and were replaced
        self._follower = Follower(stage.event_log)
        self._undos: list[tuple[float, Done, Undo]] = []
        self._restarted_at = 0  # rounds that were done when the master was killed last
        self._master_down = self._finishing = False
        self._sized_s = 0.0

    def run(self, finish_s: float) -> None:
        """Plays all faults. Then tells the copies to end, and kills them after `finish_s`."""
        chronicle, program = self.chronicle, self._program
        try:
            self.stage.start_master()
            for _ in range(self.schedule.copies):
                self._start()
            wanted = self.schedule.copies
            self._until(lambda: len(self.watch.accepted) >= wanted, "has begun", self._bound_s)
            chronicle.faults_s = time.monotonic()
            for fault in self.schedule.faults:
                if not self._wait_for(fault):
                    break
            self._until(lambda: time.monotonic() > chronicle.faults_s + self.schedule.seconds)
            self._calm()
        finally:
            self._undo_all()
            chronicle.ended_s = time.monotonic()
        self._finishing = True
        if program.grace_s is not None:
            self._until(lambda: not self.stage.alive(), "has ended", program.grace_s)
        for copy in self.stage.alive():
            copy.befell.append((time.monotonic(), kinds.LEAVE))
            program.leave(copy)
        give_up_s = time.monotonic() + finish_s
        while self.stage.alive() and time.monotonic() < give_up_s:
            self._tick()
        for copy in self.stage.alive():
            self._broken(f"copy {copy.number} did not end within {finish_s:g} s of being asked to")

    def close(self) -> None:
        self.stage.close()
        self._follower.close()

    def over(self) -> bool:
        """True if nothing is left to disturb, or something was violated."""
        return bool(self.chronicle.violations) or not self.stage.alive()

    # ---- time ----

    def _tick(self) -> None:
        now_s = time.monotonic()
        for line in self._follower.lines():
            self.watch.feed(line)
        for due in [one for one in self._undos if one[0] <= now_s]:
            self._undos.remove(due)
            self._undo(due)
        for copy in self.stage.reap():
            self._note_end(copy)
        if self._restart_s is not None and not self._finishing:
            self._replace(now_s - self._restart_s)
        self._program.observe(self.stage.alive(), self.watch)
        self._note_master(now_s)
        self._note_stall(now_s)
        self._told(None)
        time.sleep(TICK_S)

    def _until(
        self, condition: Callable[[], bool], what: str = "", seconds: float = math.inf
    ) -> bool:
        """Ticks until the condition holds; False if the run is over first, as after a timeout."""
        give_up_s = time.monotonic() + seconds
        while not condition():
            if self.over():
                return False
            if time.monotonic() > give_up_s:
                self._broken(
                    f"{seconds:g} s passed until the run {what}: it has "
                    f"{len(self.watch.accepted)} peers, of {len(self.stage.alive())} copies"
                )
                return False
            self._tick()
        return True

    def _wait_for(self, fault: Fault) -> bool:
        """Waits until the fault is due and its moment has come; then inflicts the fault."""
        due_s = self.chronicle.faults_s + fault.at_s
        if not self._until(lambda: time.monotonic() >= due_s):
            return False
        came = False
        if fault.moment:
            latest_s, moments = time.monotonic() + MOMENT_MAX_S, self.watch.moments
            before_s = moments.get(fault.moment)
            self._until(
                lambda: moments.get(fault.moment) != before_s or time.monotonic() > latest_s
            )
            came = moments.get(fault.moment) != before_s
        if self.over():
            return False
        done = Done(fault, time.monotonic(), moment=fault.moment if came else "")
        self.chronicle.done.append(done)
        self.perform(done)
        self._told(done)
        return True

    def _calm(self) -> None:
        """Ends all faults. Then all living copies must be in the run together, and continue."""
        self._undo_all()
        if not self.stage.alive() and not self.over():
            self._start()
        calm_s = time.monotonic()

        def together() -> bool:
            alive = len(self.stage.alive())
            return len(self.watch.accepted) == alive and self.watch.last_s > calm_s

        self._until(together, "has recovered after the last fault", self._bound_s)

    # ---- faults ----

    def perform(self, done: Done) -> None:
        kind = self._table[done.fault.what]
        undo = None
        if kind.target is Target.COPY:
            undo = self._harm(done, kind)
        elif kind.target is Target.MASTER:
            undo = self._harm_master(done)
        elif done.fault.what == kinds.BURN:
            undo = burn()
        elif done.fault.what == kinds.KILL_MOST:
            self._kill_most(done)
        else:
            self._start_missing(done)
        if undo is not None:
            self._undos.append((done.at_s + done.fault.lasts_s, done, undo))

    def _harm(self, done: Done, kind: Kind) -> Undo | None:
        victims = [copy for copy in self._awake() if not kind.fatal or self.can_spare([copy])]
        if not victims:
            done.skipped = NOBODY
            return None
        copy = victims[int(done.fault.whom * len(victims))]
        done.copy = copy.number
        copy.befell.append((done.at_s, done.fault.what))
        copy.settled &= not kind.fatal
        if done.fault.what == kinds.LEAVE:
            self._program.leave(copy)
            return None
        return self.stage.harm(done.fault.what, copy)

    def _harm_master(self, done: Done) -> Undo | None:
        """Skips a fault until the master has recovered: otherwise the run might never go on."""
        busy = any(self._table[one.fault.what].target is Target.MASTER for _, one, _ in self._undos)
        busy |= self.watch.masters < self.stage.master_starts  # it is about to begin
        restart = done.fault.what == kinds.RESTART
        if busy or (restart and self.watch.rounds == self._restarted_at):
            done.skipped = "the master has not recovered yet"
            return None
        if restart:
            self._restarted_at = self.watch.rounds
            self._master_down = True
        return self.stage.harm_master(done.fault.what)

    def _kill_most(self, done: Done) -> None:
        """Kills all copies except, in each group, one that could go on alone."""
        awake, group = self._awake(), self._program.group
        spared = {group(copy): copy for copy in reversed(awake) if copy.settled}
        victims = [copy for copy in awake if copy not in spared.values()]
        if {group(copy) for copy in self.stage.alive()} - spared.keys() or not victims:
            done.skipped = NOBODY
            return
        for copy in victims:
            copy.befell.append((done.at_s, done.fault.what))
            self.stage.kill(copy)

    def _start_missing(self, done: Done) -> None:
        missing = self.schedule.copies - len(self.stage.alive())
        if missing <= 0:
            done.skipped = "all copies are there"
            return
        for _ in range(missing if done.fault.what == kinds.BURST else 1):
            done.copy = self._start().number

    def _start(self) -> Copy:
        command = self._program.command(len(self.stage.copies), self.stage.alive())
        return self.stage.start(command)

    def _awake(self) -> list[Copy]:
        return [copy for copy in self.stage.alive() if not copy.stopped]

    def can_spare(self, victims: Sequence[Copy]) -> bool:
        """True if another copy of each group could go on without the victims."""
        group = self._program.group
        staying = {group(one) for one in self._awake() if one.settled and one not in victims}
        return {group(victim) for victim in victims} <= staying

    def _undo(self, due: tuple[float, Done, Undo]) -> None:
        _, done, undo = due
        undo()
        done.over_s = time.monotonic()
        if done.fault.what == kinds.RESTART:
            self._master_down = False
        for copy in self.stage.alive():
            if copy.number == done.copy and self._table[done.fault.what].fatal:
                copy.befell.append((done.over_s, f"end of {done.fault.what}"))

    def _undo_all(self) -> None:
        for due in self._undos:
            self._undo(due)
        self._undos.clear()

    def _replace(self, before_s: float) -> None:
        """Starts a copy for each that had ended before that time."""
        ended = [copy.ended_s for copy in self.stage.copies if copy.ended_s is not None]
        late = sum(at_s <= before_s for at_s in ended) - self._replaced
        for _ in range(min(late, self.schedule.copies - len(self.stage.alive()))):
            self._start()
        self._replaced += max(late, 0)

    # ---- violations ----

    def _broken(self, text: str) -> None:
        self.chronicle.violations.append(text)

    def _note_end(self, copy: Copy) -> None:
        status = copy.process.status
        table = {**kinds.KINDS, **self._table}
        excused = any(what in table and table[what].fatal for _, what in copy.befell)
        if status and not copy.by_us and not excused:
            self._broken(
                f"copy {copy.number} ended with status {status}, and nothing had befallen it that "
                f"would excuse that; it printed last:\n{copy.tail()}"
            )

    def _note_master(self, now_s: float) -> None:
        master = self.stage.master
        if master is not None and now_s > self._sized_s + SIZES_S:
            self._sized_s = now_s
            if (size := held(master.pid)) is not None:
                self.chronicle.sizes.append(size)
        down = self._master_down or self.chronicle.violations
        if not down and master is not None and master.poll() is not None:
            log = self.stage.directory / "master.log"
            self._broken(f"the master ended with status {master.status}: see {log}")
        self.chronicle.violations += self.watch.failures
        self.watch.failures.clear()

    def _note_stall(self, now_s: float) -> None:
        if not self.chronicle.faults_s or self.over():
            return
        still_s = now_s - max(self.watch.last_s, self.chronicle.faults_s)
        if still_s > self._bound_s:
            peers = len(self.watch.accepted)
            self._broken(f"no call was answered for {still_s:.0f} s, in a run of {peers} peers")
