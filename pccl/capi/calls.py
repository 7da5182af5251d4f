"""The implementation of <pccl.h>: c/api/library.c imports this module and calls it.

Each function returns a `Result`; exceptions never leave it. `pcclGetLastError` returns the text of
the last error in the calling thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pccl import cuda, extension, operands
from pccl.capi import values
from pccl.capi.libpccl import ffi, lib
from pccl.capi.values import Handles, given
from pccl.communicator import Communicator
from pccl.errors import PCCLError, error_for
from pccl.master_node import MasterNode
from pccl.membership import AsyncReduceHandle
from pccl.runtime.config import configure_logging
from pccl.types import Attribute, ReduceInfo, Result, SharedStateSyncStrategy

log = logging.getLogger("pccl")

_failure = threading.local()
_NONE = ffi.new("char[]", b"")


class Peer:
    """A communicator, with state that the C program does not hold."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.state = values.State()
        self.launched: dict[int, AsyncReduceHandle] = {}


class Master:
    """A master: whether it was started, and whether it is known to have stopped since."""

    def __init__(self, node: MasterNode) -> None:
        self.node = node
        self.started = False
        self.stopped = False


peers: Handles[Peer] = Handles("pcclComm_t *", "a communicator")
masters: Handles[Master] = Handles("pcclMasterInstance_t *", "a master")


def implements(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a Python function implement a function of <pccl.h>."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> int:
            try:
                function(*arguments)
            except BaseException as error:
                return _fail(name, error).value
            return Result.SUCCESS.value

        own = f"pccl_capi_{function.__name__}"
        ffi.def_extern(name=own, error=Result.INTERNAL_ERROR.value)(call)
        return function

    return decorate


def _fail(name: str, error: BaseException) -> Result:
    """Stores an exception's text for pcclGetLastError, and returns its result."""
    said = str(error)
    if isinstance(error, MemoryError):
        said = f"there is not enough memory ({said or 'the system gives no more'})"
    text = f"{name}: {said or type(error).__name__}"
    _failure.text = ffi.new("char[]", text.replace("\0", "?").encode())
    if isinstance(error, PCCLError):
        return error.result
    if isinstance(error, MemoryError):
        return Result.INTERNAL_ERROR
    if isinstance(error, ValueError | OverflowError):  # the API raises these for arguments
        return Result.INVALID_ARGUMENT
    configure_logging()
    log.error("%s has failed", name, exc_info=error)
    return Result.INTERNAL_ERROR


@ffi.def_extern(name="pccl_capi_last_error", error=ffi.NULL)
def last_error() -> Any:
    return getattr(_failure, "text", _NONE)


@implements("pcclGetBuildInfo")
def build_info(info: Any) -> None:
    given(info, "info_out")
    info.has_cuda_support = cuda.is_available()


# ---- one peer of a run ----


@implements("pcclCreateCommunicator")
def create_communicator(params: Any, made: Any) -> None:
    given(params, "params")
    given(made, "comm_out")
    address = values.address(params.master_address)
    comm = Communicator(address, params.peer_group, params.p2p_connection_pool_size)
    made[0] = peers.add(Peer(comm))


@implements("pcclConnect")
def connect(comm: Any) -> None:
    peers[comm].comm.connect()


@implements("pcclDestroyCommunicator")
def destroy_communicator(comm: Any) -> None:
    peers.remove(comm).comm.close()


@implements("pcclGetAttribute")
def get_attribute(comm: Any, attribute: int, value: Any) -> None:
    peer = peers[comm]
    asked = values.member(Attribute, attribute, "attribute")
    given(value, "value_out")
    value[0] = peer.comm.get_attribute(asked)


@implements("pcclUpdateTopology")
def update_topology(comm: Any) -> None:
    peers[comm].comm.update_topology()


@implements("pcclArePeersPending")
def are_peers_pending(comm: Any, pending: Any) -> None:
    peer = peers[comm]
    given(pending, "pending_out")
    pending[0] = peer.comm.are_peers_pending()


@implements("pcclOptimizeTopology")
def optimize_topology(comm: Any) -> None:
    peers[comm].comm.optimize_topology()


# ---- collectives ----


def _all_reduce(send: Any, recv: Any, work: Any) -> tuple[Any, int]:
    """The operands and the tag of an all-reduce."""
    described = values.all_reduce(send, recv, given(work, "descriptor"))
    return operands.of_descriptors([described]), described.reduce_descriptor.tag


@implements("pcclAllReduce")
def all_reduce(send: Any, recv: Any, work: Any, comm: Any, info: Any) -> None:
    peer = peers[comm]
    work, tag = _all_reduce(send, recv, work)
    values.fill(info, extension.run(peer.comm, "all_reduce", work, tag))


@implements("pcclAllReduceAsync")
def all_reduce_async(send: Any, recv: Any, work: Any, comm: Any, op: Any) -> None:
    peer = peers[comm]
    given(op, "reduce_handle_out")
    work, tag = _all_reduce(send, recv, work)
    peer.launched[tag] = extension.launch(peer.comm, "all_reduce_async", work, tag)
    op.comm, op.tag = ffi.cast("pcclComm_t *", comm), tag


@implements("pcclAwaitAsyncReduce")
def await_async_reduce(op: Any, info: Any) -> None:
    given(op, "reduce_handle")
    handle = peers[op.comm].launched.pop(op.tag, None)
    if handle is None:
        raise ValueError(f"no all-reduce with tag {op.tag} was launched, or it was awaited before")
    _, _, found = handle.wait()
    if handle.error is not None:
        raise handle.error
    values.fill(info, found)


@implements("pcclAllReduceMultipleWithRetry")
def all_reduce_multiple(ops: Any, count: int, comm: Any, info: Any, max_in_flight: int) -> None:
    peer = peers[comm]
    if count:
        given(ops, "descriptors")
    several = [
        values.all_reduce(ops[i].sendbuf, ops[i].recvbuf, ops[i].descriptor) for i in range(count)
    ]
    found: ReduceInfo = peer.comm.all_reduce_multiple_with_retry(
        several, max_in_flight=max_in_flight
    )
    values.fill(info, found)


# ---- shared state ----


@implements("pcclSynchronizeSharedState")
def synchronize(comm: Any, state: Any, strategy: int, info: Any) -> None:
    peer = peers[comm]
    asked = values.member(SharedStateSyncStrategy, strategy, "strategy")
    shared = peer.state.of(given(state, "shared_state"))
    found = peer.comm.sync_shared_state(shared, asked)
    state.revision = shared.revision
    if info != ffi.NULL:
        info.tx_bytes, info.rx_bytes = found.tx_bytes, found.rx_bytes


# ---- a master in this process ----


@implements("pcclCreateMaster")
def create_master(address: Any, made: Any) -> None:
    given(made, "master_out")
    made[0] = masters.add(Master(MasterNode(values.address(address))))


@implements("pcclRunMaster")
def run_master(master: Any) -> None:
    found = masters[master]
    # In Python's main thread it would handle SIGTERM, which belongs to the program.
    with ThreadPoolExecutor(1, "pccl-run-master") as starter:
        starter.submit(found.node.run).result()
    found.started, found.stopped = True, False


@implements("pcclInterruptMaster")
def interrupt_master(master: Any) -> None:
    found = masters[master]
    found.stopped = found.started  # even if interrupt() reports that it has failed before
    found.node.interrupt()


@implements("pcclMasterAwaitTermination")
def await_master(master: Any) -> None:
    found = masters[master]
    if not found.started:
        why = "this master was never started: call pcclRunMaster() first"
        raise error_for(Result.INVALID_USAGE, "pcclMasterAwaitTermination", why)
    try:
        found.node.wait()
    finally:
        found.stopped = True


@implements("pcclDestroyMaster")
def destroy_master(master: Any) -> None:
    found = masters[master]
    if found.started and not found.stopped:
        why = "this master is running: call pcclInterruptMaster() first"
        raise error_for(Result.INVALID_USAGE, "pcclDestroyMaster", why)
    masters.remove(master)


lib.pccl_capi_implement()
