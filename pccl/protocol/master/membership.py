"""The peers that are registered with the master, or accepted, and their groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master.teams import Teams, in_order

NAMES_MAX = 8  # peers listed by name in one text


@dataclass(slots=True)
class PeerRecord:
    """One registered peer."""

    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    heard: int = 0  # the greatest seq that it is known to have heard of
    proven: bool = False  # a collective with it has gone around the rings
    veteran: bool = False  # it has completed a collective or synchronisation in this run
    seen: str = ""  # its host as the master sees it
    dial: str = ""  # the password with which to dial it
    since_s: float = 0.0  # when it registered
    spoke_s: float = 0.0  # when it sent its latest message


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
        """Whether any peer is pending that can be admitted."""
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
        """Whether a peer is an accepted one of that group."""
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
        """Whether no peer is left, and this one was among the last."""
        return not self.size() and number in self._lost

    @property
    def last_seen(self) -> list[m.PeerInfo]:
        """The accepted peers, or those that were accepted until all were lost."""
        return [self.info(number) for number in self.accepted()] or [*self._lost.values()]
