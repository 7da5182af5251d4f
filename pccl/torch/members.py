"""The members of a group, in the order of torch's ranks, and how they agree on it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pccl import Communicator, PeerLostError, TooFewPeersError, extension
from pccl.operands import Ranks

Listener = Callable[[], None]


class Members:
    """Who is in a communicator's group, as the program knows it.

    pccl's rank is a position in the ring, which `optimize_topology` may change. torch's rank is a
    position in the order in which peers have joined (or in the order that they were started with),
    so it changes only if a peer with a lower rank is lost: the ranks of those that stay close up,
    and newcomers come last. The program learns of a loss by the first collective that notices it,
    which is the same one on all members.

    Attributes:
        own: the number of this peer in its run; 0 before it has joined.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.own = 0
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._order: tuple[int, ...] = (self.own,)

    def enter(self) -> None:
        """This peer has joined the run: it knows itself."""
        self.own = extension.member(self._comm).number
        self._order = (self.own,)

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the peers, by torch's rank."""
        return self._order

    @property
    def rank(self) -> int:
        """torch's rank of this peer."""
        return self._order.index(self.own)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._order)

    def arrange(self, order: Sequence[int]) -> None:
        """All members agree on this order."""
        with self._lock:
            changed = tuple(order) != self._order
            self._order = tuple(order)
        if changed:
            self._tell()

    def refresh(self) -> None:
        """Forgets those that are lost; newcomers, whom `arrange` adds, stay unknown."""
        present = set(self.ring())
        with self._lock:
            remaining = tuple(number for number in self._order if number in present)
            changed = remaining != self._order
            self._order = remaining
        if changed:
            self._tell()

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after each change."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def ring(self) -> tuple[int, ...]:
        """The peers of the group by their position in the ring, as the master says just now."""
        return extension.ring(self._comm)

    def known_ring(self) -> tuple[int, ...]:
        """The known members by their position in the ring.

        If one of them is lost, their number is out of date, and so a collective that depends on
        ranks fails on all members alike. Their order does not matter then.
        """
        ring = self.ring()
        return ring if set(ring) == set(self._order) else self._order

    def ranks(self, ring: tuple[int, ...]) -> Ranks:
        """What a collective must know of a ring."""
        return extension.ranks(ring, self.own)


# What all processes of a replica say, in their order; all of them make this call.
Shards = Callable[[list[int]], list[list[int]]]

TAG = 1 << 31  # torch's collectives have higher ones
ROW_BYTES = 512


def no_shards(numbers: list[int]) -> list[list[int]]:
    """A replica of one process."""
    return [numbers]


class _Row(msgspec.Struct, frozen=True):
    """What a member says of itself."""

    number: int
    origin: int  # the least number of its replica's processes
    begun: bool  # whether it has a rank already
    size: int  # with how many members the group begins
    rank: int  # that one, or which it was started with; -1: none
    store: str  # where its store is; empty: it has none
    wants_store: bool


@dataclass(slots=True)
class Offer:
    """What this peer brings.

    Attributes:
        shards: asks the other processes of its replica.
        origin: what orders replicas that come together, alike in all their groups.
        rank: the rank that it was started with; -1: none.
        begun: whether it has a rank of this group.
        size: with how many members the group begins.
        store: `host:port` of the store that it serves; empty: none.
        wants_store: whether it came without a store.
    """

    shards: Shards = no_shards
    origin: int = field(default=0, init=False)
    rank: int = -1
    begun: bool = False
    size: int = 1
    store: str = ""
    wants_store: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the members have agreed upon.

    Attributes:
        order: the numbers of the peers, by torch's rank.
        begun: whether the group has begun: it had before, or as many as it needs are there.
        store: `host:port` of the first member's store; empty: none.
        must_serve: whether this peer is to serve a store, after which all agree anew.
        again: whether all agree anew.
    """

    order: tuple[int, ...]
    begun: bool
    store: str
    must_serve: bool
    again: bool


def agree(comm: Communicator, members: Members, offer: Offer) -> Agreement:
    """Asks all members; nobody may have a collective under way.

    Members keep the order that they have. Those that begin together are ordered by the ranks that
    they were started with, or else as they have joined; newcomers come last. Where a replica is
    several processes, each of which is a member of another group, the groups have the same replicas
    in the same order.
    """
    rank = members.rank if offer.begun else offer.rank
    if not offer.origin:
        offer.origin = min(number for (number,) in offer.shards([members.own]))
    row = _Row(
        members.own, offer.origin, offer.begun, offer.size, rank, offer.store, offer.wants_store
    )
    rows = sorted(_exchange(comm, row), key=_key)
    # a replica may be lost when some groups have agreed, and others have not
    while len({size for (size,) in offer.shards([len(rows)])}) > 1:
        rows = sorted(_exchange(comm, row), key=_key)
    first = rows[0]
    begun = first.begun or len(rows) >= max(each.size for each in rows)
    again = begun and first.wants_store and not first.store
    order = tuple(each.number for each in rows)
    return Agreement(order, begun, first.store, again and first.number == members.own, again)


def _key(row: _Row) -> tuple[bool, bool, int, int]:
    return not row.begun, row.rank < 0, row.rank, row.origin


def _exchange(comm: Communicator, row: _Row) -> list[_Row]:
    text = msgspec.json.encode(row)
    assert len(text) <= ROW_BYTES
    mine = np.zeros(ROW_BYTES, np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    while True:
        comm.world_size  # noqa: B018 - this thread has seen who is there
        try:
            rows = comm.all_gather(mine, tag=TAG)
        except PeerLostError:
            continue
        except TooFewPeersError:
            return [row]
        return [msgspec.json.decode(bytes(each).rstrip(b"\0"), type=_Row) for each in rows]


def communicator(
    address: str, shards: dist.ProcessGroup | None = None, **more: Any
) -> Communicator:
    """A communicator for each process of a replica whose model is sharded; all make this call.

        dist.init_process_group("nccl")  # or gloo: the processes of this replica
        fully_shard(model)
        with pccl.torch.communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)

    Shard s of all replicas is peer group s of one run. The processes of a replica are a team: they
    are admitted together, and when one of them is lost, the run goes on without the others, whose
    calls raise `KickedError`. Start the whole replica again.

    Args:
        address: `host:port` of the master.
        shards: the group of the processes of this replica; None: the default group.
        more: other arguments of `Communicator`.

    Returns:
        One that is not connected yet.
    """
    drawn = [secrets.randbits(62) + 1]
    dist.broadcast_object_list(drawn, group_src=0, group=shards)
    size, rank = dist.get_world_size(shards), dist.get_rank(shards)
    return Communicator(address, rank, team=drawn[0], team_size=size, **more)


def exchange(shards: dist.ProcessGroup | None, device: torch.device) -> Shards:
    """What all processes of a replica say, by a collective of torch with memory of that device."""

    def said(numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(shards))]
        dist.all_gather(gathered, mine, group=shards)
        return [each.tolist() for each in gathered]

    return said
