"""The collectives of a `Communicator`.

All follow the same rules. Every peer of the group must enter the same call, with the same tag and
the same work; who asks for something else is named in an error on all peers. A collective succeeds
on all of them or on none: when a peer is lost it fails with `PeerLostError` on all survivors, every
buffer that was given, in place too, holds what it held before, and calling again is enough. An
array that only receives is unspecified then.

One array is a numpy array or torch tensor of any shape, of a dtype of `DataType`. Its elements fill
one stretch of memory, in any order: contiguous, transposed, torch.channels_last. It is moved as it
lies, so it must lie in the same order on all peers; where it does not, all are told who has which.
A list or dict of arrays is one collective: all of them are reduced (or gathered, ...) over the same
peers, or none is. Dicts need the same keys on all peers, in any order.

Ranks are the positions of the first ring, `Communicator.rank`: they shift when peers come and go.
Where they matter (all but all-reduce and barrier), a collective counts on the ranks that its thread
has seen last: when it read `rank`, `world_size` or `peers`, when `PeerLostError` told it of a loss,
or when `connect`, `update_topology` or `optimize_topology` returned, in whichever thread. If they
are not those any more the collective fails with `PeerLostError`, before anything happens.

An exception that leaves a call, of a signal handler for instance, gives the call up: when it is
raised, no buffer is used any more. The other peers may have succeeded all the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from pccl import operands
from pccl.arrays import Buffer, is_torch
from pccl.errors import error_for
from pccl.handle import AsyncReduceHandle
from pccl.launch import Launch, info
from pccl.operands import A, Arrays
from pccl.protocol.peer import effects
from pccl.ranks import KnownRanks
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.client import Client
from pccl.runtime.client.memory import Operands
from pccl.standing import Standing
from pccl.types import (
    DeviceType,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
)


class Collectives(ABC):
    """What `Communicator` inherits."""

    def __init__(self) -> None:
        self._standing = Standing()
        self._ranks = KnownRanks()

    @abstractmethod
    def _connected(self, name: str) -> Client:
        """The client of a peer that is in a run; raises INVALID_USAGE, or why it is in none."""

    # ---- all-reduce ----

    def all_reduce(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group into `recv`, bit-identical on all of them.

        A ring all-reduce: reduce-scatter, then all-gather.

        Args:
            send: an array, or a list or dict of them.
            recv: the same kind, dtypes, element counts and order in memory, as that of empty_like;
                None, or `send` itself, is in place.
            op: AVG is SUM divided by the number of contributors; of integers, rounded towards 0, so
                that the average of 3 and 4 is 3. Or its name: "sum", "max", ...
            tag: tells apart collectives that run at the same time; the same on all peers.
            operand_descriptor: its dtype must be the array's.
            quantization_options: what goes over the wire is quantized like this: floats only, and
                no PROD. Every peer's result has the same bits; docs/quantization.md has the
                errors. A NaN or an infinity makes its block of elements NaN.
            quantization: the same by a short name: "int8" or "int4" (block-wise), "uint8".
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            The number of contributors, payload bytes sent and received by this peer.

        Raises:
            PCCLTimeoutError: the time-out has passed; the message names who was waited for.
            PCCLError: TOO_FEW_PEERS (alone in the group; buffers are untouched),
                RANK_CONNECTION_LOST (call again), INVALID_ARGUMENT (the peers ask for different
                work, the tag is in use, or this cannot be quantized), INVALID_USAGE.
            ValueError, AssertionError: the arrays do not fit each other.
            ValueError: an unknown `quantization`, or `quantization_options` as well.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        options = _options(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options)
        _check_descriptor(work, operand_descriptor)
        return self._run("all_reduce", work, tag, timeout)

    def all_reduce_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
    ) -> AsyncReduceHandle:
        """Launches `all_reduce` and returns at once.

        The arrays must not be touched until `wait()` returns.

        Any number may be outstanding, launched in any order on different peers; their tags differ.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the tag is in use, or this cannot be
                quantized), INVALID_USAGE. What happens later is the handle's to tell.
            ValueError, AssertionError, OverflowError: as for `all_reduce`.
        """
        options = _options(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options)
        _check_descriptor(work, operand_descriptor)
        target = send if recv is None else recv
        return self._launch("all_reduce_async", work, tag, target)

    def all_reduce_multiple_with_retry(
        self,
        descriptors: Sequence[ReduceOpDescriptor],
        *,
        max_in_flight: int = 4,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Runs several all-reduces, a few at a time, each again and again until it commits.

        Each collective is averaged over those who contributed to it, which may differ between
        collectives when a peer is lost in between.

        Args:
            descriptors: in the same order on all peers; their tags differ.
            max_in_flight: collectives under way at the same time.
            timeout: seconds for all of them; those that have not committed then are given up.

        Returns:
            Contributors of the last one, payload bytes of all, failed attempts not counted.

        Raises:
            PCCLTimeoutError: the time-out has passed; some may have committed.
            PCCLError: TOO_FEW_PEERS when all others are lost; INVALID_ARGUMENT, also when there is
                no descriptor or `max_in_flight` is not positive; INVALID_USAGE.
        """
        name = "all_reduce_multiple_with_retry"
        deadline = Deadline(timeout)
        if not descriptors:
            raise error_for(Result.INVALID_ARGUMENT, name, "the list of descriptors is empty")
        if max_in_flight < 1:
            why = f"max_in_flight is {max_in_flight}: it must be at least 1"
            raise error_for(Result.INVALID_ARGUMENT, name, why)
        waiting = list(range(len(descriptors)))
        in_flight: list[tuple[int, Launch]] = []
        world_size = tx_bytes = rx_bytes = 0
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_in_flight:
                    index = waiting.pop(0)
                    launch = self._prepare(name, descriptors[index].reduce_descriptor.tag)
                    in_flight.append((index, launch))
                    launch.begin(_described(descriptors[index]))
                index, launch = in_flight[0]
                end = launch.finish(deadline)
                del in_flight[0]
                if isinstance(end, effects.Answer):
                    one = info(end)
                    world_size = one.local_world_size
                    tx_bytes += one.tx_bytes
                    rx_bytes += one.rx_bytes
                elif end.again:
                    # in the order of the list, so that all peers' windows overlap
                    waiting = sorted([*waiting, index])
                else:
                    for _, other in in_flight:
                        other.finish(Deadline(0.0))
                    raise launch.error(end)
        except BaseException:
            for _, launch in in_flight:
                launch.let_go()
            raise
        return ReduceInfo(world_size, tx_bytes, rx_bytes)

    # ---- the others ----

    def all_gather(
        self, send: A, recv: A | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> A:
        """Gathers what every peer of the group sends, the same on all of them.

        Args:
            send: an array, or a list or dict of them; the same dtypes and element counts on all
                peers.
            recv: for each array one with `world_size` times its elements, in which those of rank r
                are the r-th part; `send` may be this peer's part of it. None: new arrays of the
                shape (world_size, *send.shape).
            tag: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not fit each other or the group's size.
        """
        client = self._several("all_gather")
        work, result = operands.all_gather(send, recv, self._ranks.of(client.number))
        self._run("all_gather", work, tag, timeout)
        return result

    def all_gather_async(
        self, send: Arrays, recv: Arrays | None = None, *, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `all_gather` and returns at once; the handle's `result` is what it returns."""
        client = self._several("all_gather_async")
        work, result = operands.all_gather(send, recv, self._ranks.of(client.number))
        return self._launch("all_gather_async", work, tag, target=result)

    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduces `send` over all peers of the group; the peer of rank r gets the r-th part.

        Args:
            send: an array, or a list or dict of them.
            recv: for each array one with the `world_size`-th part of its elements, which must be a
                whole number; it may be this peer's part of `send`. None: new arrays, each of the
                shape of `send` with the first dimension divided by `world_size`.
            op: as for `all_reduce`.
            tag: as for `all_reduce`.
            quantization_options: as for `all_reduce`.
            quantization: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not fit each other, or cannot be divided.
        """
        client = self._several("reduce_scatter")
        options = _options(quantization_options, quantization)
        ranks = self._ranks.of(client.number)
        work, result = operands.reduce_scatter(send, recv, op, options, ranks)
        self._run("reduce_scatter", work, tag, timeout)
        return result

    def reduce_scatter_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
    ) -> AsyncReduceHandle:
        """Launches `reduce_scatter`; the handle's `result` is what it returns."""
        client = self._several("reduce_scatter_async")
        options = _options(quantization_options, quantization)
        ranks = self._ranks.of(client.number)
        work, result = operands.reduce_scatter(send, recv, op, options, ranks)
        return self._launch("reduce_scatter_async", work, tag, target=result)

    def broadcast(
        self,
        arrays: Arrays,
        *,
        root: int | Literal["first"] = 0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Gives all peers of the group the content of one of them, in place.

        `root` means the peer that had this rank when the program last saw ranks. If that peer, or
        any other, has been lost since, the call fails with `PeerLostError`, and nobody's content
        has changed: the next call goes by the ranks as they are then, so look at `rank` again to
        know who is who. A lost root never makes another peer the source unnoticed.

        A rank is a position in the ring as it is now, and not the RANK that torchrun or MPI give to
        a process: rank 0 is not the process that was started first, nor the same one for ever.
        `root="first"` means a peer that lasts: of the members, the one that is longest in the run
        (whose peer number is the lowest), wherever it is in the ring. It changes only when that
        peer is lost; the call that is told so by `PeerLostError` has changed nothing, and the next
        one goes by who is longest in the run then.

        Args:
            arrays: an array, or a list or dict of them; the same dtypes and element counts on all
                peers.
            root: rank of the peer whose content it is, or "first"; the same on all peers.
            tag: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            The number of peers, payload bytes sent and received by this one.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: no peer has that rank, or an array cannot be written.
            TypeError: `root` is no rank.
            AssertionError: the elements of an array do not follow each other in memory.
        """
        client = self._several("broadcast")
        work = operands.broadcast(arrays, root, self._ranks.of(client.number))
        return self._run("broadcast", work, tag, timeout)

    def broadcast_async(
        self, arrays: Arrays, *, root: int | Literal["first"] = 0, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `broadcast` and returns at once."""
        client = self._several("broadcast_async")
        work = operands.broadcast(arrays, root, self._ranks.of(client.number))
        return self._launch("broadcast_async", work, tag, target=arrays)

    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> None:
        """Returns when all peers of the group have entered it; at once for a peer that is alone.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`, but never TOO_FEW_PEERS.
        """
        if self._connected("barrier").world.local_size > 1:
            self._run("barrier", operands.barrier(), tag, timeout)

    def barrier_async(self, *, tag: int = 0) -> AsyncReduceHandle:
        """Enters `barrier`; the handle's `wait()` returns when all have."""
        client = self._connected("barrier")
        if client.world.local_size < 2:
            return AsyncReduceHandle(None, None)
        return self._launch("barrier", operands.barrier(), tag)

    # ---- helpers ----

    def _see_ranks(self, client: Client) -> None:
        """This thread has been told who is there."""
        self._ranks.see(client.plan, client.number)

    def _several(self, name: str) -> Client:
        """The client, if there is anybody else in the group."""
        client = self._connected(name)
        if client.world.local_size < 2:
            self._see_ranks(client)
            why = f"this peer is alone in its group of the run at {client.master}"
            raise error_for(Result.TOO_FEW_PEERS, name, why)
        return client

    def _prepare(self, name: str, tag: int) -> Launch:
        if not 0 <= tag < 1 << 64:
            raise OverflowError(f"tag is {tag}: it must be in 0 to 2**64 - 1")
        return Launch(name, tag, self._several(name), self._standing, self._ranks)

    def _launch(
        self, name: str, work: Operands, tag: int, target: object = None
    ) -> AsyncReduceHandle:
        launch = self._prepare(name, tag)
        try:
            launch.begin(work)
            return AsyncReduceHandle(launch, target)
        except BaseException:
            launch.let_go()
            raise

    def _run(self, name: str, work: Operands, tag: int, timeout: float | None) -> ReduceInfo:
        """Launches and waits; raises what went wrong."""
        deadline = Deadline(timeout)
        self._connected(name)
        stuck = timeout is None and self._standing.single_threaded()
        launch = self._prepare(name, tag)
        try:
            launch.begin(work, stuck)
            end = launch.finish(deadline)
        except BaseException:
            launch.let_go()
            raise
        if isinstance(end, effects.Fail):
            raise launch.error(end)
        return info(end)


def _described(descriptor: ReduceOpDescriptor) -> Operands:
    """The all-reduce that a descriptor asks for."""
    work = descriptor.reduce_descriptor
    dtype = work.operand_descriptor.datatype

    def at(address: int, owner: object) -> Buffer:
        where = Buffer.of(owner).device_type if is_torch(owner) else DeviceType.CPU
        return Buffer.at(address, work.count, dtype, owner, where, descriptor._layout)

    send, recv = descriptor._owners or (None, None)
    return operands.described(
        at(descriptor.sendbuf_ptr, send),
        at(descriptor.recvbuf_ptr, recv),
        work.op,
        work.quantization_options,
    )


def _check_descriptor(work: Operands, descriptor: ReduceOperandDescriptor | None) -> None:
    for operand in work.each:
        if descriptor is not None and descriptor.datatype is not operand.send.dtype:
            raise error_for(
                Result.INVALID_ARGUMENT,
                "all_reduce",
                f"the operand descriptor says {descriptor.datatype.name}, "
                f"the arrays are {operand.send.dtype.name}",
            )


def _options(
    options: QuantizationOptions | None, quantization: str | None
) -> QuantizationOptions | None:
    if quantization is None:
        return options
    if options is not None:
        raise ValueError("give quantization or quantization_options, not both")
    return QuantizationOptions.of(quantization)
