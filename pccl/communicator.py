"""`Communicator`: one peer's membership in a run, and its collectives."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

import xxhash

from pccl.arrays import Array, Buffer, pair
from pccl.errors import PCCLError, PCCLTimeoutError, UnsupportedError, error_for
from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.protocol import peer as core
from pccl.runtime.client import Call, Client, Deadline, Note, Reduce
from pccl.runtime.config import Config, machine_id
from pccl.runtime.sync import Region, synchronise
from pccl.security import Security
from pccl.shared_state import SharedState
from pccl.text import configure_logging, parse_address
from pccl.types import (
    Attribute,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)
from pccl.version import __version__

log = logging.getLogger("pccl")

WELCOME_TIMEOUT_S = (
    10.0  # for the master's first answer; admission, later, may take as long as it takes
)
ATTEMPT_INTERVAL_S = 1.0
# Who stands in one of these makes no other call until it returns.
EXCLUSIVE = {"update_topology", "optimize_topology", "sync_shared_state"}


class AsyncReduceHandle:
    """A collective in progress; made by `Communicator.all_reduce_async`."""

    def __init__(self, communicator: Communicator, client: Client, call: Call, tag: int) -> None:
        self._communicator = weakref.ref(communicator)
        self._client = client
        self._call = call
        self._tag = tag
        self._lock = threading.Lock()
        self._end: core.Answer | core.Fail | None = None

    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome; the same one every time, and never raises.

        Args:
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            (is_success, status, info): status is the value of a `Result`; a failed collective has
            `ReduceInfo(0, 0, 0)`, and its send buffer holds what it held before.
        """
        end = self._finish(timeout)
        if isinstance(end, core.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, _info(end)

    def _finish(self, timeout: float | None = None) -> core.Answer | core.Fail:
        deadline = Deadline(timeout)
        with self._lock:
            if self._end is None:
                note = deadline.next(self._client, self._call)
                assert isinstance(note, core.Answer | core.Fail)
                self._end = note
                communicator = self._communicator()
                if communicator is not None:
                    communicator._release(self._tag)
            return self._end


class Communicator:
    """One peer of a run: joins it at a master, and takes part in its collectives.

        with pccl.Communicator("host:48148") as comm:
            comm.all_reduce(x, y, op=pccl.ReduceOp.AVG)

    Usable from several threads. Construction does no I/O.

    Args:
        address: `host:port` of the master; an IPv6 address stands in brackets.
        peer_group: collectives and shared state are among the peers of one group.
        p2p_connection_pool_size: connections (lanes) to each neighbour; 0 chooses well.
        security: encrypts, with the keys in this directory (see `pccl keys`); None: in the
            directory PCCL_CURVE_DIR, and without that not at all.

    Raises:
        AssertionError: `address` has no colon.
        ValueError: `address` is malformed otherwise, or another argument is out of range.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        security: Security | str | os.PathLike[str] | None = None,
    ) -> None:
        self._host, self._port = parse_address(address)
        if not 0 <= peer_group < 1 << 32:
            raise ValueError(f"peer_group is {peer_group}: it must be in 0 to 2**32 - 1")
        if not 0 <= p2p_connection_pool_size <= 256:
            raise ValueError(
                f"p2p_connection_pool_size is {p2p_connection_pool_size}: it must be in 0 to 256"
            )
        self._group = peer_group
        self._pool_size = p2p_connection_pool_size
        self._security = security
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._tags: set[int] = set()  # of collectives that are launched and not awaited
        self._voting: set[str] = set()  # rounds of the whole run or group that a thread stands in
        self._user: threading.Thread | None = None  # the thread that made the latest call
        self._shared = False  # whether several threads that live have made calls
        self._finalizer: weakref.finalize[..., Communicator] | None = None
        self._shared_revision = 0

    # ---- joining and leaving ----

    def connect(self, n_attempts: int = 5, timeout: float | None = None) -> None:
        """Joins the run; returns when all accepted peers have admitted this one.

        They admit it by `update_topology`; the first peer of a run is accepted at once.

        Args:
            n_attempts: tries to reach the master, one second apart.
            timeout: seconds to wait for admission, once the master is reached.

        Raises:
            PCCLTimeoutError: not admitted in time; this peer has left again.
            PCCLError: MASTER_CONNECTION_FAILED after the last attempt; INVALID_USAGE when already
            connected,
                when the master refuses this peer, or when keys are missing or unsafe (the message
                says why).
            ValueError: `n_attempts` is not positive, or a PCCL_ environment variable is malformed.
        """
        if n_attempts < 1:
            raise ValueError(f"n_attempts is {n_attempts}: it must be at least 1")
        configure_logging()
        self._single_threaded()
        if self._client is not None and self._client.over is None:
            why = "this communicator is connected already"
            raise error_for(Result.INVALID_USAGE, "connect", why)
        config = Config.from_env()
        security = Security.of(self._security)
        for attempt in range(1, n_attempts + 1):
            try:
                self._join(config, security, timeout)
                return
            except _Unreachable as error:
                log.info("attempt %d of %d to reach the master: %s", attempt, n_attempts, error)
                if attempt == n_attempts:
                    why = (
                        f"no pccl master answers at {self._host}:{self._port} after {n_attempts} "
                        f"attempts ({error}): does it run, and does a firewall let us through?"
                    )
                    raise error_for(Result.MASTER_CONNECTION_FAILED, "connect", why) from None
            time.sleep(ATTEMPT_INTERVAL_S)

    def _join(self, config: Config, security: Security | None, timeout: float | None) -> None:
        try:  # for its errors: ZeroMQ would not say what is wrong with an address
            socket.create_connection((self._host, self._port), config.connect_timeout_s).close()
        except OSError as error:
            raise _Unreachable(error.strerror or str(error)) from None

        def hello(port: int, ipc: str) -> m.Hello:
            return m.Hello(
                m.PROTOCOL_VERSION,
                __version__,
                self._group,
                config.advertise,
                port,
                ipc,
                machine_id(),
                arithmetic_digest(),
            )

        client = Client(self._host, self._port, hello, self._pool_size, config, security)
        try:
            call = client.join()
            try:
                note = call.next(WELCOME_TIMEOUT_S)
            except queue.Empty:
                raise _Unreachable(f"no answer within {WELCOME_TIMEOUT_S:.0f} s") from None
            if isinstance(note, m.Welcome):
                log.info("registered as peer %d; waiting to be admitted", note.peer)
                note = self._await_admission(call, timeout)
            if isinstance(note, core.Fail):
                if note.result is Result.MASTER_CONNECTION_FAILED:
                    raise _Unreachable(note.why)
                self._raise("connect", note)
        except BaseException:
            client.close("connect failed")
            raise
        self._client = client
        self._finalizer = weakref.finalize(self, client.close, "the communicator was deleted")

    def _await_admission(self, call: Call, timeout: float | None) -> Note:
        try:
            return call.next(timeout)
        except queue.Empty:
            raise PCCLTimeoutError(
                Result.MASTER_CONNECTION_FAILED,
                "connect",
                f"the peers of the run at {self._host}:{self._port} did not admit this one within "
                f"{timeout:g} s: each of them must call update_topology()",
            ) from None

    def close(self) -> None:
        """Leaves the run; collectives in progress fail and are restored. Idempotent."""
        if self._client is not None:
            self._client.close("the communicator was closed")
        if self._finalizer is not None:
            self._finalizer.detach()

    def __enter__(self) -> Communicator:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- who is there ----

    def get_attribute(self, attribute: Attribute) -> int:
        """A world size, of accepted peers, as of now.

        Raises:
            PCCLError: INVALID_USAGE before `connect`.
        """
        world = self._connected("get_attribute").world
        match attribute:
            case Attribute.GLOBAL_WORLD_SIZE:
                return world.global_size
            case Attribute.LOCAL_WORLD_SIZE:
                return world.local_size
            case Attribute.NUM_DISTINCT_PEER_GROUPS:
                return world.groups
            case Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
                return world.largest
        raise ValueError(f"{attribute!r} is no Attribute")

    @property
    def world_size(self) -> int:
        """Accepted peers of this peer's group. Raises PCCLError INVALID_USAGE before `connect`."""
        return self.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    @property
    def rank(self) -> int:
        """This peer's position in the ring; it changes when peers come and go."""
        client = self._connected("rank")
        rings = client.plan.rings
        return rings[0].order.index(client.number) if rings else 0

    @property
    def peers(self) -> list[str]:
        """The accepted peers of the group, in words, in the order in which they were accepted."""
        return [str(info) for info in self._connected("peers").plan.peers]

    # ---- rounds of the run ----

    def update_topology(self, timeout: float | None = None) -> None:
        """Admits pending peers. Returns when all accepted peers of all groups have called it.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
            this
                one), PENDING_ASYNC_OPS (a collective is launched and not awaited).
        """
        client = self._exclusive("update_topology")
        self._vote("update_topology", client, client.update_topology, timeout)

    def are_peers_pending(self, timeout: float | None = None) -> bool:
        """Whether peers wait to be admitted: the same answer for all.

        All accepted peers of all groups must ask. Collectives may run in other threads meanwhile.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
            this one).
        """
        client = self._connected("are_peers_pending")
        stuck = self._single_threaded() and timeout is None
        end = self._vote(
            "are_peers_pending", client, lambda: client.are_peers_pending(stuck), timeout
        )
        return bool(end.value)

    def optimize_topology(self) -> None:
        """Keeps the order of the ring: measuring links is not there yet.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or fewer than two peers), PENDING_ASYNC_OPS.
        """
        client = self._exclusive("optimize_topology")
        if client.world.global_size < 2:
            why = "this peer is alone in the run: there is no order to optimise"
            raise error_for(Result.INVALID_USAGE, "optimize_topology", why)

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        timeout: float | None = None,
    ) -> SharedStateSyncInfo:
        """Makes the shared state of all peers of the group bit-identical.

        Every peer offers digests of its entries; the content that is most common among those with
        the highest revision wins (a tie goes to the peer that was accepted first). Peers that
        differ fetch exactly the entries that differ, verify them, and only then overwrite their
        own. Memory: a copy of what differs, meanwhile.

        Args:
            shared_state: must not change during the call; `revision` is set to the elected one.
            strategy: only ENFORCE_POPULAR so far.
            timeout: seconds to wait for the others.

        Returns:
            Payload bytes sent and received by this peer; (0, 0) everywhere when all were equal.

        Raises:
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS; INVALID_ARGUMENT (the revisions break the
            rules, or
                this peer's entries are not those of the others, which also drops it from the run).
        """
        client = self._exclusive("sync_shared_state")
        if strategy is not SharedStateSyncStrategy.ENFORCE_POPULAR:
            raise UnsupportedError(
                Result.INVALID_USAGE,
                "sync_shared_state",
                f"strategy {strategy.name} is not there yet: use ENFORCE_POPULAR",
            )
        regions = [
            Region(
                info.name,
                info.dtype.value,
                info.numel,
                info.allow_content_inequality,
                info.data_ptr,
                info.nbytes,
            )
            for info in shared_state.tensor_infos
        ]
        with self._once("sync_shared_state"):
            end = synchronise(
                client,
                regions,
                shared_state.revision,
                strategy.value,
                shared_state,
                Deadline(timeout),
            )
        if isinstance(end, core.Fail):
            self._raise("sync_shared_state", end)
        shared_state.revision = self._shared_revision = end.revision
        return SharedStateSyncInfo(end.tx_bytes, end.rx_bytes)

    @property
    def revision(self) -> int:
        """The shared state's revision after the last synchronisation; 0 before."""
        return self._shared_revision

    # ---- collectives ----

    def all_reduce(
        self,
        send: Array,
        recv: Array,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group into `recv`, bit-identical on all of them.

        A ring all-reduce: reduce-scatter, then all-gather. When a peer is lost it fails on all
        survivors, `send` holds what it held (in place too), `recv` out of place is unspecified, and
        calling again is enough.

        Args:
            send: contiguous numpy array or CPU torch tensor of any shape and a dtype of `DataType`.
            recv: the same kind, dtype and element count; `recv is send` reduces in place.
            op: AVG is SUM divided by the number of contributors.
            tag: tells apart collectives that run at the same time; the same on all peers.
            operand_descriptor: its dtype must be the array's.
            quantization_options: not there yet, except algorithm NONE.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            The number of contributors, payload bytes sent and received by this peer.

        Raises:
            PCCLTimeoutError: the time-out has passed; the message names who was waited for.
            PCCLError: TOO_FEW_PEERS (alone in the group; buffers are untouched),
            RANK_CONNECTION_LOST (call again),
                INVALID_ARGUMENT (the peers ask for different work, or the tag is in use),
                INVALID_USAGE.
            ValueError, AssertionError: the arrays do not fit each other.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        buffers = _buffers(send, recv, operand_descriptor)
        stuck = self._single_threaded() and timeout is None
        handle = self._launch("all_reduce", buffers, op, tag, quantization_options, stuck)
        end = handle._finish(timeout)
        if isinstance(end, core.Fail):
            self._raise("all_reduce", end)
        return _info(end)

    def all_reduce_async(
        self,
        send: Array,
        recv: Array,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> AsyncReduceHandle:
        """Launches `all_reduce` and returns at once.

        The arrays must not be touched until `wait()` returns.

        Any number may be outstanding, launched in any order on different peers; their tags differ.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the tag is in use), INVALID_USAGE. What
            happens later is
                the handle's to tell.
            ValueError, AssertionError, OverflowError: as for `all_reduce`.
        """
        buffers = _buffers(send, recv, operand_descriptor)
        return self._launch("all_reduce_async", buffers, op, tag, quantization_options)

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Runs several all-reduces, a few at a time, each again and again until it commits.

        Each collective is averaged over those who contributed to it, which may differ between
        collectives when a peer is lost in between.

        Args:
            descriptors: in the same order on all peers; their tags differ.
            max_in_flight: collectives under way at the same time.

        Returns:
            Contributors of the last one, payload bytes of all, failed attempts not counted.

        Raises:
            PCCLError: TOO_FEW_PEERS when all others are lost, INVALID_ARGUMENT, INVALID_USAGE.
            ValueError: `max_in_flight` is not positive.
        """
        name = "all_reduce_multiple_with_retry"
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: it must be at least 1")
        waiting = list(range(len(descriptors)))
        in_flight: list[tuple[int, AsyncReduceHandle]] = []
        world_size = tx_bytes = rx_bytes = 0
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_in_flight:
                    index = waiting.pop(0)
                    in_flight.append((index, self._launch_descriptor(name, descriptors[index])))
                index, handle = in_flight.pop(0)
                end = handle._finish()
                if isinstance(end, core.Answer):
                    info = _info(end)
                    world_size = info.local_world_size
                    tx_bytes += info.tx_bytes
                    rx_bytes += info.rx_bytes
                elif end.result is Result.RANK_CONNECTION_LOST:
                    # in the order of the list, so that all peers' windows overlap
                    waiting = sorted([*waiting, index])
                else:
                    self._raise(name, end)
        finally:
            for _, handle in in_flight:
                handle.wait()
        return ReduceInfo(world_size, tx_bytes, rx_bytes)

    def _launch_descriptor(self, name: str, descriptor: ReduceOpDescriptor) -> AsyncReduceHandle:
        work = descriptor.reduce_descriptor
        dtype = work.operand_descriptor.datatype
        buffers = tuple(
            Buffer.at(address, work.count, dtype, descriptor)
            for address in (descriptor.sendbuf_ptr, descriptor.recvbuf_ptr)
        )
        return self._launch(
            name, (buffers[0], buffers[1]), work.op, work.tag, work.quantization_options
        )

    def _launch(
        self,
        name: str,
        buffers: tuple[Buffer, Buffer],
        op: ReduceOp,
        tag: int,
        quantization_options: QuantizationOptions | None,
        stuck: bool = False,
    ) -> AsyncReduceHandle:
        if not 0 <= tag < 1 << 64:
            raise OverflowError(f"tag is {tag}: it must be in 0 to 2**64 - 1")
        client = self._connected(name)
        if (
            quantization_options is not None
            and quantization_options.algorithm is not QuantizationAlgorithm.NONE
        ):
            why = "quantisation is not there yet: leave quantization_options out"
            raise UnsupportedError(Result.INVALID_ARGUMENT, name, why)
        if client.world.local_size < 2:
            why = "this peer is alone in its group: admit others by update_topology() first"
            raise error_for(Result.TOO_FEW_PEERS, name, why)
        with self._lock:
            self._may_enter(name)
            if tag in self._tags:
                why = f"a collective with tag {tag} is launched and not awaited: use another tag"
                raise error_for(Result.INVALID_ARGUMENT, name, why)
            self._tags.add(tag)
        send, recv = buffers
        work = m.Work("all_reduce", op.value, send.dtype.value, send.count)
        call = client.all_reduce(tag, Reduce(send, recv, work), stuck)
        return AsyncReduceHandle(self, client, call, tag)

    # ---- helpers ----

    def _release(self, tag: int) -> None:
        with self._lock:
            self._tags.discard(tag)

    def _connected(self, name: str) -> Client:
        self._single_threaded()
        client = self._client
        if client is None:
            why = "this communicator is not connected: call connect() first"
            raise error_for(Result.INVALID_USAGE, name, why)
        if client.over is not None:
            self._raise(name, client.over)
        return client

    def _exclusive(self, name: str) -> Client:
        client = self._connected(name)
        with self._lock:
            self._may_enter(name)
        return client

    def _may_enter(self, name: str) -> None:
        """Under the lock: whether a call can stand next to those that this peer stands in."""
        if name in EXCLUSIVE and self._tags:
            tags = sorted(self._tags)
            why = f"collectives are launched and not awaited (tags {tags}): wait() for them first"
            raise error_for(Result.PENDING_ASYNC_OPS, name, why)
        others = self._voting & (EXCLUSIVE | {name}) if name not in EXCLUSIVE else self._voting
        if others:
            why = f"another thread of this peer stands in {min(others)}()"
            raise error_for(Result.INVALID_USAGE, name, why)

    def _single_threaded(self) -> bool:
        """Whether this thread is the only one there that has ever made a call.

        If so, it makes no other call while it waits in this one, and says so: it can be told when
        nobody will ever meet it there.
        """
        with self._lock:
            user, self._user = self._user, threading.current_thread()
            self._shared |= user is not None and user is not self._user and user.is_alive()
            return not self._shared

    def _once(self, name: str) -> _Standing:
        return _Standing(self, name)

    def _vote(
        self, name: str, client: Client, begin: Callable[[], Call], timeout: float | None
    ) -> core.Answer:
        deadline = Deadline(timeout)
        with self._once(name):
            end = deadline.next(client, begin())
        if isinstance(end, core.Fail):
            self._raise(name, end)
        assert isinstance(end, core.Answer)
        return end

    def _raise(self, name: str, end: core.Fail) -> NoReturn:
        raise end.error(end.result, name, end.why)


class _Standing:
    """One thread at a time stands in a round of the whole run or group."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator = communicator
        self._name = name

    def __enter__(self) -> None:
        with self._communicator._lock:
            self._communicator._may_enter(self._name)
            self._communicator._voting.add(self._name)

    def __exit__(self, *exception: object) -> None:
        with self._communicator._lock:
            self._communicator._voting.discard(self._name)


class _Unreachable(Exception):
    """The master does not answer: worth another attempt."""


def _buffers(
    send: Array, recv: Array, operand: ReduceOperandDescriptor | None
) -> tuple[Buffer, Buffer]:
    buffers = pair(send, recv)
    if operand is not None and operand.datatype is not buffers[0].dtype:
        raise error_for(
            Result.INVALID_ARGUMENT,
            "all_reduce",
            f"the operand descriptor says {operand.datatype.name}, "
            f"the arrays are {buffers[0].dtype.name}",
        )
    return buffers


def _info(end: core.Answer) -> ReduceInfo:
    reduced = end.value
    assert isinstance(reduced, core.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)


def arithmetic_digest() -> bytes:
    """Names this machine's arithmetic: XXH3-128 of what the kernels compute of fixed inputs."""
    size = lib.pccl_self_test(ffi.NULL, 0)
    out = ffi.new("unsigned char[]", size)
    lib.pccl_self_test(out, size)
    return xxhash.xxh3_128_digest(ffi.buffer(out))


__all__ = ["AsyncReduceHandle", "Communicator", "PCCLError"]
