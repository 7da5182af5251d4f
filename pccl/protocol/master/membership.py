"""The members of a run: peers, teams, admission, and peers that keep others waiting too long."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.rounds import Grace, Round
from pccl.support.text import KEY
from pccl.version import __version__


class Teams:
    """The registered members of each team.

    A team is a replica of a model whose shards lie in several processes, each of which is a peer of
    another group. Its members are admitted when all are registered, in one
    place of the order of all groups; and when one is lost, no other is of any use.
    """

    def __init__(self) -> None:
        self._members: dict[int, dict[int, m.PeerInfo]] = {}

    def objection(self, info: m.PeerInfo) -> str:
        """Why a newcomer cannot be in the team that it names; empty if it can."""
        if (info.team == 0) != (info.team_size == 0):
            return f"it is of team {info.team}, of {info.team_size} members, which cannot be"
        members = self._members.get(info.team, {})
        if any(one.team_size != info.team_size for one in members.values()):
            return f"it says that its team has {info.team_size} members, and another one does not"
        if info.team and len(members) == info.team_size:
            return f"its team has all its {info.team_size} members already"
        return ""

    def add(self, info: m.PeerInfo) -> None:
        """A peer is registered."""
        if info.team:
            self._members.setdefault(info.team, {})[info.peer] = info

    def remove(self, info: m.PeerInfo) -> None:
        """A peer is gone."""
        if info.team:
            del self._members[info.team][info.peer]
            if not self._members[info.team]:
                del self._members[info.team]

    def is_whole(self, info: m.PeerInfo) -> bool:
        """True if all members of a peer's team are registered."""
        return not info.team or len(self._members[info.team]) == info.team_size

    def partners(self, infos: Iterable[m.PeerInfo]) -> Iterator[tuple[int, m.PeerInfo]]:
        """The other members of the teams of some peers, each with that one of them."""
        lost = {info.peer: info for info in infos}
        for info in lost.values():
            for number in self._members.get(info.team, ()):
                if number not in lost:
                    yield number, info


def halves(infos: Mapping[int, m.PeerInfo]) -> set[int]:
    """Which of some peers are of teams that are not among them as a whole."""
    sizes: dict[int, int] = {}
    for info in infos.values():
        sizes[info.team] = sizes.get(info.team, 0) + 1
    return {n for n, info in infos.items() if info.team and sizes[info.team] != info.team_size}


def in_order(infos: Mapping[int, m.PeerInfo]) -> dict[int, m.PeerInfo]:
    """Sorts peers team by team; a team stands where its first member has registered."""
    first: dict[int, int] = {}
    for number in sorted(infos):
        first.setdefault(infos[number].team or -number, number)
    order = sorted(infos, key=lambda number: (first[infos[number].team or -number], number))
    return {number: infos[number] for number in order}


HOST = re.compile(r"[A-Za-z0-9._:%-]{1,200}")  # a name or an address: it becomes an endpoint
IPC_MAX = 100  # characters of a socket's path


def newcomer(hello: m.Hello, host: str) -> m.PeerInfo:
    """A peer without a number; `host` is the address that the master sees."""
    first, *others = hosts(hello, host)
    address = (first, hello.port, hello.ipc, hello.machine, hello.curve)
    rest = hello.team, hello.team_size, hello.outgoing, hello.relay
    return m.PeerInfo(0, hello.group, *address, *rest, others=tuple(others), name=hello.name)


def hosts(said: m.Hello | m.Examine, seen: str) -> tuple[str, ...]:
    """Where a peer may be reached: that is where the master sees it, unless it names a host."""
    return tuple(dict.fromkeys((said.host or seen, *said.others)))


def refusal(said: m.Hello | m.Resume, info: m.PeerInfo, arithmetic: bytes | None) -> str:
    """Why a newcomer is refused, by its first message; empty if it is not.

    Args:
        said: its first message.
        info: its addresses.
        arithmetic: that of the run's peers, if there are any.
    """
    if said.protocol != m.PROTOCOL_VERSION:
        return (
            f"this peer (pccl {said.version}) speaks protocol version {said.protocol}, the master "
            f"(pccl {__version__}) version {m.PROTOCOL_VERSION}: install the same version of pccl"
        )
    if arithmetic not in (None, said.arithmetic):
        return (
            "this machine's arithmetic differs from that of the peers in the run (the kernel "
            "self-test gave other bits), so results could not be bit-identical: rebuild pccl, "
            "compare `pccl doctor`"
        )
    for host in info.hosts:
        if not HOST.fullmatch(host):
            return f"it asks to be reached at {host!r}, which is no host (PCCL_ADVERTISE)"
    if info.curve and not KEY.fullmatch(info.curve):
        return f"its key is {info.curve!r}, which is no key"
    if info.outgoing and info.relay:
        return "it only dials out (PCCL_OUTGOING_ONLY), and so cannot relay (PCCL_RELAY)"
    if len(info.ipc) > IPC_MAX or not (info.ipc + info.machine).isprintable():
        return f"it listens at {info.ipc!r} on machine {info.machine!r}, which cannot be"
    if not info.name.isprintable():
        return f"its name is {info.name!r}, which a log or terminal cannot show (PCCL_NAME)"
    return ""


NAMES_MAX = 8  # peers listed by name in one text


@dataclass(slots=True)
class PeerRecord:
    """One registered peer."""

    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    heard: int = 0  # the greatest seq that it is known to have heard of
    proven: bool = False  # a collective with it has gone around the rings
    veteran: bool = False  # it has completed a collective or synchronization in this run
    seen: str = ""  # its host as the master sees it
    dial: str = ""  # the password with which to dial it
    since_s: float = 0.0  # when it registered
    spoke_s: float = 0.0  # when it sent its latest message
    late_s: float = 0.0  # how long others waited for it to enter a call: a moving average
    late_total_s: float = 0.0  # and in all


class Membership:
    """The peers of a run. A peer is pending from `register` to `accept`; then it is accepted.

    Attributes:
        peers: all registered peers by number, in the order of registration.
        teams: which peers join and are lost together.

    Args:
        next_number: the number of the next peer; numbers never repeat.
    """

    def __init__(self, next_number: int = 1) -> None:
        self._peers: dict[int, PeerRecord] = {}
        self.peers: Mapping[int, PeerRecord] = self._peers
        self._numbers: dict[bytes, int] = {}  # by connection
        self._accepted: dict[int | None, dict[int, None]] = {}  # by group; None: all, in order
        # accepted peers whose connections broke since any accepted peer was last heard
        self._lost: dict[int, m.PeerInfo] = {}
        self._arithmetic = b""
        self.teams = Teams()
        self.next_number = next_number

    # ---- queries ----

    def at(self, conn: bytes) -> int | None:
        """The number of the peer on a connection, if there is one."""
        return self._numbers.get(conn)

    def info(self, number: int) -> m.PeerInfo:
        """The addresses of a peer."""
        return self._peers[number].info

    def group_of(self, number: int) -> int:
        """The group that a peer belongs to."""
        return self._peers[number].info.group

    @property
    def arithmetic(self) -> bytes | None:
        """The arithmetic of all registered peers; None: there is no peer."""
        return self._arithmetic if self._peers else None

    @property
    def pending(self) -> list[int]:
        """Peers that are not accepted yet."""
        return [number for number, peer in self._peers.items() if not peer.accepted]

    @property
    def any_pending(self) -> bool:
        """True if a pending peer can be admitted."""
        return len(self._peers) > self.size() and bool(self.admissible)

    @property
    def admissible(self) -> list[int]:
        """Pending peers whose team is there as a whole, team after team."""
        infos = {number: self.info(number) for number in self.pending}
        whole = {number: info for number, info in infos.items() if self.teams.is_whole(info)}
        return [*in_order(whole)]

    def accepted(self, group: int | None = None) -> list[int]:
        """The accepted peers of a group, or all, in the order of their acceptance."""
        return list(self._accepted.get(group, ()))

    def size(self, group: int | None = None) -> int:
        """The number of accepted peers of a group, or of all."""
        return len(self._accepted.get(group, ()))

    def has(self, number: int, group: int | None) -> bool:
        return number in self._accepted.get(group, ())

    def electors(self, numbers: Iterable[int]) -> Set[int]:
        """Those of some peers who decide if these do not agree: veterans, or all without any."""
        all_ = {*numbers}
        return {number for number in all_ if self._peers[number].veteran} or all_

    def partners(self, numbers: Collection[int]) -> dict[int, m.PeerInfo]:
        """The others that are lost when some peers are, each with the one that it is lost with."""
        return dict(self.teams.partners(map(self.info, numbers)))

    def names(self, numbers: list[int]) -> str:
        """Peers by name; only the first ones of many."""
        names = [str(self.info(number)) for number in numbers[:NAMES_MAX]]
        if len(numbers) > NAMES_MAX:
            names.append(f"{len(numbers) - NAMES_MAX} more")
        return ", ".join(names) or "nobody"

    def worlds(self) -> Iterator[tuple[Iterable[int], m.World]]:
        """Of each group: its peers, and the world's sizes as they see them."""
        groups = [group for group in self._accepted if group is not None]
        largest = max(map(self.size, groups), default=0)
        for group in groups:
            world = m.World(self.size(), self.size(group), len(groups), largest)
            yield self._accepted[group], world

    # ---- changes ----

    def register(self, conn: bytes, info: m.PeerInfo, seen: str, hello: m.Hello) -> PeerRecord:
        """Registers a newcomer, which is pending, and gives it a number."""
        number = self.next_number
        self.next_number += 1
        info = msgspec.structs.replace(info, peer=number)
        return self._add(PeerRecord(conn, info, seen=seen, dial=hello.dial), hello.arithmetic)

    def bring_back(self, conn: bytes, info: m.PeerInfo, seen: str, resume: m.Resume) -> PeerRecord:
        """Restores a peer that comes back after a restart; it is accepted, as before."""
        peer = self._add(PeerRecord(conn, info, seen=seen, dial=resume.dial), resume.arithmetic)
        self._count_in(peer)
        return peer

    def accept(self, number: int, heard: int) -> PeerRecord:
        """Accepts a pending peer; collectives up to `heard` do not concern it."""
        peer = self._peers[number]
        peer.heard = heard
        self._count_in(peer)
        return peer

    def remove(self, number: int) -> PeerRecord:
        """Removes a peer."""
        peer = self._peers.pop(number)
        del self._numbers[peer.conn]
        self.teams.remove(peer.info)
        if peer.accepted:
            for scope in (peer.info.group, None):
                del self._accepted[scope][number]
                if not self._accepted[scope]:
                    del self._accepted[scope]
        return peer

    def _add(self, peer: PeerRecord, arithmetic: bytes) -> PeerRecord:
        self._peers[peer.info.peer] = peer
        self._numbers[peer.conn] = peer.info.peer
        self.teams.add(peer.info)
        self._arithmetic = arithmetic
        return peer

    def _count_in(self, peer: PeerRecord) -> None:
        peer.accepted = True
        for scope in (peer.info.group, None):
            self._accepted.setdefault(scope, {})[peer.info.peer] = None

    # ---- peers that may have been cut off together with all others ----

    def lose(self, numbers: Collection[int]) -> None:
        """Notes peers whose connections broke; they are about to be removed, with their teams."""
        lost = (self._peers[number] for number in [*numbers, *self.partners(numbers)])
        self._lost |= {peer.info.peer: peer.info for peer in lost if peer.accepted}

    def forget_lost_groups(self) -> None:
        """Forgets groups without members: none of them can say whether it heard of the losses."""
        if self.size():
            self._lost = {n: i for n, i in self._lost.items() if i.group in self._accepted}

    def go_on(self) -> None:
        """An accepted peer was heard, or a round has ended: the run has continued without the
        lost peers."""
        self._lost.clear()

    def deserted_by(self, number: int) -> bool:
        """True if no peer is left, and this one was among the last."""
        return not self.size() and number in self._lost

    @property
    def last_seen(self) -> list[m.PeerInfo]:
        """The accepted peers, or those that were accepted until all were lost."""
        return [self.info(number) for number in self.accepted()] or [*self._lost.values()]


class Deadlines:
    """Finds the members that are too late for a round in which others wait only for a grace.

    In `are_peers_pending`, a vote may have a `Grace`. The grace of a group begins when enough of
    its members have entered with one, and is over so many seconds later; who is still absent then
    is late. If the votes of a group differ, the most patient one counts. Votes without a grace do
    not count as entered: a group of which too few have one waits for all its members, and no group
    decides about the members of another.

    Attributes:
        left_s: seconds until the next grace is over, at the time of the last `late`; None: none has
            begun.
    """

    def __init__(self, membership: Membership) -> None:
        self.left_s: float | None = None
        self._membership = membership
        self._round: Round[object] | None = None
        self._began_s: dict[int, float] = {}  # by group

    def late(self, now_s: float, round_: Round[object] | None) -> dict[int, str]:
        """The members that are late for the open round, each with the reason to drop it."""
        self.left_s = None
        if round_ is not self._round:
            self._round, self._began_s = round_, {}
        if round_ is None or not round_.has_grace:
            return {}
        whys: dict[int, str] = {}
        for group, graces in self._graces(round_).items():
            size = self._membership.size(group)
            enough = max(grace.enough for grace in graces)
            absent = [n for n in self._membership.accepted(group) if n not in round_.votes]
            if len(graces) < enough or not absent:
                self._began_s.pop(group, None)
                continue
            seconds = max(grace.seconds for grace in graces)
            left_s = self._began_s.setdefault(group, now_s) + seconds - now_s
            if left_s > 0:
                self.left_s = left_s if self.left_s is None else min(self.left_s, left_s)
            else:
                why = f"it was late: {len(graces)} of {size} had entered {round_.id.kind.value}(), "
                why += f"and waited for {seconds:g} s more, which is their grace"
                whys |= dict.fromkeys(absent, why)
        return whys

    def _graces(self, round_: Round[object]) -> dict[int, list[Grace]]:
        """Of the votes of each group."""
        found: dict[int, list[Grace]] = {}
        for number, vote in round_.votes.items():
            if vote.grace is not None:
                found.setdefault(self._membership.group_of(number), []).append(vote.grace)
        return found
