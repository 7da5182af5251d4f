"""How the members of a group agree upon torch's ranks, when it begins and when others join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pccl import Communicator, PeerLostError, TooFewPeersError
from pccl.torch.members import Members

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
