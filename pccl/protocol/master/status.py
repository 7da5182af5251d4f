"""A snapshot of a run: its peers and groups, and the peers that each call waits for.

It contains no secrets (no run number, nonce, password or key), so its reader cannot take part in
the run. Texts that quote peers are printable. If there are many waits, it has only the oldest, so
its size is limited whatever the peers call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pccl.protocol.master.clients import FIRST, Clients
from pccl.protocol.master.collectives import Running
from pccl.protocol.master.effects import plain
from pccl.protocol.master.run import Run
from pccl.protocol.master.synchronizations import Sync
from pccl.protocol.master.tally import Counts, stuck_since_s
from pccl.protocol.master.topology import Optimization
from pccl.protocol.messages import Ring
from pccl.protocol.rounds import PENDING, TOPOLOGY, Kind, Round
from pccl.protocol.topology import hops
from pccl.version import __version__

WAITS_MAX = 32  # rounds shown, and running collectives shown
CALLS_MAX = 4  # calls shown for each peer
MISSING_MAX = 32  # missing peers shown for each wait
CLIENTS_MAX = 256  # clients shown


class Phase(StrEnum):
    ADMISSION = "admission"  # a newcomer waits to be admitted
    ENTERING = "entering"  # not all have entered the call
    RUNNING = "running"  # not all have finished the collective
    RECEIVING = "receiving"  # not all have received the shared state
    MEASURING = "measuring"  # links are being measured


class CallStatus(Struct, frozen=True):
    """A call that a peer is in."""

    call: str  # the call, with its arguments
    phase: Phase  # its phase
    waited_s: float  # how long the peer has been in it; if it is RUNNING, how long all have
    # the share of a RUNNING or RECEIVING call that the peer has finished, as it last reported.
    # Peers report every few seconds in calls that take long. null: no report.
    done: float | None = None


class PeerStatus(Struct, frozen=True):
    """A peer."""

    peer: int  # its number
    host: str  # the host where others reach it
    port: int  # the port where others reach it
    group: int  # the number of its group
    accepted: bool  # whether it is accepted; otherwise it is pending
    here_s: float  # seconds since it joined, or since the master was restarted
    silent_s: float  # seconds since its last message. It sends none while it computes.
    synchronized: bool  # whether it took part in its group's last synchronization
    calls: tuple[CallStatus, ...]  # its current calls, or the first of many
    # seconds since anything came over its connection, including heartbeats. They continue while it
    # computes, and stop when its process or network does. null: the master's system does not tell.
    heartbeat_s: float | None = None
    name: str = ""  # the name that it gave itself
    # how long the first of the others waited for it to enter a call: a moving average over its last
    # calls, about ten of them
    late_s: float = 0.0
    late_total_s: float = 0.0  # the sum of these times over all its calls
    awaited_s: float = 0.0  # how long others have been waiting for it now; 0: no peer waits for it


class WaitStatus(Struct, frozen=True):
    """A call that some peers are in and that waits for others."""

    call: str  # the call, with its arguments
    group: int | None  # the group that makes it; null: the whole run
    phase: Phase  # its phase
    waited_s: float  # how long the first peer has been in it; if it is RUNNING, how long all have
    entered: int  # the number of peers in it
    missing: tuple[int, ...]  # the peers that it waits for, or the first of many
    missing_count: int  # the number of peers that it waits for
    why: str  # which peers it waits for, where these are, and their progress, in words
    # the least share of a RUNNING or RECEIVING call that a missing peer has reported; null: none
    # has reported any
    done: float | None = None


class RingStatus(Struct, frozen=True):
    """A ring: the peers in order, each sending to the next."""

    order: tuple[int, ...]  # the numbers of the peers
    weight: int  # the ring's share of the data, relative to the group's other rings
    # bytes per second from each peer to the next, as the last optimize_topology measured them; null
    # where it did not, for example between peers on one machine
    rates: tuple[int | None, ...]


class GroupStatus(Struct, frozen=True):
    """A group: its accepted peers, its rings, and its shared state if it has one."""

    group: int  # its number
    size: int  # the number of its accepted peers
    epoch: int  # the epoch of its rings
    rings: tuple[RingStatus, ...]  # its rings
    running: int  # the number of its running collectives
    revision: int | None  # the revision of its shared state; null: it has none
    holders: int  # the number of peers that took part in its last synchronization
    synchronizing: bool  # whether a synchronization is in progress
    # bytes per second that each link carried in the last collective around the ring; null before
    # the first
    bus_rate: float | None
    # the useful share of the time since the first collective. Time is lost by aborted collectives,
    # until the next one starts, and by waiting for peers to enter calls.
    goodput: float | None


class EventStatus(Struct, frozen=True):
    """An event in words, and how long ago it was."""

    ago_s: float
    text: str


class ClientStatus(Struct, frozen=True):
    """A client: a process that publishes or follows weights."""

    client: int  # its number
    host: str  # the host where others reach it
    port: int  # the port where others reach it
    version: int  # the version of its weights; 0: it has none
    published: int | None  # the newest version that it has published to this master; null: none
    seeks: int | None  # the version that it fetches or waits to fetch; null: none
    source: int | None  # the number of the client that it fetches from; null: none
    slow: bool  # whether it has taken so long that its source serves another client in its place
    rate: int | None  # bytes per second of its last fetch; null: it has fetched nothing
    receivers: tuple[int, ...]  # the numbers of the clients that fetch from it
    name: str = ""  # the name that it gave itself


class WeightsStatus(Struct, frozen=True):
    """The published weights."""

    version: int  # the newest version ever published; 0: none
    followers: dict[int, int]  # the number of clients that have published nothing, by their version
    clients: tuple[ClientStatus, ...]  # the clients, or the first of many
    clients_left_out: int  # the number of further clients


class Status(Struct, frozen=True):
    """A run, as seen by its master."""

    version: str  # the version of pccl
    recovering: bool  # whether a restarted master waits for its earlier peers
    awaited: tuple[int, ...]  # the numbers of these peers, if known
    peers: tuple[PeerStatus, ...]  # the registered peers
    groups: tuple[GroupStatus, ...]  # the groups that have accepted peers
    # the calls that wait: first the oldest rounds, then calls in later phases
    waits: tuple[WaitStatus, ...]
    waits_left_out: int  # the number of further waits
    counts: Counts  # counters of events
    # the latest events, the last one last: peers that joined and left, and why, rings that were
    # chosen, calls that could never meet
    events: tuple[EventStatus, ...] = ()
    # the published weights; null: none, and there are no clients
    weights: WeightsStatus | None = None


class Wait(NamedTuple):
    """A call that some peers are in and that waits for others."""

    call: str  # as the first of the peers has made it
    group: int | None
    phase: Phase
    since_s: Mapping[int, float]  # when each of the peers entered it
    late: list[int]  # the peers that it waits for
    why: str  # which peers these are, and what they do, in words
    progress: Mapping[int, int] = MappingProxyType({})  # thousandths of it, by peer
    others: Mapping[int, str] = MappingProxyType({})  # the calls of peers that made another one

    def waited_s(self, now_s: float) -> float:
        return now_s - min(self.since_s.values(), default=now_s)


def _admission(run: Run, pending: list[int]) -> Wait:
    round_ = run.voting.open.get(TOPOLOGY)
    late = run.membership.accepted() if round_ is None else run.voting.absent(round_)
    since_s = {number: run.membership.peers[number].since_s for number in pending}
    names = run.membership.names(late)
    why = f"{names} must call {TOPOLOGY.kind.value}(){_elsewhere(run, late)}"
    return Wait("connect()", None, Phase.ADMISSION, since_s, late, why)


def _entering(run: Run, round_: Round) -> Wait:
    votes, late = round_.votes, run.voting.absent(round_)
    why = f"{run.membership.names(late)} must enter it{_elsewhere(run, late)}"
    if not late and round_.id == PENDING:
        why = f"another peer must join the run, which has {len(votes)}"
        if (gone := run.tally.counts.joined - len(votes)) > 0:
            why += f" and had {gone} more: if the training is over, end this program"
    first = next(iter(votes))
    others: dict[int, str] = {}
    if round_.id.kind is Kind.START:
        payload = votes[first].payload
        others = {n: round_.describe(n) for n in votes if votes[n].payload != payload}
    since_s = {number: vote.since_s for number, vote in votes.items()}
    call, group = round_.describe(first), round_.id.group
    return Wait(call, group, Phase.ENTERING, since_s, late, why, others=others)


def _finishing(run: Run, running: Running) -> Wait:
    late, progress = sorted(running.missing), running.progress
    since_s = dict.fromkeys(running.members, running.since_s)
    why = f"{run.membership.names(late)} must finish it{_done(late, progress)}"
    return Wait(running.title, running.group, Phase.RUNNING, since_s, late, why, progress)


def _receiving(run: Run, sync: Sync) -> Wait:
    late, progress = sorted(sync.fetching), sync.progress
    since_s = {number: vote.since_s for number, vote in sync.members.items()}
    why = f"{run.membership.names(late)} must receive it{_done(late, progress)}"
    call, phase = "sync_shared_state()", Phase.RECEIVING
    return Wait(call, sync.group, phase, since_s, late, why, progress)


def _measuring(run: Run, optimization: Optimization) -> Wait:
    late = sorted(optimization.measuring)
    since_s = dict.fromkeys(optimization.calls, optimization.since_s)
    why = f"{run.membership.names(late)} measure links"
    return Wait("optimize_topology()", None, Phase.MEASURING, since_s, late, why)


def _done(late: list[int], progress: Mapping[int, int]) -> str:
    """The progress of the slowest awaited peers, in words; empty if no peer has reported any."""
    shares = sorted((progress[number], number) for number in late if number in progress)
    return "".join(f"; peer {number} has {done / 10:g} % of it" for done, number in shares[:3])


def _elsewhere(run: Run, late: list[int]) -> str:
    """The other calls of awaited peers, in words, for some of these peers."""
    stand = [
        f"; {run.membership.info(number)} is in {round_.describe(number)}"
        for number in late[:3]
        for round_ in run.voting.open.of(number).values()
    ]
    return "".join(stand[:3])


def explain(run: Run, number: int, call: int, seq: int) -> str:
    """The reason why a peer's call waits; empty if its answer is on the way."""
    peer = run.membership.peers[number]
    if not peer.accepted:
        if run.membership.teams.is_whole(peer.info):
            return f"to be admitted: {_admission(run, []).why}"
        return f"to be admitted: the other {peer.info.team_size - 1} of its team must connect()"
    for round_ in run.voting.open.of(number).values():
        if round_.votes[number].call == call:
            return f"in {round_.describe(number)}: {_entering(run, round_).why}"
    sync, measured = run.synchronizations.of(number), run.optimizations.current
    if (running := run.table.get(seq)) is not None:
        wait = _finishing(run, running)
        return f"in {wait.call}, which has started: {wait.why}"
    if sync is not None and sync.members[number].call == call:
        wait = _receiving(run, sync)
    elif measured is not None and measured.calls.get(number) == call:
        wait = _measuring(run, measured)
    else:
        return ""
    return f"in {wait.call}: {wait.why}"


def _waits(run: Run) -> Iterator[Wait]:
    """All waits of peers; if there are many rounds and collectives, only the oldest."""
    for round_ in islice(run.voting.open, WAITS_MAX):
        yield _entering(run, round_)
    for running in islice(run.table, WAITS_MAX):
        yield _finishing(run, running)
    for group in run.groups:
        if (sync := run.synchronizations.current.get(group)) is not None:
            yield _receiving(run, sync)
    if run.optimizations.current is not None:
        yield _measuring(run, run.optimizations.current)
    if pending := run.membership.admissible:
        yield _admission(run, pending)


def _status_of_wait(wait: Wait, now_s: float) -> WaitStatus:
    shares = [wait.progress[number] for number in wait.late if number in wait.progress]
    return WaitStatus(
        plain(wait.call),
        wait.group,
        wait.phase,
        waited_s=wait.waited_s(now_s),
        entered=len(wait.since_s),
        missing=tuple(wait.late[:MISSING_MAX]),
        missing_count=len(wait.late),
        why=plain(wait.why),
        done=min(shares) / 1000 if shares else None,
    )


def _calls(waits: list[Wait], now_s: float) -> dict[int, list[CallStatus]]:
    found: dict[int, list[CallStatus]] = {}
    for wait in waits:
        missing, call = set(wait.late), plain(wait.call)
        for number, since_s in wait.since_s.items():
            calls = found.setdefault(number, [])
            if len(calls) < CALLS_MAX:
                share = wait.progress.get(number) if number in missing else None
                its_call = plain(wait.others[number]) if number in wait.others else call
                done = None if share is None else share / 1000
                calls.append(CallStatus(its_call, wait.phase, now_s - since_s, done))
    return found


def snapshot(run: Run, now_s: float, awaited: Sequence[int] | None) -> Status:
    waits = [*_waits(run)]
    return Status(
        version=__version__,
        recovering=awaited is not None,
        awaited=tuple(awaited or ()),
        peers=tuple(_peers(run, now_s, waits)),
        groups=tuple(_groups(run, now_s)),
        waits=tuple(_status_of_wait(wait, now_s) for wait in waits),
        waits_left_out=sum(max(0, len(of) - WAITS_MAX) for of in (run.voting.open, run.table)),
        counts=msgspec.convert(msgspec.to_builtins(run.tally.counts), Counts),  # a copy
        weights=_weights(run.clients),
    )


def _peers(run: Run, now_s: float, waits: list[Wait]) -> Iterator[PeerStatus]:
    holders = {group: run.history.of(group).holders for group in run.groups}
    calls = _calls(waits, now_s)
    awaited_s: dict[int, float] = {}
    for wait in waits:
        waited_s = wait.waited_s(now_s)
        for number in wait.late:
            awaited_s[number] = max(waited_s, awaited_s.get(number, 0.0))
    for number, peer in run.membership.peers.items():
        yield PeerStatus(
            number,
            peer.info.host,
            peer.info.port,
            peer.info.group,
            peer.accepted,
            now_s - peer.since_s,
            now_s - peer.spoke_s,
            number in holders.get(peer.info.group, ()),
            tuple(calls.get(number, ())),
            name=peer.info.name,
            late_s=peer.late_s,
            late_total_s=peer.late_total_s,
            awaited_s=awaited_s.get(number, 0.0),
        )


def _groups(run: Run, now_s: float) -> Iterator[GroupStatus]:
    running = Counter(one.group for one in run.table)
    for number in run.groups:
        group, state = run.groups[number], run.history.of(number)
        course = run.tally.courses[number]
        yield GroupStatus(
            number,
            run.membership.size(number),
            group.epoch,
            tuple(_ring(ring, group.rates) for ring in group.planned),
            running[number],
            state.revision,
            len(state.holders),
            number in run.synchronizations.current,
            course.bus_rate,
            course.goodput(now_s, _stuck_since_s(run, number)),
        )


def _stuck_since_s(run: Run, group: int) -> float | None:
    """The time since which a member of a group has waited for others to enter a call."""
    since_s = (
        stuck_since_s(round_)
        for round_ in islice(run.voting.open, WAITS_MAX)
        if round_.id.group in (None, group) and round_.id.kind is not Kind.PAIR
        if run.voting.absent(round_)
    )
    return min((each for each in since_s if each is not None), default=None)


def _ring(ring: Ring, rates: Mapping[tuple[int, int], int]) -> RingStatus:
    return RingStatus(ring.order, ring.weight, tuple(map(rates.get, hops(ring.order))))


def _weights(clients: Clients) -> WeightsStatus | None:
    everybody, version = clients.all.values(), clients.catalogue.head
    if not (everybody or version):
        return None
    followers = Counter(one.version for one in everybody if not one.published)
    shown = tuple(
        ClientStatus(
            one.info.peer - FIRST,
            one.info.host,
            one.info.port,
            one.version,
            one.published or None,
            None if one.seek is None else one.seek.version,
            one.holder - FIRST if one.holder else None,
            one.slow,
            one.rate or None,
            tuple(number - FIRST for number in one.receivers),
            one.info.name,
        )
        for one in islice(everybody, CLIENTS_MAX)
    )
    left_out = len(everybody) - len(shown)
    return WeightsStatus(version, dict(sorted(followers.items())), shown, left_out)
