"""Reads the diaries of a stress run, and reports broken rules.

    python stress/checker.py DIRECTORY [--bound SECONDS]

It uses only the diaries (diary.py), and does not know the protocol. The rules:

- A collective has the same outcome on all workers that stay.
- A sum contains the contribution of each of its members once.
- The shared state of a revision is the same everywhere, and equals the result of the earlier steps,
  so no step was lost or done twice.
- Revisions never go back. The state starts over only when all its holders are gone.
- No call takes too long, unless its caller was frozen.
- No worker is dropped without a reason.
- No process leaks memory, threads or descriptors.

The exit code is 1 if any rule was broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from diary import (
    DIRECTOR,
    WORKERS,
    Begin,
    End,
    Entry,
    Fault,
    Joined,
    Out,
    Size,
    buffer_of,
    contribution,
    contributors,
    digest_of,
    path_of,
    read,
    workers,
)

from pccl.cli.chaos.report import growth
from pccl.cli.chaos.watch import Metrics, measure

KILLS = {"kill", "kill-all-but-one"}
CUTS = {"cut", "cut-out", "cut-in", "reset"}
STOPPING = KILLS | CUTS | {"freeze", "restart-master", "reset-link"}  # faults that make all wait
DROPPING = CUTS | {"freeze", "no-descriptors"}  # faults after which a worker may be dropped
ENDING = {"reset-link"}  # faults after which a worker may join again
DROPPED_S = 45.0  # so long after such a fault; a later drop has another reason
BEFORE_S = 5.0  # memberships that end so soon one after the other may have the same reason
SLEEPS = {"freeze": "end of freeze"}  # a worker's time stands still, until
GROWTH_MAX = 20, 4, 48  # descriptors, threads, MiB: more is a leak
SIZES_MIN = 8  # of a worker, to be compared


# ---- eras: a shared state starts over when all its holders are gone ----

# A run that loses all workers continues with the next ones from the first step. Earlier steps no
# longer count, so each era is judged separately. But no new era may begin while any worker holds
# the state.

FOREVER_S = float("inf")
Times: TypeAlias = defaultdict[int, list[float]]  # by worker


@dataclass(eq=False)
class Member:
    """A worker from its joining to the end of its membership."""

    worker: int
    group: int = 0
    since_s: float = 0.0
    over_s: float = FOREVER_S  # its end, as the worker has written it
    era: int = 0  # of the group's shared state, which it holds or held; 0 is the first
    held: bool = False  # whether it has ever held it
    syncs: list[tuple[Begin, End]] = field(default_factory=list)  # that ended well


@dataclass
class _Era:
    """An era so far: when each revision was first reached, and the workers that have held one."""

    reached: dict[int, float] = field(default_factory=dict)
    holders: list[Member] = field(default_factory=list)


class Eras:
    """The eras of all groups."""

    def __init__(
        self,
        faults: Sequence[Fault],
        fatal: Collection[str],  # the kinds of faults that end a worker
        dropping: Collection[str],  # those that may end its membership
    ) -> None:
        self._deaths = _times([fault for fault in faults if fault.what in fatal])
        self._excuses = _times([fault for fault in faults if fault.what in {*fatal, *dropping}])

    def tell_apart(self, members: Sequence[Member]) -> Iterator[str]:
        """Gives each member its era. Yields a violation for each era that began while a member
        still held the state of the one before."""
        groups: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            groups[member.group].append(member)
        for group in sorted(groups):
            yield from self._of_group(group, groups[group])

    def _of_group(self, group: int, members: list[Member]) -> Iterator[str]:
        syncs = [(*sync, member) for member in members for sync in member.syncs]
        eras = [_Era()]
        for begin, end, member in sorted(syncs, key=lambda sync: sync[1].at_s):
            if not member.held:
                if self._begins_anew(begin, end, eras[-1]):
                    if holder := self._holder(eras[-1], end.at_s):
                        yield (
                            f"the state of group {group} began anew at revision {end.revision} "
                            f"with worker {member.worker}, while {holder}"
                        )
                    eras.append(_Era())
                member.held, member.era = True, len(eras) - 1
                eras[-1].holders.append(member)
            eras[member.era].reached.setdefault(end.revision, end.at_s)

    def _begins_anew(self, begin: Begin, end: End, era: _Era) -> bool:
        """Whether this first sync of a member cannot be part of the era.

        A revision is reached only when all have begun to synchronize the one before. And a member
        that begins when all holders are gone cannot have received their state.
        """
        later = [at_s for revision, at_s in era.reached.items() if revision > end.revision]
        gone = [self._gone(one, begin.at_s, self._deaths) for one in era.holders]
        return any(at_s < begin.at_s for at_s in later) or (bool(gone) and all(gone))

    def _holder(self, era: _Era, at_s: float) -> str:
        """A member that surely holds the state at that time, in words; empty if there is none."""
        for one in era.holders:
            went_on = any(begin.at_s > at_s for begin, _ in one.syncs)
            if went_on or not self._gone(one, at_s, self._excuses):
                revision = max(end.revision for _, end in one.syncs if end.at_s <= at_s)
                return f"worker {one.worker} held revision {revision}"
        return ""

    @staticmethod
    def _gone(member: Member, at_s: float, times: Times) -> bool:
        """Whether a membership was over at that time; one of its worker's `times` may end it."""
        ends = [end_s for end_s in times[member.worker] if end_s >= member.since_s]
        return min([member.over_s, *ends]) <= at_s


def _times(faults: Sequence[Fault]) -> Times:
    """The times of the faults, by worker."""
    times: Times = defaultdict(list)
    for fault in faults:
        times[fault.worker].append(fault.at_s)
    return times


# ---- the rules ----


@dataclass(frozen=True)
class Rules:
    """The settings of the checker."""

    # The digest of the shared state of a group and revision. If it is unknown, all workers must
    # share one.
    expected: Callable[[int, int], str | None] = lambda group, revision: None
    bound_s: float = 40.0  # the longest time that a call may take
    goodput_min: float = 0.0  # the least share of undisturbed speed
    ending: frozenset[str] = frozenset()  # faults that may end a worker, besides a kill


@dataclass
class Call:
    """A call of a worker."""

    worker: int
    member: Member  # its membership
    begin: Begin
    end: End | None = None
    stayed: bool = False  # whether the worker has ended a later call of the same membership

    @property
    def synchronized(self) -> bool:
        """Whether its worker has held a shared state since."""
        return self.begin.what == "sync" and self.end is not None and self.end.outcome == "done"

    @property
    def era(self) -> tuple[int, int]:
        """The group, and the era of its shared state."""
        return self.member.group, self.member.era


@dataclass
class Life:
    """The history of one worker."""

    members: list[Member] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outs: list[Out] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)


NOTHING = Metrics(0, 0.0, [])


@dataclass
class Report:
    violations: list[str] = field(default_factory=list)  # of rules, in words
    metrics: Metrics = NOTHING  # each revision that was reached is a step


class Checker:
    """Checks the diaries of a run's workers, with the faults of its director."""

    def __init__(
        self, diaries: Mapping[int, Sequence[Entry]], faults: Sequence[Entry], rules: Rules
    ) -> None:
        self._rules = rules
        self._faults = [fault for fault in faults if isinstance(fault, Fault)]
        self._report = Report()
        self._lives = {worker: self._live(worker, diaries[worker]) for worker in sorted(diaries)}
        members = [member for life in self._lives.values() for member in life.members]
        eras = Eras(self._faults, KILLS, DROPPING | ENDING | rules.ending)
        self._report.violations += eras.tell_apart(members)

    def check(self) -> Report:
        for worker, life in self._lives.items():
            self._check_end(worker, life)
            self._check_times(worker, life)
            self._check_revisions(worker, life)
            self._check_sizes(worker, life)
        self._check_states()
        for key, calls in self._reductions().items():
            self._check_outcome(key, calls)
            self._check_sum(key, calls)
            self._check_restored(key, calls)
        self._measure()
        return self._report

    # ---- the entries of a worker ----

    def _live(self, worker: int, entries: Sequence[Entry]) -> Life:
        life = Life()
        open_: dict[tuple[str, int], Call] = {}  # by what and tag
        ended: list[Call] = []  # of this membership, and not followed by another one yet
        member = Member(worker)
        life.members.append(member)
        at_s = float("-inf")
        for entry in entries:
            if entry.at_s < at_s:
                self._broken(f"worker {worker}: its clock goes back, or its entries are mixed up")
            at_s = entry.at_s
            match entry:
                case Begin():
                    key = entry.what, entry.tag
                    if key in open_ or {what for what, _ in open_} - {entry.what}:
                        self._broken(f"worker {worker}: a call begins within another: {entry}")
                    open_[key] = Call(worker, member, entry)
                    life.calls.append(open_[key])
                case End():
                    call = open_.pop((entry.what, entry.tag), None)
                    if call is None:
                        self._broken(f"worker {worker}: a call ends that has not begun: {entry}")
                        continue
                    call.end = entry
                    if call.synchronized:
                        member.syncs.append((call.begin, entry))
                    for one in ended:
                        assert one.end is not None
                        one.stayed = one.end.at_s <= call.begin.at_s
                    ended = [call, *(one for one in ended if not one.stayed)]
                case Out():
                    life.outs.append(entry)
                    member.over_s = min(member.over_s, entry.at_s)
                    open_, ended = {}, []
                case Joined():
                    open_, ended = {}, []
                    member = Member(worker, entry.group, entry.at_s)
                    life.members.append(member)
                case Size():
                    life.sizes.append(entry)
        return life

    def _befell(self, worker: int, *kinds: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.worker == worker and fault.what in kinds]

    def _broken(self, text: str) -> None:
        self._report.violations.append(text)

    # ---- one worker ----

    def _check_end(self, worker: int, life: Life) -> None:
        """Checks that it left at the end or was killed, and was dropped only with a reason."""
        starved = bool(self._befell(worker, "no-descriptors"))
        outs = [out for out in life.outs if not (starved and "INTERNAL_ERROR" in out.why)]
        ended = len(outs) < len(life.outs)  # it was told why
        ended |= bool(outs) and outs[-1].how in ("left", "dropped", "cut off")
        if not ended and not self._befell(worker, *KILLS, *self._rules.ending):
            last = life.outs[-1] if life.outs else "nothing"
            self._broken(f"worker {worker} was not killed, and did not leave: it wrote {last}")
        for out in outs:
            if out.how == "failed":
                self._broken(f"worker {worker} has failed: {out.why}{self._before(out)}")
            faults = self._befell(worker, *DROPPING, *SLEEPS.values())
            excused = any(0 <= out.at_s - fault.at_s <= DROPPED_S for fault in faults)
            if out.how == "dropped" and not excused:
                last = f"{faults[-1].what} at {faults[-1].at_s:.1f} s" if faults else "no fault"
                self._broken(
                    f"worker {worker} was dropped at {out.at_s:.1f} s, and not cut off before "
                    f"({last}): {out.why}"
                )

    def _before(self, out: Out) -> str:
        """Other memberships that ended shortly before, as text."""
        return "".join(
            f"; worker {worker} was {other.how} {out.at_s - other.at_s:.2f} s before: {other.why}"
            for worker, life in self._lives.items()
            for other in life.outs
            if other.how != "left" and 0 < out.at_s - other.at_s < BEFORE_S
        )

    def _check_times(self, worker: int, life: Life) -> None:
        kinds = {*SLEEPS, *SLEEPS.values()}
        frozen = sorted(self._befell(worker, *kinds), key=lambda fault: fault.at_s)
        for call in life.calls:
            if call.end is None:
                continue
            begin_s, end_s = call.begin.at_s, call.end.at_s
            slept_s = 0.0
            for index, fault in enumerate(frozen):
                if fault.what in SLEEPS:
                    until_s = frozen[index + 1].at_s if index + 1 < len(frozen) else end_s
                    slept_s += max(0.0, min(end_s, until_s) - max(begin_s, fault.at_s))
            took_s = end_s - begin_s - slept_s
            if took_s > self._rules.bound_s:
                self._broken(
                    f"worker {worker}: {call.begin.what} of revision {call.begin.revision} took "
                    f"{took_s:.1f} s"
                )

    def _check_revisions(self, worker: int, life: Life) -> None:
        known, era = -1, (-1, -1)
        for call in life.calls:
            if call.synchronized and call.end is not None:
                known, era = (known if call.era == era else -1), call.era
                if call.end.revision < known:
                    self._broken(
                        f"worker {worker}: revision {call.end.revision} follows revision {known}"
                    )
                known = call.end.revision

    def _check_sizes(self, worker: int, life: Life) -> None:
        sizes = [(size.descriptors, size.threads, size.mib) for size in life.sizes]
        self._report.violations += growth(f"worker {worker}", sizes, GROWTH_MAX, SIZES_MIN)

    # ---- the shared state ----

    def _check_states(self) -> None:
        found: defaultdict[tuple[int, int], dict[int, tuple[str, int]]] = defaultdict(dict)
        for worker, life in self._lives.items():
            for call in life.calls:
                end = call.end
                if not call.synchronized or end is None:
                    continue
                digests = found[call.era]
                digest, first = digests.setdefault(end.revision, (end.digest, worker))
                if digest != end.digest:
                    self._broken(
                        f"workers {first} and {worker} have different states of revision "
                        f"{end.revision}"
                    )
        for (group, _), digests in found.items():
            if self._rules.expected(group, 0) is not None:
                self._check_known(group, digests)

    def _check_known(self, group: int, digests: dict[int, tuple[str, int]]) -> None:
        """Checks the states of a group whose program is known."""
        if max(digests) + 1 != len(digests):
            missing = sorted(set(range(max(digests))) - digests.keys())[:5]
            self._broken(f"nobody ever held the revisions {missing}")
        for revision, (digest, worker) in sorted(digests.items()):
            if digest != self._rules.expected(group, revision):
                self._broken(
                    f"the state of revision {revision}, as worker {worker} has it, is not what the "
                    "steps before it make: one was lost, done twice, or wrong"
                )
                break  # all later ones are wrong too

    # ---- reductions ----

    def _reductions(self) -> dict[tuple[int, ...], list[Call]]:
        """The matching calls, by revision, attempt, group, era and tag."""
        found: defaultdict[tuple[int, ...], list[Call]] = defaultdict(list)
        for life in self._lives.values():
            for call in life.calls:
                if call.begin.what == "reduce":
                    begin = call.begin
                    key = begin.revision, begin.attempt, *call.era, begin.tag
                    found[key].append(call)
        return found

    def _check_outcome(self, key: tuple[int, ...], calls: list[Call]) -> None:
        outcomes: dict[str, int] = {}
        for call in calls:
            if call.end is not None and call.stayed:
                outcomes[call.end.outcome] = call.worker
        if len(outcomes) > 1:
            self._broken(f"two outcomes of attempt {key[1]} of step {key[0]}: {outcomes}")

    def _check_sum(self, key: tuple[int, ...], calls: list[Call]) -> None:
        where = f"attempt {key[1]} of step {key[0]}"
        entered = {call.worker % WORKERS: call.begin for call in calls}
        done = [call for call in calls if call.end is not None and call.end.outcome == "done"]
        sums = {call.end.sum for call in done if call.end is not None and call.stayed}
        if len(sums) > 1:
            self._broken(f"{where} has different sums")
        for worker, begin in entered.items():
            if begin.gives != contribution(worker):
                self._broken(f"{where}: worker {worker} gave {begin.gives}")
        for call in done:
            end = call.end
            assert end is not None
            counted = contributors(end.sum)
            twice = [worker for worker, times in counted.items() if times > 1]
            if twice:
                self._broken(f"{where}: the contributions of workers {twice} count several times")
            strangers = counted.keys() - entered.keys()
            if strangers:
                self._broken(f"{where}: workers {sorted(strangers)} count, and did not enter it")
            if call.worker % WORKERS not in counted:
                self._broken(f"{where}: worker {call.worker}'s own contribution is missing")
            if len(counted) != end.world:
                self._broken(
                    f"{where}: worker {call.worker} has a sum of {len(counted)} contributions in a "
                    f"world of {end.world}"
                )
            if end.digest != digest_of(buffer_of(end.sum, call.begin.repeats)):
                self._broken(f"{where}: worker {call.worker}'s result is not the same all over")

    def _check_restored(self, key: tuple[int, ...], calls: list[Call]) -> None:
        """Checks that a worker has its own contribution back after a failure."""
        for call in calls:
            begin, end = call.begin, call.end
            if end is None or end.outcome == "done":
                continue
            if end.digest != digest_of(buffer_of(begin.gives, begin.repeats)):
                self._broken(
                    f"attempt {key[1]} of step {key[0]}: worker {call.worker}'s contribution was "
                    "not restored"
                )

    # ---- speed ----

    def _measure(self) -> None:
        """Measures the speed, as a share of the speed without faults, and the recoveries."""
        reached: dict[tuple[int, ...], float] = {}
        for life in self._lives.values():
            for call in life.calls:
                end = call.end
                if call.synchronized and end is not None:
                    key = *call.era, end.revision
                    reached[key] = min(reached.get(key, end.at_s), end.at_s)
        stopping = [fault.at_s for fault in self._faults if fault.what in STOPPING]
        metrics = self._report.metrics = measure(list(reached.values()), stopping)
        if metrics.steps > 1 and metrics.goodput < self._rules.goodput_min:
            self._broken(
                f"the goodput is {metrics.goodput:.2f}, and should be at least "
                f"{self._rules.goodput_min:.2f}"
            )


def check(directory: Path, rules: Rules) -> Report:
    """Checks the diaries in a directory. Raises OSError or msgspec.DecodeError: one is damaged."""
    diaries = {worker: read(path_of(directory, worker)) for worker in workers(directory)}
    report = Checker(diaries, read(directory / DIRECTOR), rules).check()
    if not report.metrics.steps:
        report.violations.append("nothing has happened")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bound", type=float, default=Rules.bound_s, help="seconds for a call")
    args = parser.parse_args()
    report = check(args.directory, Rules(bound_s=args.bound))
    print(report.metrics.words())
    for text in report.violations:
        print(f"VIOLATION: {text}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
