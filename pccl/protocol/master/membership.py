"""Who is registered with the master, who is accepted, and in which group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from pccl.protocol import messages as m

NAMES_MAX = 8  # peers listed by name in one text


@dataclass(slots=True)
class PeerRecord:
    """One registered peer."""

    conn: bytes
    info: m.PeerInfo
    accepted: bool = False
    heard: int = 0  # the greatest seq that it has certainly heard of
    proven: bool = False  # a collective with it has gone around the rings
    seen: str = ""  # the host that the master sees it at
    dial: str = ""  # the password by which it may be dialled
    since_s: float = 0.0  # when it came
    spoke_s: float = 0.0  # when it was last heard


class Membership:
    """The peers of a run. A peer is pending from `register` to `accept`; then it is accepted.

    Args:
        next_number: of the next peer that registers; numbers never repeat.
    """

    def __init__(self, next_number: int = 1) -> None:
        self._peers: dict[int, PeerRecord] = {}  # in the order of registration: accepted ones first
        self._numbers: dict[bytes, int] = {}  # by connection
        self._accepted: dict[int | None, dict[int, None]] = {}  # by group; None: all, in order
        # accepted peers whose connections broke since anybody who is accepted was last heard of
        self._lost: dict[int, m.PeerInfo] = {}
        self._arithmetic = b""
        self.next_number = next_number

    # ---- who is there ----

    @property
    def peers(self) -> Mapping[int, PeerRecord]:
        """All registered peers by number, in the order of registration: accepted ones first."""
        return self._peers

    def at(self, conn: bytes) -> int | None:
        """The number of the peer on a connection, if there is one."""
        return self._numbers.get(conn)

    def info(self, number: int) -> m.PeerInfo:
        """How others reach a peer."""
        return self._peers[number].info

    def group_of(self, number: int) -> int:
        """The group that a peer belongs to."""
        return self._peers[number].info.group

    @property
    def arithmetic(self) -> bytes | None:
        """The arithmetic that all registered peers have; None: nobody is registered."""
        return self._arithmetic if self._peers else None

    @property
    def pending(self) -> list[int]:
        """Those who are not accepted yet."""
        return [number for number, peer in self._peers.items() if not peer.accepted]

    @property
    def any_pending(self) -> bool:
        """Whether anybody is pending."""
        return len(self._peers) > self.size()

    def accepted(self, group: int | None = None) -> list[int]:
        """The accepted peers of a group, or all, in the order of their acceptance."""
        return list(self._accepted.get(group, ()))

    def size(self, group: int | None = None) -> int:
        """How many are accepted, of a group or of all."""
        return len(self._accepted.get(group, ()))

    def names(self, numbers: list[int]) -> str:
        """Some peers by name; of many the first ones."""
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

    # ---- who comes and goes ----

    def register(self, conn: bytes, info: m.PeerInfo, seen: str, hello: m.Hello) -> PeerRecord:
        """A newcomer, who is pending, gets a number."""
        number = self.next_number
        self.next_number += 1
        info = msgspec.structs.replace(info, peer=number)
        return self._add(PeerRecord(conn, info, seen=seen, dial=hello.dial), hello.arithmetic)

    def bring_back(self, conn: bytes, info: m.PeerInfo, seen: str, resume: m.Resume) -> PeerRecord:
        """A peer of before is here again, accepted as it was."""
        peer = self._add(PeerRecord(conn, info, seen=seen, dial=resume.dial), resume.arithmetic)
        self._count_in(peer)
        return peer

    def accept(self, number: int, heard: int) -> PeerRecord:
        """A pending peer is accepted; what came up to `heard` does not concern it."""
        peer = self._peers[number]
        peer.heard = heard
        self._count_in(peer)
        return peer

    def remove(self, number: int) -> PeerRecord:
        """A peer is no longer registered."""
        peer = self._peers.pop(number)
        del self._numbers[peer.conn]
        if peer.accepted:
            for scope in (peer.info.group, None):
                del self._accepted[scope][number]
                if not self._accepted[scope]:
                    del self._accepted[scope]
        return peer

    def _add(self, peer: PeerRecord, arithmetic: bytes) -> PeerRecord:
        self._peers[peer.info.peer] = peer
        self._numbers[peer.conn] = peer.info.peer
        self._arithmetic = arithmetic
        return peer

    def _count_in(self, peer: PeerRecord) -> None:
        peer.accepted = True
        for scope in (peer.info.group, None):
            self._accepted.setdefault(scope, {})[peer.info.peer] = None

    # ---- who may have been cut off together with all others ----

    def lose(self, numbers: Collection[int]) -> None:
        """The connections of these have broken; they are about to be removed."""
        lost = (self._peers[number] for number in numbers)
        self._lost |= {peer.info.peer: peer.info for peer in lost if peer.accepted}

    def forget_lost_groups(self) -> None:
        """Only those of its group can tell whether they have heard of a loss."""
        if self.size():
            self._lost = {n: i for n, i in self._lost.items() if i.group in self._accepted}

    def go_on(self) -> None:
        """Somebody who is accepted was heard, or a round has ended: the run goes on without the
        lost."""
        self._lost.clear()

    def deserted_by(self, number: int) -> bool:
        """Whether nobody is left, and this peer is among those who were there last."""
        return not self.size() and number in self._lost

    @property
    def last_seen(self) -> list[m.PeerInfo]:
        """Those who are accepted, or were until all were lost."""
        return [self.info(number) for number in self.accepted()] or [*self._lost.values()]
