"""Creates process groups for torch: init_process_group, new_group, pccl:// addresses.

With `?reconfigure=1`, or `enable_reconfigure` of torch 2.14, the process joins in the background,
and enters the group when `reconfigure` names it.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Reducer, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from pccl import Communicator, MasterLostError, PCCLTimeoutError, extension
from pccl.runtime.config import Config
from pccl.support import address_text, parse_address
from pccl.torch.group import TIMEOUT, DeviceBackend, ProcessGroup
from pccl.torch.hosted import KEY, HostedMaster

VARIABLE = "PCCL_MASTER"
PATIENCE_S = 1.0  # wait for a first answer of a hosted master; doubles with each attempt
HOSTED_PATIENCE_S = 2.0  # wait for a hosted master whose host does not answer
_READ_AGAIN_S = 0.05
_NOWHERE = "127.0.0.1:1"
HINT_S = 10.0  # after this time, a process that waits for its admission logs a possible reason
_HINT = (
    "if the group has begun without it, its members must admit it. torch's own "
    "DistributedDataParallel admits no newcomers: restart all its processes, or use "
    "pccl.torch.DistributedDataParallel, which admits newcomers between two steps"
)

_log = logging.getLogger("pccl.torch")


def is_possible() -> bool:
    """True if this version of torch calls the methods of a Backend written in Python."""
    try:
        type("Probe", (Backend,), {})(0, 1)
    except TypeError:  # Backend has no constructor
        return False
    return True


def is_one_of_several() -> bool:
    """True if torch is calling this to make one of several backends of a group.

    torch passes no argument for this, but its local variables show it.
    """
    config = _variable("_new_process_group_helper", "backend_config")
    return config is not None and len(set(config.get_device_backend_map().values())) > 1


def is_to_be_reconfigured() -> bool:
    """True if the group begins when it is reconfigured; torch 2.14 and later."""
    return bool(_variable("init_process_group", "enable_reconfigure"))


def _variable(function: str, name: str) -> Any:
    """A local variable of a torch function on the call stack; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


joined: list[ProcessGroup] = []  # for a pccl:// address, until torch asks for the group


def join(
    address: str,
    size: int,
    *,
    timeout: timedelta,
    patience_s: float | None = None,
    hosted: bool = False,
    **more: Any,
) -> ProcessGroup:
    """Joins the run at a master; waits until `size` members are there, or the run has begun.

    The master may take `patience_s` for its first answer; None: `timeout`, which limits each other
    step and the group's collectives. A `hosted` master runs in the process of the first rank, and
    ends with it. `more` are arguments of the group.
    """
    seconds = timeout.total_seconds()
    comm = Communicator(address, connect_timeout=seconds if patience_s is None else patience_s)
    if hosted:
        extension.expect_no_return(comm, HOSTED_PATIENCE_S)
    reminder = threading.Timer(HINT_S, lambda: _log.warning("this process still waits: %s", _HINT))
    reminder.daemon = True
    try:
        reminder.start()
        try:
            comm.connect(timeout=seconds)
        except PCCLTimeoutError as error:
            gloo = f"timeout after {1000 * seconds:.0f}ms"  # torchft's tests look for its words
            why = f"{error.message}: {gloo}; {_HINT}"
            raise PCCLTimeoutError(error.result, "init_process_group", why) from None
        finally:
            reminder.cancel()
        return ProcessGroup(comm, size=size, timeout=timeout, **more)
    except BaseException:
        comm.close()
        raise


def create(options: Any, backend_options: object = None) -> ProcessGroup | DeviceBackend:
    """The group that torch asks for; in a group of several backends, the backend of one device.

    Raises:
        RuntimeError: this version of torch cannot have pccl as one of several backends.
    """
    several = is_one_of_several()
    if several and not is_possible():
        raise RuntimeError(
            "torch before 2.14 has no groups of pccl beside another backend: use groups of their "
            'own, for example new_group(backend="nccl")'
        )
    group = _group(options)
    return DeviceBackend(group) if several else group


def _group(options: Any) -> ProcessGroup:
    """The group that torch asks for, with this process as a member.

    The default group joins the run at PCCL_MASTER, if that is set. Otherwise, and for every other
    group, the process of its first rank hosts a master, whose address is in the group's store.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    is_default = not options.global_ranks_in_group
    if is_default and joined:
        return joined.pop()
    timeout: timedelta = options.timeout
    address = os.environ.get(VARIABLE, "") if is_default else ""
    if address and is_to_be_reconfigured():
        comm = Communicator(address, connect_timeout=timeout.total_seconds())
        return ProcessGroup(comm, timeout=timeout, store=store, waits=True)
    if address:
        return join(address, size, timeout=timeout, rank=rank, store=store)
    return by_store(store, rank, size, timeout)


def by_store(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """The group of all callers with a store of torch; its first rank hosts the master."""
    if rank != 0:
        return _join_the_first(store, size, timeout=timeout, rank=rank)
    master = HostedMaster(_own_host(store), store)
    try:
        return join(master.address, size, timeout=timeout, rank=rank, store=store, master=master)
    except BaseException:
        master.end(0.0)
        raise


def _join_the_first(store: Any, size: int, *, timeout: timedelta, rank: int) -> ProcessGroup:
    """Joins the run whose master is in the process of the group's first rank.

    The store may still have the address of an earlier master: after a restart of all processes, or
    if this process recreates its group before the first rank does. So if no master answers there,
    or the master ends, this process rereads the address until the first rank has written its new
    one.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    before, patience_s = "", PATIENCE_S
    while True:
        address = store.get(KEY).decode()
        left_s = until_s - time.monotonic()
        if left_s > 0 and not (address and _is_open(address, min(PATIENCE_S, left_s))):
            time.sleep(min(_READ_AGAIN_S, left_s))
            continue
        patience_s = 2 * patience_s if address == before else PATIENCE_S
        before, last = address, patience_s >= left_s
        try:
            return join(
                address or _NOWHERE,
                size,
                timeout=timeout,
                patience_s=max(PATIENCE_S, left_s) if last else patience_s,
                hosted=True,
                rank=rank,
                store=store,
            )
        except MasterLostError:
            if last:
                raise


def _is_open(address: str, timeout_s: float) -> bool:
    try:
        socket.create_connection(parse_address(address), timeout_s).close()
    except OSError:
        return False
    return True


def _own_host(store: Any) -> str:
    """The host of the process of rank 0, which has its store."""
    given = Config.from_env().first_host
    while not given and isinstance(store, PrefixStore):
        store = store.underlying_store
    if not given and isinstance(store, TCPStore):
        given = store.host
    host, _ = parse_address(address_text(given or "127.0.0.1", 1))
    return f"[{host}]" if ":" in host else host


def meet(url: str, timeout: timedelta = TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the run; yields its store, this peer's rank and the number of members.

    "pccl://" alone means the master of PCCL_MASTER.

    Raises:
        ValueError: the URL is malformed.
    """
    parts = urlsplit(url)
    asked = parse_qs(parts.query)
    unknown = asked.keys() - {"rank", "world_size", "reconfigure"}
    address = parts.netloc or os.environ.get(VARIABLE, "")
    if unknown or parts.path not in ("", "/") or not address:
        why = f"it must be pccl://host[:port], where a master is, or pccl:// beside {VARIABLE}"
        raise ValueError(f"{url!r}: {why}")
    if asked.get("reconfigure") == ["1"] or is_to_be_reconfigured():
        comm = Communicator(address, connect_timeout=timeout.total_seconds())
        group = ProcessGroup(comm, timeout=timeout, waits=True)
    else:
        size = int(asked.get("world_size", ["1"])[0])
        group = join(address, size, timeout=timeout, rank=int(asked.get("rank", ["-1"])[0]))
    while joined:
        joined.pop().shutdown()
    joined.append(group)
    yield group.get_group_store(), group.getRank(), group.getSize()
    raise RuntimeError("a run is joined once: make a new process group")


def replace_monitored_barrier() -> None:
    """Replaces torch's function, before 2.14 only for gloo, with one that serves pccl, too."""
    before = c10d.monitored_barrier

    @functools.wraps(before)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        found = c10d.group.WORLD if group is None else group
        if not isinstance(found, ProcessGroup):
            before(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        found.monitored_barrier(limit, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def keep_works_of_join() -> None:
    """Keeps each Work that `DistributedDataParallel.join` gives to its C++ reducer until the next.

    The reducer keeps only the C++ part of a Work written in Python, and would wait for it forever.
    """
    before = Reducer._set_forward_pass_work_handle
    latest: weakref.WeakKeyDictionary[Reducer, object] = weakref.WeakKeyDictionary()

    @functools.wraps(before)
    def set_work(reducer: Reducer, work: Any, use_static_world_size: bool) -> None:
        latest[reducer] = work
        before(reducer, work, use_static_world_size)

    Reducer._set_forward_pass_work_handle = set_work  # type: ignore[assignment, method-assign]


def use_with_accelerate() -> None:
    """Makes Accelerate and the Trainer of transformers use pccl instead of gloo.

    On a CPU, Accelerate refuses backends that it does not know. This replaces its method
    `PartialState._prepare_backend`, which chooses the backend, with one that returns pccl instead
    of gloo if the script names pccl or no backend. On a GPU Accelerate accepts the name unchanged.
    Call it before you create an Accelerator or TrainingArguments. PCCL_ACCELERATE=1 in the
    environment has the same effect, for a script that you cannot change.
    """
    from accelerate.state import PartialState  # type: ignore[import-not-found]

    before = PartialState._prepare_backend
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        chosen, kind = before(self, cpu, sagemaker_dp, backend)
        return "pccl" if chosen == "gloo" and backend in (None, "pccl") else chosen, kind

    PartialState._prepare_backend = prepare_backend
