"""The members of a group in the order of torch's ranks, and their agreement on that order."""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pccl import (
    Communicator,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    Result,
    TooFewPeersError,
    extension,
)
from pccl.extension import Deadline
from pccl.operands import Ranks


class Members:
    """The members of a communicator's group that the program knows.

    pccl's rank is a position in the ring, which `optimize_topology` may change. torch's rank is a
    position in the order of joining, or of the ranks with which peers were started. It changes only
    if a peer with a lower rank is lost: the higher ranks move down, and newcomers come last. The
    program learns of a loss from the first collective that notices it, the same on all members.

    Attributes:
        own: the number of this peer in its run; 0 before it has joined.
        order: the numbers of the peers, by torch's rank.
        changed: called after each change of the order.
        failed: whether a collective has failed here since the members last agreed on their order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self.own = 0
        self.order: tuple[int, ...] = (0,)
        self.changed: Callable[[], None] = lambda: None
        self.failed = False

    def enter(self) -> None:
        self.own = extension.member(self._comm).number
        self.order = (self.own,)

    @property
    def rank(self) -> int:
        return self.order.index(self.own)

    @property
    def size(self) -> int:
        return len(self.order)

    def arrange(self, order: Sequence[int]) -> None:
        with self._lock:
            before, self.order = self.order, tuple(order)
        if before != self.order:
            self.changed()

    def refresh(self) -> None:
        """Removes lost members from the order; only `arrange` adds newcomers."""
        present = set(self.ring())
        self.arrange([number for number in self.order if number in present])

    def ring(self) -> tuple[int, ...]:
        """The peers of the group by position in the ring, according to the master."""
        return extension.ring(self._comm)

    def known_ring(self) -> tuple[int, ...]:
        """The known members by position in the ring.

        If one of them is lost, a collective that depends on ranks fails on all members, so the
        order does not matter.
        """
        ring = self.ring()
        return ring if set(ring) == set(self.order) else self.order

    def ranks(self, ring: tuple[int, ...]) -> Ranks:
        return extension.ranks(ring, self.own)


R = TypeVar("R", bound=msgspec.Struct)
ROW_BYTES = 512
AGREE_TAG, RECONFIGURE_TAG = 1 << 31, (1 << 31) + 1  # torch's collectives have higher tags


def _gather(comm: Communicator, row: R, tag: int, timeout_s: float | None = None) -> list[R]:
    """The rows of all members, in any order.

    Raises PeerLostError: a member was lost meanwhile; PCCLTimeoutError: one has not come in time.
    """
    text = msgspec.json.encode(row)
    assert len(text) <= ROW_BYTES
    mine = np.frombuffer(text.ljust(ROW_BYTES, b"\0"), np.uint8)
    comm.world_size  # noqa: B018 - this thread has seen the present members
    try:
        rows = comm.all_gather(mine, tag=tag, timeout=timeout_s)
    except TooFewPeersError:
        return [row]
    return [msgspec.json.decode(bytes(each).rstrip(b"\0"), type=type(row)) for each in rows]


# ---- ranks, when members have come or gone ----

# gathers the numbers of all processes of a replica, in their order; all of them call it
Shards = Callable[[list[int]], list[list[int]]]


def no_shards(numbers: list[int]) -> list[list[int]]:
    """A replica of one process."""
    return [numbers]


class Offer(msgspec.Struct):
    """A peer's message to the others in an agreement.

    Attributes:
        number: the peer's number.
        origin: the smallest number of its replica's processes; it orders replicas equally in all
            their groups.
        rank: its rank, or the one with which it was started; -1: none.
        begun: whether it has a rank in this group.
        size: the number of members with which the group begins.
        store: `host:port` of the store that it serves; empty: none.
        wants_store: whether it has no store.
    """

    number: int = 0
    origin: int = 0
    rank: int = -1
    begun: bool = False
    size: int = 1
    store: str = ""
    wants_store: bool = False


def agree(comm: Communicator, members: Members, own: Offer, shards: Shards) -> list[Offer]:
    """Agrees with all members on their order; no collective may be in progress.

    Members keep their order, and newcomers come last. Peers that begin together are ordered by the
    ranks with which they were started, or else by joining. If a replica has several processes, each
    in a different group, all these groups have the same replicas in the same order. Returns the
    offers of all members, in their order.
    """
    own.number = members.own
    own.rank = members.rank if own.begun else own.rank
    if not own.origin:
        own.origin = min(number for (number,) in shards([own.number]))
    while True:
        try:
            offers = _gather(comm, own, AGREE_TAG)
        except PeerLostError:
            continue
        # a replica may be lost when only some groups have agreed
        if len({size for (size,) in shards([len(offers)])}) == 1:
            return sorted(
                offers, key=lambda one: (not one.begun, one.rank < 0, one.rank, one.origin)
            )


# ---- torch's reconfiguration ----

_INTERVAL_S = 0.01
_PATIENCE_S = 1.0


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    token: str
    number: int
    uuid: int
    handles: int  # a digest of them


class Reconfigurer:
    """One process's part in the reconfigurations of a group.

    A handle names a process and the address of its run's master. Newcomers have one before they are
    admitted; the members admit them if a reconfiguration names more processes than there are
    members. All members that it does not name must have left or be lost.

    Attributes:
        handle: names this process for the lifetime of this object.
    """

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        self._token = secrets.token_hex(8)
        self.handle = f"{self._token}@{comm.address}"

    def settle(self, uuid: int, handles: Collection[str], timeout_s: float) -> list[int]:
        """Waits until the group consists of the named processes. Returns their numbers, by rank.

        A list gives the order; a set uses the order of joining.

        Raises:
            ValueError: one is not a handle of a process of this run, or two are equal.
            PCCLTimeoutError: at the deadline, the group had other processes, or lacked some.
            PCCLError: INVALID_ARGUMENT: the members have given different arguments, or a process
                that the handles do not name is in the group instead of another one.
        """
        tokens = self._tokens(handles)
        own = _Asked(self._token, self._members.own, uuid, zlib.crc32(" ".join(tokens).encode()))
        deadline = Deadline(timeout_s)
        while True:
            try:
                if not self._are_as_many(len(tokens), deadline):
                    continue
                rows = _gather(self._comm, own, RECONFIGURE_TAG, deadline.left_s)
            except PeerLostError:  # recounts the members
                continue
            except PCCLTimeoutError as error:
                found = f"{len(self._members.ring())} peers are in the group"
                why = f"after {timeout_s:g} s {found}, not the {len(tokens)} that the handles name"
                raise PCCLTimeoutError(error.result, "reconfigure", why) from None
            break
        numbers = {row.token: row.number for row in rows}
        if any((row.uuid, row.handles) != (uuid, own.handles) for row in rows):
            why = "the members have given different uuids, or handles in different orders"
        elif numbers.keys() != set(tokens):
            why = "a process that the handles do not name is in the group instead of another one"
        else:
            order = [numbers[token] for token in tokens]
            return order if isinstance(handles, Sequence) else sorted(order)
        raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)

    def _tokens(self, handles: Collection[str]) -> list[str]:
        where = self._comm.address
        for handle in handles:
            if handle != f"{handle.partition('@')[0]}@{where}":
                raise ValueError(f"{handle!r} is not a handle of a process of the run at {where}")
        if len(set(handles)) != len(handles):
            raise ValueError(f"two of the handles are equal: {sorted(handles)}")
        tokens = [handle.partition("@")[0] for handle in handles]
        return tokens if isinstance(handles, Sequence) else sorted(tokens)

    def _are_as_many(self, wanted: int, deadline: Deadline) -> bool:
        """True if there are `wanted` members; otherwise waits a while, and admits newcomers."""
        there = len(self._members.ring())
        if there == wanted:
            return True
        if deadline.left_s == 0:
            raise PCCLTimeoutError(Result.TIMEOUT, "reconfigure", "")
        if there < wanted:
            extension.await_newcomers(self._comm, _PATIENCE_S, deadline)
        else:
            time.sleep(_INTERVAL_S)
        return False


def communicator(
    address: str, shards: dist.ProcessGroup | None = None, **more: Any
) -> Communicator:
    """The communicator of one process of a sharded replica; all its processes make this call.

        dist.init_process_group("nccl")  # or gloo: the processes of this replica
        fully_shard(model)
        with pccl.torch.communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)

    Shard s of all replicas is peer group s of one run. The processes of a replica are a team: they
    are admitted together, and if one of them is lost, the run continues without the others, whose
    calls raise `KickedError`. Restart the whole replica.

    Args:
        address: `host:port` of the master.
        shards: the group of the processes of this replica; None: the default group.
        more: other arguments of `Communicator`.

    Returns:
        A communicator that is not connected yet.
    """
    drawn = [secrets.randbits(62) + 1]
    dist.broadcast_object_list(drawn, group_src=0, group=shards)
    size, rank = dist.get_world_size(shards), dist.get_rank(shards)
    return Communicator(address, rank, team=drawn[0], team_size=size, **more)


def exchange(shards: dist.ProcessGroup | None, device: torch.device) -> Shards:
    """A function that gathers numbers from the processes of a replica, by torch on `device`."""

    def gather(numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(shards))]
        dist.all_gather(gathered, mine, group=shards)
        return [each.tolist() for each in gathered]

    return gather
