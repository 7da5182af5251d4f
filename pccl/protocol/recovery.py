"""What a master that was restarted can conclude from the peers that come back. Pure functions.

The journal only says who was there. All else is in the heads of the peers, and whatever no
survivor knows cannot matter to any survivor:

- A collective whose outcome some peer knows has that outcome. Otherwise it is as if its members had
  just been asked: those who hold the result have voted yes, those who gave up or have never heard
  of its start have voted no, those who still work are interrupted.
- A round whose result some peer knows is over: who still stands in it has missed the result only
  (each result carries the number of its round). A round whose result nobody knows begins anew.
- The group's revision is that of the latest synchronisation that somebody knows the result of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m

NUMBER_MAX = 1 << 62  # of peers, collectives and rounds, by far
EPOCH_MAX = 1 << 31
WEIGHTS_MAX = 1 << 31
INCARNATION_SHIFT = 32  # sequence numbers of an incarnation of the master begin with its number,
EPOCH_SHIFT = 16  # and its epochs too: the last ones may be known to nobody who comes back


@dataclass(slots=True)
class Unresolved:
    """A collective of the time before."""

    group: int
    tag: int
    members: set[int]  # that have come back
    open: set[int]  # of those, who do not know the outcome
    unheard: set[int] = field(default_factory=set)  # who have never heard of its start
    votes: dict[int, bool] = field(default_factory=dict)
    outcome: bool | None = None


@dataclass(slots=True)
class GroupBefore:
    """What a group was."""

    epoch: int = 0
    syncs: int = 0
    revision: int | None = None
    last_plan: int = 0
    holders: set[int] = field(default_factory=set)
    short: int = 0
    rings: tuple[m.Ring, ...] = ()


@dataclass(slots=True)
class Before:
    """The run as it was, as far as anybody who is left knows."""

    accepted: dict[int, m.PeerInfo]
    groups: dict[int, GroupBefore]
    collectives: dict[int, Unresolved]
    missed: list[tuple[int, m.Small]]
    topology: int
    pendings: int
    were_pending: bool
    optimized: int
    next_peer: int
    incarnation: int


def plausible(resume: m.Resume) -> bool:
    """Whether numbers that grow from these will still fit into messages."""
    numbers = [
        resume.last_seq,
        resume.done.topology,
        resume.done.pending,
        resume.done.optimized,
        resume.done.sync,
        resume.info.peer,
        *(info.peer for info in resume.known),
        *(small.seq for small in resume.small),
    ]
    weights = sum(ring.weight for ring in resume.rings)  # of rings that may become one
    return max(numbers) < NUMBER_MAX and resume.epoch < EPOCH_MAX and weights < WEIGHTS_MAX


def reconstruct(resumes: Mapping[int, m.Resume]) -> Before:
    """The run as it was, from what the peers that are back have said."""
    known = {info.peer for resume in resumes.values() for info in resume.known}
    asked = max((resume.done for resume in resumes.values()), key=lambda done: done.pending)
    return Before(
        {number: resumes[number].info for number in sorted(resumes)},
        _groups(resumes),
        _collectives(resumes),
        _missed(resumes),
        topology=max(resume.done.topology for resume in resumes.values()),
        pendings=asked.pending,
        were_pending=asked.were_pending,
        optimized=max(resume.done.optimized for resume in resumes.values()),
        next_peer=max(known | resumes.keys()) + 1,
        incarnation=max(
            max(resume.last_seq >> INCARNATION_SHIFT, resume.epoch >> EPOCH_SHIFT)
            for resume in resumes.values()
        ),
    )


def _missed(resumes: Mapping[int, m.Resume]) -> list[tuple[int, m.Small]]:
    """Small results that some have and others lack: to whom to tell which, in order."""
    found: dict[int, tuple[int, m.Small]] = {}
    for number in sorted(resumes):
        for small in resumes[number].small:
            if number in small.members:
                found.setdefault(small.seq, (resumes[number].info.group, small))
    return [
        (number, small)
        for _, (group, small) in sorted(found.items())
        for number in sorted(set(small.members) & resumes.keys())
        if resumes[number].last_seq < small.seq and resumes[number].info.group == group
    ]


def outdated(resumes: Mapping[int, m.Resume]) -> set[int]:
    """Peers that the run has gone on without: the latest plan of their group does not have them."""
    latest: dict[int, m.Resume] = {}
    for resume in resumes.values():
        group = resume.info.group
        if group not in latest or resume.epoch > latest[group].epoch:
            latest[group] = resume
    return {
        number
        for number, resume in resumes.items()
        if number not in {info.peer for info in latest[resume.info.group].known}
    }


def _groups(resumes: Mapping[int, m.Resume]) -> dict[int, GroupBefore]:
    groups: dict[int, GroupBefore] = {}
    for resume in resumes.values():
        group = groups.setdefault(resume.info.group, GroupBefore())
        if resume.epoch >= group.epoch:
            group.epoch, group.rings = resume.epoch, resume.rings
        group.syncs = max(group.syncs, resume.done.sync)
    for number, resume in resumes.items():
        group, done = groups[resume.info.group], resume.done
        if done.sync == group.syncs and group.syncs:
            group.revision, group.last_plan, group.short = done.revision, done.plan, done.short
        # A peer that does not know of the last one stands in it: it missed the result.
        if done.holds or done.sync < group.syncs:
            group.holders.add(number)
    for group in groups.values():
        if group.short:
            group.holders.clear()
        if not group.holders:
            group.revision = None
    return groups


def _collectives(resumes: Mapping[int, m.Resume]) -> dict[int, Unresolved]:
    found: dict[int, Unresolved] = {}
    for number, resume in resumes.items():
        group = resume.info.group
        for open_ in resume.open:
            unresolved = found.setdefault(open_.seq, Unresolved(group, open_.tag, set(), set()))
            if number not in open_.members or unresolved.group != group:
                continue  # that cannot be
            members = set(open_.members) & resumes.keys()
            unresolved.members |= {n for n in members if resumes[n].info.group == group}
            unresolved.open.add(number)
            if open_.vote is not None:
                unresolved.votes[number] = open_.vote
    for resume in resumes.values():
        for seq, ok in resume.finished:
            if seq in found:
                found[seq].outcome = ok
    for seq, unresolved in found.items():
        for number in unresolved.members - unresolved.open:
            unresolved.votes[number] = False
            if resumes[number].last_seq < seq:
                unresolved.unheard.add(number)
    return found
