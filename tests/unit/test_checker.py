"""The checker of stress runs: it finds nothing in good diaries, and each fault in bad ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "stress"))
import checker
import diary
from checker import Checker, Rules
from diary import Begin, End, Entry, Fault, Joined, Out, Size

STEPS = 12
WORKERS = 3
LOST_AT = 7  # in this step worker 2 is killed
RULES = Rules(lambda group, revision: f"state {revision}", bound_s=5.0, goodput_min=0.5)
Diaries = dict[int, list[Entry]]
replace = msgspec.structs.replace


def sums(workers: list[int]) -> diary.Words:
    return diary.words_of(sum(diary.buffer_of(diary.contribution(n), 1) for n in workers))


def good() -> tuple[Diaries, list[Entry]]:
    """Three workers; one is frozen and then killed, which costs the others an attempt."""
    diaries: Diaries = {worker: [Joined(0.0)] for worker in range(WORKERS)}
    at_s = 1.0
    faults: list[Entry] = []
    for revision in range(STEPS):
        alive = list(range(WORKERS if revision <= LOST_AT else WORKERS - 1))
        attempts = [(alive, "lost"), (alive[:-1], "done")] if revision == LOST_AT else []
        for worker in alive:
            diaries[worker] += [
                Begin(at_s, "sync", revision),
                End(at_s + 0.2, "done", revision, f"state {revision}"),
                Size(at_s + 0.2, 50, 9, 100 + worker),
            ]
        at_s += 0.5
        for attempt, (workers, outcome) in enumerate(attempts or [(alive, "done")]):
            repeats = 1 + revision % 2
            for worker in workers:
                gives = diary.contribution(worker)
                total = gives if outcome == "lost" else sums(workers)
                digest = diary.digest_of(diary.buffer_of(total, repeats))
                diaries[worker].append(Begin(at_s, "reduce", revision, attempt, repeats, gives))
                if outcome == "done" or worker != workers[-1]:
                    world = len(workers)
                    end = End(at_s + 0.4, outcome, revision, digest, total, world, what="reduce")
                    diaries[worker].append(end)
            if outcome == "lost":
                last = workers[-1]
                faults += [Fault(at_s + 0.1, "freeze", last), Fault(at_s + 0.2, "kill", last)]
            at_s += 0.5
    for worker in range(WORKERS - 1):
        diaries[worker].append(Out(at_s, "left"))
    return diaries, faults


def violations(diaries: Diaries, faults: list[Entry]) -> list[str]:
    return Checker(diaries, faults, RULES).check().violations


def test_a_good_run_has_no_violations() -> None:
    report = Checker(*good(), RULES).check()
    assert report.violations == []
    assert report.metrics.steps == STEPS
    assert report.metrics.recoveries_s == [pytest.approx(1.1), pytest.approx(1.0)]
    assert 0.9 < report.metrics.goodput < 1.0


def at(entries: list[Entry], kind: type, which: Callable[[Entry], bool] = lambda _: True) -> int:
    return next(i for i, entry in enumerate(entries) if isinstance(entry, kind) and which(entry))


def reduced(entry: Entry) -> bool:
    """The end of a reduction without a loss, followed by others."""
    return isinstance(entry, End) and entry.outcome == "done" and bool(entry.sum)


def changed(worker: int, which: Callable[[Entry], bool], **fields: object) -> object:
    """A mutation of one entry that ends a call."""

    def mutate(diaries: Diaries, faults: list[Entry]) -> None:
        index = at(diaries[worker], End, which)
        diaries[worker][index] = replace(diaries[worker][index], **fields)

    return mutate


def total_of(worker: int, total: tuple[int, ...]) -> object:
    """One worker has another sum, all over its buffer."""
    digest = diary.digest_of(diary.buffer_of(total, 1))
    return changed(worker, reduced, sum=total, digest=digest)


def forgets_to_leave(diaries: Diaries, faults: list[Entry]) -> None:
    diaries[0].pop()


def is_dropped(diaries: Diaries, faults: list[Entry]) -> None:
    diaries[0].insert(-1, Out(diaries[0][-1].at_s, "dropped", "why not"))


def is_dropped_long_after_a_fault(diaries: Diaries, faults: list[Entry]) -> None:
    at_s = diaries[0][-1].at_s
    faults.append(Fault(at_s - 100.0, "no-descriptors", 0))
    diaries[0].insert(-1, Out(at_s, "dropped", "why not"))


def fails(diaries: Diaries, faults: list[Entry]) -> None:
    diaries[0].insert(-1, Out(diaries[0][-1].at_s, "failed", "AssertionError"))


def grows(diaries: Diaries, faults: list[Entry]) -> None:
    for index, entry in enumerate(diaries[1]):
        if isinstance(entry, Size):
            diaries[1][index] = replace(entry, descriptors=50 + 4 * index)


def goes_back(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], End, lambda entry: entry.digest == "state 5")
    diaries[0][index] = replace(diaries[0][index], revision=3, digest="state 3")


def skips_a_revision(diaries: Diaries, faults: list[Entry]) -> None:
    for entries in diaries.values():
        index = at(entries, End, lambda entry: entry.digest == "state 5")
        del entries[index - 1 : index + 1]


def gives_something_else(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], Begin, lambda entry: bool(entry.gives))
    diaries[0][index] = replace(diaries[0][index], gives=diary.contribution(5))


def does_not_enter(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[2], End, reduced)
    del diaries[2][index - 1 : index + 1]


def enters_twice(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], Begin)
    diaries[0].insert(index, diaries[0][index])


def ends_twice(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], End)
    diaries[0].insert(index, diaries[0][index])


def takes_long(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], Begin)
    diaries[0] = [
        entry if i <= index else replace(entry, at_s=entry.at_s + 6.0)
        for i, entry in enumerate(diaries[0])
    ]


def mixes_entries_up(diaries: Diaries, faults: list[Entry]) -> None:
    index = at(diaries[0], Size)
    diaries[0][index] = replace(diaries[0][index], at_s=-1.0)


def slows_down(diaries: Diaries, faults: list[Entry]) -> None:
    for entries in diaries.values():
        entries[:] = [
            replace(entry, at_s=entry.at_s + (30.0 if entry.at_s > 5.9 else 0.0))
            for entry in entries
        ]


def is_not_killed(diaries: Diaries, faults: list[Entry]) -> None:
    faults.clear()


MUTATIONS = {
    "was not killed, and did not leave: it wrote nothing": forgets_to_leave,
    "worker 2 was not killed, and did not leave": is_not_killed,
    "and not cut off before (no fault): why not": is_dropped,
    "and not cut off before (no-descriptors at": is_dropped_long_after_a_fault,
    "has failed: AssertionError": fails,
    "worker 1 has grown from": grows,
    "revision 3 follows revision 4": goes_back,
    "nobody ever held the revisions [5]": skips_a_revision,
    "worker 0 gave ((0, 1024),)": gives_something_else,
    "did not enter it": does_not_enter,
    "a call begins within another": enters_twice,
    "a call ends that has not begun": ends_twice,
    "sync of revision 0 took 6.2 s": takes_long,
    "its clock goes back": mixes_entries_up,
    "the goodput is 0.": slows_down,
    "different states of revision": changed(1, lambda e: not e.sum, digest="another"),
    "two outcomes of attempt 0": changed(1, reduced, outcome="lost"),
    "has different sums": total_of(1, sums([1, 2])),
    "count several times": total_of(1, sums([0, 1, 1])),
    "own contribution is missing": total_of(1, sums([0, 2])),
    "in a world of 2": changed(1, reduced, world=2),
    "worker 0's contribution was not restored": changed(
        0, lambda entry: isinstance(entry, End) and entry.outcome == "lost", digest="another"
    ),
    "is not the same all over": changed(1, reduced, digest="another"),
}


@pytest.mark.parametrize("said", MUTATIONS)
def test_each_fault_is_found(said: str) -> None:
    diaries, faults = good()
    MUTATIONS[said](diaries, faults)
    found = violations(diaries, faults)
    assert any(said in text for text in found), found


def test_a_step_that_is_lost_or_done_twice_by_all_is_found() -> None:
    """All have the same state, but not the one that the steps make."""
    diaries, faults = good()
    for entries in diaries.values():
        entries[:] = [
            replace(entry, digest="state 4")
            if isinstance(entry, End) and entry.digest == "state 5"
            else entry
            for entry in entries
        ]
    found = violations(diaries, faults)
    assert len(found) == 1 and "one was lost, done twice, or wrong" in found[0]


def test_the_time_of_a_freeze_does_not_count() -> None:
    diaries, faults = good()
    takes_long(diaries, faults)
    at_s = diaries[0][at(diaries[0], Begin)].at_s
    frozen = [Fault(at_s + 0.1, "freeze", 0), Fault(at_s + 5.0, "end of freeze", 0)]
    assert not any("took" in text for text in violations(diaries, faults + frozen))


def test_contributions_are_found_in_a_sum() -> None:
    workers = [0, 1, 31, 32, 100, 2047]
    assert diary.contributors(sums(workers)) == dict.fromkeys(workers, 1)
    assert diary.contributors(sums([5, 5, 6])) == {5: 2, 6: 1}
    assert diary.contributors(sums([diary.WORKERS + 7])) == {7: 1}


def test_diaries_are_read_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diaries, faults = good()
    named = {diary.path_of(tmp_path, worker): diaries[worker] for worker in diaries}
    for path, entries in {tmp_path / diary.DIRECTOR: faults, **named}.items():
        written = diary.Diary(path)
        for entry in entries:
            written.write(entry)
        written.close()
    with diary.path_of(tmp_path, 2).open("ab") as torn:
        torn.write(b'{"type":"be')
    assert diary.read(diary.path_of(tmp_path, 2)) == diaries[2]
    assert checker.check(tmp_path, RULES).violations == []
    assert "12 steps; goodput 9" in checker.check(tmp_path, RULES).metrics.words()


def test_a_worker_without_descriptors_may_fail_with_that_error() -> None:
    for why, found in (("INTERNAL_ERROR: too many open files", 0), ("AssertionError", 2)):
        diaries, faults = good()
        at_s = diaries[0][-1].at_s
        diaries[0][-1] = Out(at_s, "failed", why)
        exhausted = [*faults, Fault(at_s - 0.1, "no-descriptors", 0)]
        assert len(violations(diaries, exhausted)) == found
        assert len(violations(diaries, faults)) == 2


def test_a_worker_may_be_dropped_while_it_is_frozen() -> None:
    diaries, faults = good()
    at_s = diaries[0][-1].at_s
    diaries[0][-1] = Out(at_s, "dropped", "its heartbeats stopped")
    assert violations(diaries, [*faults, Fault(at_s - 0.1, "freeze", 0)]) == []


# ---- a state that begins anew ----


def era(
    workers: list[int], at_s: float, revisions: range, diaries: Diaries, joined: bool = True
) -> float:
    """The lines of workers that hold these revisions, one after the other, and their times."""
    for worker in workers if joined else ():
        diaries.setdefault(worker, []).append(Joined(at_s))
    for revision in revisions:
        digest = diary.digest_of(diary.buffer_of(sums(workers), 1))
        for worker in workers:
            gives = diary.contribution(worker)
            diaries[worker] += [
                Begin(at_s + 0.1, "sync", revision if revision > revisions[0] else 0),
                End(at_s + 0.2, "done", revision, f"state {revision}"),
                Begin(at_s + 0.3, "reduce", revision, 0, 1, gives),
                End(
                    at_s + 0.4, "done", revision, digest, sums(workers), len(workers), what="reduce"
                ),
            ]
        at_s += 0.5
    return at_s


def leave(workers: list[int], at_s: float, diaries: Diaries) -> None:
    for worker in workers:
        diaries[worker].append(Out(at_s, "left"))


def began_anew(diaries: Diaries, faults: list[Entry]) -> list[str]:
    """All violations, which are of one kind."""
    found = violations(diaries, faults)
    assert all("began anew at revision" in text for text in found), found
    return found


def test_a_run_that_loses_all_holders_is_followed_by_another() -> None:
    """Whether they were killed, have left, or were dropped when they were cut off."""
    for ends in ("kill", "left", "dropped"):
        diaries: Diaries = {}
        over_s = era([0, 1], 1.0, range(3), diaries)
        faults: list[Entry] = [Fault(over_s, "kill", 0), Fault(over_s, "kill", 1)]
        if ends != "kill":
            faults = [Fault(over_s, "cut", 0), Fault(over_s, "cut", 1)]
            for worker in (0, 1):
                diaries[worker].append(Out(over_s + 0.1, ends, "cut off"))
        last_s = era([2, 3, 4], over_s + 0.2, range(5), diaries)
        leave([2, 3, 4], last_s, diaries)
        report = Checker(diaries, faults, RULES).check()
        assert report.violations == []
        assert report.metrics.steps == 3 + 5


def test_a_worker_that_joins_again_may_hold_the_state_of_another_run() -> None:
    diaries: Diaries = {}
    over_s = era([0, 1], 1.0, range(3), diaries)
    faults: list[Entry] = [Fault(over_s, "reset-link", worker) for worker in (0, 1)]
    for worker in (0, 1):
        diaries[worker].append(Out(over_s + 0.1, "cut off"))
    last_s = era([0, 1], over_s + 0.2, range(2), diaries)
    leave([0, 1], last_s, diaries)
    assert violations(diaries, faults) == []


def test_a_run_of_one_revision_is_distinguished_from_the_next() -> None:
    diaries: Diaries = {}
    over_s = era([0, 1], 1.0, range(1), diaries)
    faults: list[Entry] = [Fault(over_s, "kill", 0), Fault(over_s, "kill", 1)]
    leave([2], era([2], over_s + 0.1, range(2), diaries), diaries)
    report = Checker(diaries, faults, RULES).check()
    assert report.violations == [] and report.metrics.steps == 1 + 2


def test_a_new_run_beside_holders_of_the_old_state_is_one_violation() -> None:
    for goes_on in (True, False):
        diaries: Diaries = {}
        over_s = era([0, 1], 1.0, range(3), diaries)
        last_s = era([2, 3], over_s, range(4), diaries)
        if goes_on:
            era([0, 1], over_s, range(3, 5), diaries, joined=False)
        leave([0, 1, 2, 3], last_s + 1.0, diaries)
        (found,) = began_anew(diaries, [])
        assert "worker 2, while worker 0 held revision " in found
        frozen: list[Entry] = [Fault(2.0, "freeze", worker) for worker in (0, 1)]
        assert len(began_anew(diaries, frozen)) == goes_on, "who may be dropped, but was not"


def test_a_newcomer_that_receives_an_old_state_is_found() -> None:
    diaries: Diaries = {}
    over_s = era([0, 1], 1.0, range(4), diaries)
    diaries[2] = [
        Joined(over_s),
        Begin(over_s + 0.1, "sync", 0),
        End(over_s + 0.2, "done", 2, "state 2"),
    ]
    leave([0, 1, 2], over_s + 1.0, diaries)
    found = violations(diaries, [])
    assert any("began anew at revision 2 with worker 2" in text for text in found)
    assert any("nobody ever held the revisions [0, 1]" in text for text in found)


def test_late_entries_of_a_frozen_worker_belong_to_its_run() -> None:
    diaries: Diaries = {}
    over_s = era([0, 1], 1.0, range(6), diaries)
    diaries[2] = [
        Joined(1.0),
        Begin(1.1, "sync", 0),
        End(over_s, "done", 0, "state 0"),
        Out(over_s, "dropped", "its heartbeats stopped"),
    ]
    leave([0, 1], over_s, diaries)
    faults: list[Entry] = [Fault(1.15, "freeze", 2), Fault(over_s, "end of freeze", 2)]
    assert violations(diaries, faults) == []


def test_violations_are_found_in_the_second_run_too() -> None:
    for mutate, said in (
        (changed(3, reduced, world=2), "in a world of 2"),
        (changed(3, lambda entry: not entry.sum, digest="another"), "different states of revision"),
        (total_of(3, sums([2, 3])), "has different sums"),
    ):
        diaries: Diaries = {}
        over_s = era([0, 1], 1.0, range(3), diaries)
        faults: list[Entry] = [Fault(over_s, "kill", 0), Fault(over_s, "kill", 1)]
        leave([2, 3, 4], era([2, 3, 4], over_s, range(3), diaries), diaries)
        mutate(diaries, faults)  # type: ignore[operator]
        assert any(said in text for text in violations(diaries, faults))
