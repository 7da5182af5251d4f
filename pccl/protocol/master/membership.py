"""The members of a run: peers, teams, admission, and peers that keep others waiting too long."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.rounds import Grace, Round
from pccl.support import KEY
from pccl.version import __version__


class Teams:
    """The registered members of each team.

    A team is one replica of a model that is sharded over several processes, each a peer of a
    different group. When all members of a team are registered, they are admitted together, and take
    the same place in the order of their groups. When one member is lost, all are dropped.
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
        if info.team:
            self._members.setdefault(info.team, {})[info.peer] = info

    def remove(self, info: m.PeerInfo) -> None:
        if info.team:
            del self._members[info.team][info.peer]
            if not self._members[info.team]:
                del self._members[info.team]

    def is_whole(self, info: m.PeerInfo) -> bool:
        return not info.team or len(self._members[info.team]) == info.team_size

    def partners(self, infos: Iterable[m.PeerInfo]) -> Iterator[tuple[int, m.PeerInfo]]:
        """The other members of these peers' teams, each with its partner among these peers."""
        lost = {info.peer: info for info in infos}
        for info in lost.values():
            for number in self._members.get(info.team, ()):
                if number not in lost:
                    yield number, info


def without_whole_team(infos: Mapping[int, m.PeerInfo]) -> set[int]:
    """The peers, of these, whose team is not completely among these."""
    sizes: dict[int, int] = {}
    for info in infos.values():
        sizes[info.team] = sizes.get(info.team, 0) + 1
    return {n for n, info in infos.items() if info.team and sizes[info.team] != info.team_size}


def in_order(infos: Mapping[int, m.PeerInfo]) -> dict[int, m.PeerInfo]:
    """Sorts peers by registration, but keeps each team together, at its first member."""
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


def hosts(hello: m.Hello | m.Examine, seen: str) -> tuple[str, ...]:
    """The hosts of a peer. The first is the host that it names, else the one the master sees."""
    return tuple(dict.fromkeys((hello.host or seen, *hello.others)))


def refusal(hello: m.Hello | m.Resume, info: m.PeerInfo, arithmetic: bytes | None) -> str:
    """Why a newcomer's first message is refused; empty if it is not."""
    if hello.protocol != m.PROTOCOL_VERSION:
        return (
            f"this peer (pccl {hello.version}) speaks protocol version {hello.protocol}, the "
            f"master (pccl {__version__}) version {m.PROTOCOL_VERSION}: install the same version "
            "of pccl"
        )
    if arithmetic not in (None, hello.arithmetic):
        return (
            "this machine's arithmetic differs from that of the peers in the run (the kernel "
            "self-test gave other bits), so results could not be bit-identical: rebuild pccl, "
            "compare `pccl doctor`"
        )
    for host in info.hosts:
        if not HOST.fullmatch(host):
            return f"it asks to be reached at {host!r}, which is not a host (PCCL_ADVERTISE)"
    if info.curve and not KEY.fullmatch(info.curve):
        return f"its key is {info.curve!r}, which is not a key"
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
    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    heard: int = 0  # the greatest seq that it is known to have heard of
    proven: bool = False  # whether a collective with this peer has gone around the rings
    veteran: bool = False  # it has completed a collective or synchronization in this run
    seen: str = ""  # its host as the master sees it
    dial: str = ""  # the password with which to dial it
    since_s: float = 0.0  # when it registered
    spoke_s: float = 0.0  # when it sent its latest message
    late_s: float = 0.0  # how long others waited for it to enter a call: a moving average
    late_total_s: float = 0.0  # how long others waited for it, in all its calls


class Membership:
    """The peers of a run. A peer is pending from `register` to `accept`; then it is accepted.

    Args:
        next_number: the number of the next peer; numbers never repeat.
    """

    def __init__(self, next_number: int = 1) -> None:
        self._peers: dict[int, PeerRecord] = {}
        # all registered peers by number, in the order of registration
        self.peers: Mapping[int, PeerRecord] = self._peers
        self._numbers: dict[bytes, int] = {}  # by connection
        self._accepted: dict[int | None, dict[int, None]] = {}  # by group, in order; None: all
        # accepted peers whose connections broke after the last message of any accepted peer
        self._lost: dict[int, m.PeerInfo] = {}
        self._arithmetic = b""
        self.teams = Teams()  # the registered members of each team
        self.next_number = next_number

    # ---- queries ----

    def at(self, conn: bytes) -> int | None:
        return self._numbers.get(conn)

    def info(self, number: int) -> m.PeerInfo:
        return self._peers[number].info

    def group_of(self, number: int) -> int:
        return self._peers[number].info.group

    @property
    def arithmetic(self) -> bytes | None:
        """The arithmetic of the registered peers; None: there is no peer."""
        return self._arithmetic if self._peers else None

    @property
    def pending(self) -> list[int]:
        return [number for number, peer in self._peers.items() if not peer.accepted]

    @property
    def any_pending(self) -> bool:
        return len(self._peers) > self.size() and bool(self.admissible)

    @property
    def admissible(self) -> list[int]:
        """The pending peers that are in no team or in a complete one, sorted by team."""
        infos = {number: self.info(number) for number in self.pending}
        whole = {number: info for number, info in infos.items() if self.teams.is_whole(info)}
        return [*in_order(whole)]

    def accepted(self, group: int | None = None) -> list[int]:
        """The accepted peers of a group, or all, in the order of their acceptance."""
        return list(self._accepted.get(group, ()))

    def size(self, group: int | None = None) -> int:
        return len(self._accepted.get(group, ()))

    def has(self, number: int, group: int | None) -> bool:
        return number in self._accepted.get(group, ())

    def electors(self, numbers: Iterable[int]) -> Set[int]:
        """The peers, of these, that decide a dispute: the veterans, or all if there are none."""
        all_ = {*numbers}
        return {number for number in all_ if self._peers[number].veteran} or all_

    def partners(self, numbers: Collection[int]) -> dict[int, m.PeerInfo]:
        """The team members that are lost with these peers, each with its partner among these."""
        return dict(self.teams.partners(map(self.info, numbers)))

    def names(self, numbers: list[int]) -> str:
        """The names of peers; if there are many, only the first ones."""
        names = [str(self.info(number)) for number in numbers[:NAMES_MAX]]
        if len(numbers) > NAMES_MAX:
            names.append(f"{len(numbers) - NAMES_MAX} more")
        return ", ".join(names) or "nobody"

    def worlds(self) -> Iterator[tuple[Iterable[int], m.World]]:
        """For each group, its peers and the world sizes to send them."""
        groups = [group for group in self._accepted if group is not None]
        largest = max(map(self.size, groups), default=0)
        for group in groups:
            world = m.World(self.size(), self.size(group), len(groups), largest)
            yield self._accepted[group], world

    # ---- changes ----

    def register(self, peer: PeerRecord, arithmetic: bytes) -> None:
        peer.info = msgspec.structs.replace(peer.info, peer=self.next_number)
        self.next_number += 1
        self._add(peer, arithmetic)

    def bring_back(self, peer: PeerRecord, arithmetic: bytes) -> None:
        """Restores a peer that comes back after a restart; it is accepted, as before."""
        self._add(peer, arithmetic)
        self._count_in(peer)

    def accept(self, number: int, heard: int) -> None:
        """Accepts a pending peer; it takes no part in collectives up to the seq `heard`."""
        peer = self._peers[number]
        peer.heard = heard
        self._count_in(peer)

    def remove(self, number: int) -> PeerRecord:
        peer = self._peers.pop(number)
        del self._numbers[peer.conn]
        self.teams.remove(peer.info)
        if peer.accepted:
            for scope in (peer.info.group, None):
                del self._accepted[scope][number]
                if not self._accepted[scope]:
                    del self._accepted[scope]
        return peer

    def _add(self, peer: PeerRecord, arithmetic: bytes) -> None:
        self._peers[peer.info.peer] = peer
        self._numbers[peer.conn] = peer.info.peer
        self.teams.add(peer.info)
        self._arithmetic = arithmetic

    def _count_in(self, peer: PeerRecord) -> None:
        peer.accepted = True
        for scope in (peer.info.group, None):
            self._accepted.setdefault(scope, {})[peer.info.peer] = None

    # ---- losing all peers at once: the master may have been cut off ----

    def lose(self, numbers: Collection[int]) -> None:
        """Notes peers whose connections broke. The caller then removes them and their teams."""
        lost = (self._peers[number] for number in [*numbers, *self.partners(numbers)])
        self._lost |= {peer.info.peer: peer.info for peer in lost if peer.accepted}

    def forget_lost_groups(self) -> None:
        """Forgets the lost peers of empty groups, unless all groups are empty."""
        if self.size():
            self._lost = {n: i for n, i in self._lost.items() if i.group in self._accepted}

    def go_on(self) -> None:
        """Forgets the lost peers: a message or a committed round shows that the run has continued
        without them."""
        self._lost.clear()

    def deserted_by(self, number: int) -> bool:
        """True if no peer is left, and this peer was among the last ones lost."""
        return not self.size() and number in self._lost

    @property
    def last_seen(self) -> list[m.PeerInfo]:
        """The accepted peers, or those that were accepted until all were lost."""
        return [self.info(number) for number in self.accepted()] or [*self._lost.values()]


class Deadlines:
    """Finds the members that are late for a round in which others wait for a limited time.

    In `are_peers_pending`, a vote may have a `Grace`. A group's grace begins when enough of its
    members have entered with one. Members that are still absent at its end are late. If the votes
    of a group differ, the most patient vote counts. Votes without a grace do not count, so a group
    with too few graces waits for all its members. Each group decides only on its own members.
    """

    def __init__(self, membership: Membership) -> None:
        # seconds until the next grace is over, at the time of the last `late`; None: none has begun
        self.left_s: float | None = None
        self._membership = membership
        self._round: Round | None = None
        self._began_s: dict[int, float] = {}  # by group

    def late(self, now_s: float, round_: Round | None) -> dict[int, str]:
        """The members that are late for the open round, and why to drop each."""
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

    def _graces(self, round_: Round) -> dict[int, list[Grace]]:
        found: dict[int, list[Grace]] = {}
        for number, vote in round_.votes.items():
            if vote.grace is not None:
                found.setdefault(self._membership.group_of(number), []).append(vote.grace)
        return found
