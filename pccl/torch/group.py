"""pccl's process group, as torch.distributed uses it."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store
from torch._C._distributed_c10d import ProcessGroup as BaseGroup
from torch.distributed import distributed_c10d as c10d

from pccl import (
    AsyncReduceHandle,
    Communicator,
    MismatchError,
    PCCLTimeoutError,
    PeerLostError,
    Result,
    extension,
)
from pccl.extension import Deadline
from pccl.security import Security
from pccl.torch.collectives import Collectives
from pccl.torch.hosted import HostedMaster, RunStore, serve
from pccl.torch.members import Members, Offer, Reconfigurer, Shards, agree, no_shards
from pccl.torch.work import CoalescedWork, Task, Work, eager, in_pool

TIMEOUT = timedelta(minutes=30)
_ENCRYPTED = (
    "keys are in use (PCCL_CURVE_DIR), and torch's stores are not encrypted; pass a store of your "
    "own to init_process_group"
)


class ProcessGroup(Collectives, BaseGroup):
    """A process group of torch: all members of one communicator's group.

    If a member is lost, a collective whose result does not depend on ranks (all_reduce, barrier)
    continues without it. Every other collective fails on all members with `PeerLostError`.
    Afterwards `size()` and `rank()` exclude the lost member.

    Attributes:
        communicator: the communicator of its members.
        shards: gathers numbers from all processes of this one's replica, which are in other groups.
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
        """Returns when the group has begun, with this peer as a member.

        All members make this call. If the group has begun before, its members call `admit`.

        Args:
            comm: the communicator, connected unless the group waits.
            rank: torch's rank from this peer's start; -1: the order of joining decides.
            size: the number of members with which the group begins.
            timeout: the time limit of collectives.
            store: the group's store, as given to torch; None: the members serve one themselves.
            master: the group's master, if this process hosts it.
            waits: whether this process joins in the background, and is the only member until
                `reconfigure` names it among others.
            shards: gathers numbers from all processes of this one's replica. They are a team of
                peers, each in another group of the run, and all groups go through the same steps.

        Raises:
            PCCLTimeoutError: fewer members than `size` came in time.
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
        wants_store = store is None and not encrypted
        self._offer = Offer(rank=rank, size=size, wants_store=wants_store)
        self._no_store = _ENCRYPTED if encrypted else "the process that served the store is lost"
        self._store = RunStore() if store is None else store
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
        members.changed = lambda: _number_anew(this())

    def agree(self) -> None:
        """Agrees with all members, including new ones, on ranks."""
        own, again = self._offer, True
        while again:
            offers = agree(self._comm, self.members, own, self.shards)
            first = offers[0]
            own.begun = first.begun or len(offers) >= max(each.size for each in offers)
            self.members.arrange([each.number for each in offers])
            again = own.begun and first.wants_store and not first.store
            if again and first.number == own.number:
                self._served, own.store = serve(extension.member(self._comm).host)
        if isinstance(self._store, RunStore):
            served = self._served if self.getRank() == 0 else None
            self._store.use(first.store, served, self._no_store)
        self._restart()

    def _begin(self, deadline: Deadline) -> None:
        """Admits others until the group can begin; all members agree after each admission.

        A process that joins a group in progress learns that from the first agreement, and does not
        wait for others, because the members do not.
        """
        while not self._offer.begun:
            try:
                extension.await_newcomers(self._comm, deadline=deadline)
            except PeerLostError:
                pass
            except PCCLTimeoutError as error:
                why = f"{self.getSize()} of {self._offer.size} members are there in time"
                why += ": the others have not come, or have ended already"
                raise PCCLTimeoutError(error.result, "init_process_group", why) from None
            self.agree()

    def admit(self) -> int:
        """Admits waiting processes after the end of all collectives. All members call it.

        After a failure here, those in which other members still wait for this one fail at once.

        Returns the number of members, the same on all.
        """
        self._drain()
        while True:
            try:
                size = extension.update_topology(self._comm)
            except MismatchError:  # with such a collective
                if not self.members.failed:
                    raise
            else:
                self.agree()
                return size

    @property
    def origin(self) -> int:
        return self._offer.origin

    # ---- torch's ProcessGroup ----

    def getRank(self) -> int:
        return self.members.rank

    def getSize(self) -> int:
        return self.members.size

    rank = getRank
    size = getSize

    def getBackendName(self) -> str:
        return "pccl"

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of its tensors; torch puts its own tensors on one of them."""
        return [torch.device(kind) for kind in ("cpu", *["cuda"] * torch.cuda.is_available())]

    def _get_backend(self, device: torch.device) -> ProcessGroup:  # type: ignore[override]
        """The group itself, which has torch's `supports_...` methods."""
        if device.type not in {each.type for each in self._device_types}:
            raise RuntimeError(f"a pccl group has no backend for {device}")
        return self

    # torch stores no names of groups written in Python

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    _set_default_timeout = set_timeout

    # ---- torch's Backend ----

    supports_splitting = supports_shrinking = supports_time_estimate = False
    supports_coalescing = True
    supports_reconfigure = property(lambda self: True)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    # ---- torch's reconfiguration, as in its ProcessGroup since 2.14 ----

    def get_reconfigure_handle(self) -> str:
        """The name of this member in the `handles` of `reconfigure`."""
        return self._reconfigurer.handle

    def reconfigure(self, opts: Any) -> Work:
        """Makes the processes in `opts.handles` the group, with ranks in that order.

        All of them call it with the same `opts.uuid`: members, and waiting newcomers, which the
        members admit. If it fails, the group is as before, and the call can be repeated with
        another uuid.
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
            return AsyncReduceHandle(None)  # it has ended

        work = Work(Task("reconfigure", launch, [], counts=False), 0, self.members, None)
        work.begin(self._under_way)
        return work

    def _enter(self, deadline: Deadline) -> None:
        """Waits until this process has been admitted, if it has not been yet."""
        if self._joining is None:
            return
        try:
            self._joining.result(deadline.left_s)
        except TimeoutError:
            why = "the members of the group have not admitted this process in time"
            raise PCCLTimeoutError(Result.TIMEOUT, "reconfigure", why) from None
        self._joining = None
        self.members.enter()

    def shutdown(self) -> None:
        """Leaves the group. A process that hosts its master waits until the others have left."""
        if self._master is not None:
            self._master.end()
        self._comm.close()
        self._sends.give_up()

    def abort(self) -> None:
        """Leaves the group; collectives in progress fail. A master in this process ends, too."""
        if self._master is not None:
            self._master.end(0.0)
        self._comm.close()

    def __hash__(self) -> int:
        return id(self)


def _number_anew(group: ProcessGroup | None) -> None:
    """Updates torch's table of ranks after a change of the default group's members."""
    if group is not None and c10d.GroupMember.WORLD is group:
        c10d._world.pg_group_ranks[group] = {i: i for i in range(group.getSize())}


class DeviceBackend(Collectives, Backend):
    """pccl as one of several backends of a group, each for its own device; torch 2.14 and later.

    `init_process_group("cpu:pccl,cuda:nccl")` makes one group of both. Its rank and size are
    torch's, and fixed: only a group with pccl alone shows losses and newcomers.

    Attributes:
        group: the pccl group that does the work.
    """

    # read-only properties of torch's class
    supports_coalescing = property(lambda self: True)
    supports_splitting = supports_shrinking = property(lambda self: False)
    supports_time_estimate = supports_reconfigure = property(lambda self: False)

    def __init__(self, group: ProcessGroup) -> None:
        Backend.__init__(self, group.getRank(), group.getSize())
        self._setup(group.communicator, group.members, group.timeout)
        self.group = group

    def getBackendName(self) -> str:
        return "pccl"

    @eager
    def startCoalescing(self) -> None:
        self._start_coalescing(torch.device("cpu"))

    @eager
    def endCoalescing(self) -> CoalescedWork:
        return self._end_coalescing(torch.device("cpu"))

    recvAnysource = Collectives.recv_anysource
    setSequenceNumberForGroup = Collectives._set_sequence_number_for_group
    getSequenceNumberForGroup = Collectives._get_sequence_number_for_group

    def monitoredBarrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        self.monitored_barrier(getattr(options, "timeout", None), wait_all_ranks)

    def setTimeout(self, timeout: Any) -> None:
        self.timeout = timeout

    def setGroupUid(self, name: str) -> None:
        self.group.setGroupName(name)

    def shutdown(self) -> None:
        self.group.shutdown()

    def abort(self) -> None:
        self.group.abort()
