"""pccl's process group, as torch.distributed uses it.

A handle names a process, and where its run's master is. Newcomers have one before they are admitted
(their ProcessGroup `waits`); the members admit them when a reconfiguration names more than there
are. Those that it does not name must have left, or be lost.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroup as BaseGroup
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from pccl import (
    AsyncReduceHandle,
    Communicator,
    MasterNode,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    TooFewPeersError,
    extension,
)
from pccl.extension import Deadline
from pccl.security import Security
from pccl.support.text import address_text, parse_address
from pccl.torch.collectives import Collectives
from pccl.torch.members import Members, Offer, Shards, agree, no_shards
from pccl.torch.work import Operation, Task, Work, in_pool
from pccl.types import Result

TAG = (1 << 31) + 1
_INTERVAL_S = 0.01
_PATIENCE_S = 1.0
_ROW_BYTES = 128


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """What a process says of itself, and of what it was asked for."""

    token: str
    number: int
    uuid: int
    handles: int  # a digest of them


class Reconfigurer:
    """One process's part in the reconfigurations of a group.

    Attributes:
        handle: what names this process, for as long as it has this object.
    """

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        self._token = secrets.token_hex(8)
        self.handle = f"{self._token}@{comm.address}"

    def settle(self, uuid: int, handles: Collection[str], timeout_s: float) -> list[int]:
        """Returns when those that the handles name are the group: their numbers, by rank.

        The order is that of a list; of a set, that of joining.

        Raises:
            ValueError: one is not a handle of a process of this run, or two are equal.
            PCCLTimeoutError: others are in the group after that time, or some are not.
            PCCLError: INVALID_ARGUMENT: the members do not ask for the same, or one that the
                handles do not name is in the group instead of another one.
        """
        tokens = self._tokens(handles)
        deadline = Deadline(timeout_s)
        while True:
            try:
                if not self._are_as_many(len(tokens), deadline):
                    continue
                rows = self._exchange(uuid, tokens, deadline)
            except PeerLostError:  # who is there is looked at again
                continue
            except PCCLTimeoutError as error:
                found = f"{len(self._members.ring())} peers are in the group"
                why = f"after {timeout_s:g} s {found}, not the {len(tokens)} that the handles name"
                raise PCCLTimeoutError(error.result, "reconfigure", why) from None
            return _order(rows, tokens, isinstance(handles, Sequence))

    def _tokens(self, handles: Collection[str]) -> list[str]:
        tokens = []
        for handle in handles:
            token = handle.partition("@")[0]
            if handle != f"{token}@{self._comm.address}":
                where = self._comm.address
                raise ValueError(f"{handle!r} is not a handle of a process of the run at {where}")
            tokens.append(token)
        if len(set(tokens)) != len(tokens):
            raise ValueError(f"two of the handles are equal: {sorted(handles)}")
        return tokens if isinstance(handles, Sequence) else sorted(tokens)

    def _are_as_many(self, wanted: int, deadline: Deadline) -> bool:
        """Whether so many are there; if not, it waits a while, and admits those who wait."""
        there = len(self._members.ring())
        if there == wanted:
            return True
        if deadline.left_s == 0:
            raise PCCLTimeoutError(Result.RANK_CONNECTION_LOST, "reconfigure", "")
        if there < wanted:
            extension.await_newcomers(self._comm, _PATIENCE_S, deadline)
        else:
            time.sleep(_INTERVAL_S)
        return False

    def _exchange(self, uuid: int, tokens: list[str], deadline: Deadline) -> list[_Row]:
        digest = zlib.crc32(" ".join(tokens).encode())
        own = _Row(self._token, self._members.own, uuid, digest)
        text = msgspec.json.encode(own)
        mine = np.zeros(_ROW_BYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        self._comm.world_size  # noqa: B018 - this thread has seen who is there
        try:
            rows = self._comm.all_gather(mine, tag=TAG, timeout=deadline.left_s)
        except TooFewPeersError:
            return [own]
        found = [msgspec.json.decode(bytes(each).rstrip(b"\0"), type=_Row) for each in rows]
        if any((row.uuid, row.handles) != (uuid, digest) for row in found):
            why = "the members have given different uuids, or handles in different orders"
            raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)
        return found


def _order(rows: list[_Row], tokens: list[str], by_rank: bool) -> list[int]:
    """The numbers of the processes that the tokens name; all rows are of them, or it is refused."""
    numbers = {row.token: row.number for row in rows}
    if numbers.keys() != set(tokens):
        why = "a process that the handles do not name is in the group instead of another one"
        raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)
    order = [numbers[token] for token in tokens]
    return order if by_rank else sorted(order)


FAREWELL_S = 30.0  # how long others may take to leave
_ASK_S = 2.0
_LOOK_S = 0.02

_log = logging.getLogger("pccl.torch")
_hosted: list[HostedMaster] = []


class HostedMaster:
    """A master in this process, for one group.

    The group ends with this process, as torch's own store does; a run that must outlive each of its
    peers has a master of its own (`pccl master`, PCCL_MASTER).
    """

    def __init__(self, host: str) -> None:
        """`host` is where other members reach this process."""
        self._node = MasterNode("0.0.0.0:0")
        self._node.run()
        _hosted.append(self)
        self.own: Communicator | None = None  # by which this process is a member itself
        port = self._node.address.rpartition(":")[2]
        self.address = f"{host}:{port}"

    def end(self) -> None:
        """Stops it when all members have left. Idempotent."""
        if self not in _hosted:
            return
        _hosted.remove(self)
        if self.own is not None:
            self.own.close()
        until_s = time.monotonic() + FAREWELL_S
        while (here := self._members()) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        if here:
            _log.warning(
                "%d members of the group whose master is in this process have not left within "
                "%.0f s: they lose their master now",
                here,
                FAREWELL_S,
            )
        self._node.interrupt()

    def _members(self) -> int:
        """How many members there are; 0 if the master has ended, as by SIGTERM."""
        try:
            return len(self._node.status(_ASK_S).peers)
        except PCCLError:
            return 0


@atexit.register  # later than pccl.master_node, and so called earlier than it, which serves on
def end_all() -> None:
    """The program ends."""
    for master in list(_hosted):
        master.end()


PATIENCE = timedelta(seconds=300)


def serve(host: str) -> tuple[TCPStore, str]:
    """Serves a store in this process; the store, and the address at which `host` offers it."""
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return served, address_text(host, served.port)


class RunStore(Store):
    """A store of the run's members, which torch's rank 0 serves.

    It is connected to when it is first used: most programs never do. It is lost with the process
    that serves it, and with it what was in it; collectives go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._address = ""
        self._reason = "the group has not begun"
        self._store: Store | None = None
        self._patience = PATIENCE

    def use(self, address: str, served: Store | None, reason: str) -> None:
        """Where it is, if this process does not serve it; without an address, why there is none."""
        with self._lock:
            if address != self._address:
                self._store = None
            self._address, self._reason = address, reason
            self._store = served or self._store

    def _reach(self) -> Store:
        with self._lock:
            if self._store is None:
                if not self._address:
                    raise RuntimeError(f"this run has no store: {self._reason}")
                host, port = parse_address(self._address)
                self._store = TCPStore(host, port, is_master=False, timeout=self._patience)
            return self._store

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store, here and below."""
        self._reach().set(key, value)

    def get(self, key: str) -> bytes:
        return self._reach().get(key)

    def add(self, key: str, value: int) -> int:
        return self._reach().add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._reach().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._reach().delete_key(key)

    def num_keys(self) -> int:
        return self._reach().num_keys()

    def check(self, keys: list[str]) -> bool:
        return self._reach().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        store = self._reach()
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        return self._patience


TIMEOUT = timedelta(minutes=30)
_ENCRYPTED = (
    "keys are in use (PCCL_CURVE_DIR), and torch's stores are not encrypted; pass a store of your "
    "own to init_process_group"
)


class ProcessGroup(Collectives, BaseGroup):
    """A group of a run: all members of one communicator.

    A collective whose result does not depend on ranks (all_reduce, barrier) goes on without those
    who are lost in it. Every other one fails on all members with `PeerLostError` then; afterwards
    `size()` and `rank()` are those without the lost.

    Attributes:
        communicator: by which it communicates.
        shards: asks the other processes of this one's replica, which are in other groups.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        rank: int = -1,
        size: int = 1,
        timeout: timedelta = TIMEOUT,
        store: Store | None = None,
        master: HostedMaster | None = None,
        waits: bool = False,
        shards: Shards = no_shards,
    ) -> None:
        """Returns when the group has begun, in which this peer is a member.

        All members make this call; where it has begun, they admit this peer by `admit`.

        Args:
            comm: is connected, unless the group waits.
            rank: which torch's rank this peer was started with; -1: the order of joining decides.
            size: with how many members the group begins.
            timeout: how long a collective may take.
            store: what torch was given for the group; None: a store of its own.
            master: that this process hosts for the group.
            waits: whether it joins in the background, and the group is this process alone until
                `reconfigure` names it among others.
            shards: what all processes of this one's replica say. They are a team of peers, each in
                another group of the run, and all groups go through the same steps.

        Raises:
            PCCLTimeoutError: so many members were not there in time.
        """
        members = Members(comm)
        BaseGroup.__init__(self, 0, 1)  # type: ignore[call-arg]
        self._setup(comm, members, timeout)
        self.communicator = comm
        self.shards = shards
        self._name = self._description = ""
        self._master = master
        if master is not None:
            master.own = comm
        encrypted = Security.of(None) is not None
        self._offer = Offer(shards, rank, size=size, wants_store=store is None and not encrypted)
        self._no_store = _ENCRYPTED if encrypted else "the one who served it is lost"
        self._own_store = RunStore() if store is None else None
        self._store = store if self._own_store is None else self._own_store
        self._served: Store | None = None
        self._joining: Future[None] | None = None
        if waits:
            seconds = timeout.total_seconds()
            self._joining = in_pool(lambda: comm.connect(timeout=seconds))
        else:
            members.enter()
            self.agree()
            self._begin(Deadline(timeout.total_seconds()))
        self._reconfigurer = Reconfigurer(comm, members)
        this = weakref.ref(self)
        members.listen(lambda: _number_anew(this()))

    def agree(self) -> None:
        """All members, and newcomers who have just been admitted, agree upon ranks."""
        again = True
        while again:
            agreed = agree(self._comm, self.members, self._offer)
            self._offer.begun = agreed.begun
            self.members.arrange(agreed.order)
            again = agreed.again
            if agreed.must_serve:
                self._serve()
        if self._own_store is not None:
            served = self._served if self.getRank() == 0 else None
            self._own_store.use(agreed.store, served, self._no_store)
        self._restart()

    def _begin(self, deadline: Deadline) -> None:
        """Lets in others until the group can begin; all who are there agree after each of them.

        So one that joins a group which has begun learns it by the first agreement, and does not
        wait for others, which those that have begun would not do.
        """
        while not self._offer.begun:
            try:
                extension.await_newcomers(self._comm, deadline=deadline)
            except PeerLostError:
                pass
            except PCCLTimeoutError as error:
                why = f"{self.getSize()} of {self._offer.size} members are there in time"
                why += ": the others have not come, or had ended before this one began"
                raise PCCLTimeoutError(error.result, "init_process_group", why) from None
            self.agree()

    def admit(self) -> int:
        """Lets in those who wait, when all that is under way has ended. All members call it.

        Returns the number of members, the same on all.
        """
        self._drain()
        size = extension.update_topology(self._comm)
        self.agree()
        return size

    @property
    def origin(self) -> int:
        """The least number, in the run, of the processes of this one's replica."""
        return self._offer.origin

    def _serve(self) -> None:
        self._served, self._offer.store = serve(extension.member(self._comm).host)

    # what torch asks of a group

    def getRank(self) -> int:
        """This peer's rank, which changes only if one with a lower rank is lost."""
        return self.members.rank

    def getSize(self) -> int:
        """The number of members."""
        return self.members.size

    rank = getRank
    size = getSize

    def getBackendName(self) -> str:
        """The name that it is registered by."""
        return "pccl"

    @property
    def _device_types(self) -> list[torch.device]:
        """Whose tensors it takes: torch chooses by it where it puts tensors of its own."""
        devices = [torch.device("cpu")]
        return [*devices, torch.device("cuda")] if torch.cuda.is_available() else devices

    def _get_backend(  # type: ignore[override]
        self, device: torch.device
    ) -> ProcessGroup:
        """What serves a device, and is asked what it can do (`supports_...`): this group itself."""
        if device.type not in {each.type for each in self._device_types}:
            raise RuntimeError(f"a group of pccl has no backend for {device}")
        return self

    # torch keeps no names for groups of Python, and asks them

    def setGroupName(self, name: str) -> None:
        """torch's name for the group."""
        self._name = name

    def getGroupName(self) -> str:
        """torch's name for the group; empty: it has none yet."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """What the group is for."""
        self._description = description

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def get_group_store(self) -> Store:
        """The store of the group."""
        assert self._store is not None
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take."""
        self.timeout = timeout

    _set_default_timeout = set_timeout

    # what torch asks of a backend

    supports_splitting = supports_shrinking = False
    supports_coalescing = True
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether it has memory of its own for tensors."""
        return False

    # torch's reconfiguration, as its ProcessGroup has it since 2.14

    @property
    def supports_reconfigure(self) -> bool:
        """Members and ranks can be given anew."""
        return True

    def get_reconfigure_handle(self) -> str:
        """What names this member in the `handles` of `reconfigure`."""
        return self._reconfigurer.handle

    def reconfigure(self, opts: Any) -> Work:
        """Those whom `opts.handles` names are the group, with ranks in that order.

        All of them call it, with the same `opts.uuid`: members, and newcomers who wait, whom the
        members admit by it. If it fails, the group is as before, and the call can be made again,
        with another uuid.
        """
        timeout_s = (opts.timeout or self.timeout).total_seconds()
        self._drain()

        def launch(_: int) -> AsyncReduceHandle:
            deadline = Deadline(timeout_s)
            self._enter(deadline)
            order = self._reconfigurer.settle(opts.uuid, opts.handles, deadline.left_s or 0.0)
            self.members.arrange(order)
            self._offer.begun = True
            self.agree()
            return AsyncReduceHandle(None, None)  # it is over

        operation = Operation(Task("reconfigure", launch, [], counts=False), 0, self.members, None)
        operation.begin(self._under_way)
        return Work(operation)

    def _enter(self, deadline: Deadline) -> None:
        """Returns when this process has been admitted, if it waits for that."""
        if self._joining is None:
            return
        try:
            self._joining.result(deadline.left_s)
        except TimeoutError:
            why = "the members of the group have not admitted this process in time"
            raise PCCLTimeoutError(Result.RANK_CONNECTION_LOST, "reconfigure", why) from None
        self._joining = None
        self.members.enter()

    def shutdown(self) -> None:
        """Leaves the group. A process that hosts its master waits until the others have left."""
        self._comm.close()
        self._sends.give_up()
        if self._master is not None:
            self._master.end()

    def abort(self) -> None:
        """Leaves the group; what is under way fails."""
        self._comm.close()

    def __hash__(self) -> int:
        return id(self)


def _number_anew(group: ProcessGroup | None) -> None:
    """Tells torch's tables of ranks about the members of the default group."""
    if group is not None and c10d.GroupMember.WORLD is group:
        c10d._world.pg_group_ranks[group] = {i: i for i in range(group.getSize())}
