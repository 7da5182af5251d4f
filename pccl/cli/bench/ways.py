"""The variants of one collective of one size: the call, its input, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

import pccl
from pccl.cli.bench import data
from pccl.cli.bench.places import Host, Place
from pccl.tensors.arrays import Array
from pccl.types import DataType, QuantizationOptions, ReduceOp

OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
GLOO = "gloo"
NCCL = "nccl"
TORCH = (GLOO, NCCL)  # of torch.distributed
UNQUANTIZED = "unquantized"
PIECES = "pieces"
TENSORS = "tensors"
OTHERS = (*TORCH, UNQUANTIZED, PIECES, TENSORS)  # what pccl may be measured against
REDUCING = ("all_reduce", "reduce_scatter")

_PIECES = 16
_WIDTH = 256  # of a GPT of 512 tokens, 64 places, 12 blocks and a norm; its 148 tensors in rows:
_BLOCK = (1, 1, 1, 1, 3 * _WIDTH, 3, _WIDTH, 1, 4 * _WIDTH, 4, 4 * _WIDTH, 1)
_ROWS = (512, 64, *_BLOCK * 12, 1, 1)
ELEMENTS_MIN = {PIECES: _PIECES, TENSORS: sum(_ROWS)}  # so that none is empty

_TAG = 1  # of what is timed; the meetings before it have tag 0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do it.

    Attributes:
        meet: lets all peers begin together.
        run: what is timed.
        sent: does it once more; the bytes that this peer sent.
        reset: gives the buffers known contents.
        result: the result, on the host.
        quantization: of the result; None: it is exact.
    """

    meet: Callable[[], object]
    run: Callable[[], object]
    sent: Callable[[], int]
    reset: Callable[[], None]
    result: Callable[[], data.Bits]
    quantization: str | None = None


class Trial:
    """A collective of `count` elements for each peer, on buffers of its own.

    Args:
        comm: of this peer, whose rank decides what it brings.
        what: a name of `pccl.cli.bench.table.FACTORS`.
        dtype: of the elements.
        op: if it reduces.
        count: elements of the smaller buffer.
        quantization: as `Communicator.all_reduce` takes it.
        place: where its arrays lie; None: in host memory.
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        what: str,
        dtype: DataType,
        op: ReduceOp,
        count: int,
        quantization: str | None = None,
        place: Place | None = None,
    ) -> None:
        self._quantization, self._place = quantization, place or Host()
        self._comm, self._what, self._dtype, self._op = comm, what, dtype, op
        self._rank, self._peers, self._count = comm.rank, comm.world_size, count
        send = count * (self._peers if what in ("reduce_scatter", "all_to_all") else 1)
        recv = count * (self._peers if what in ("all_gather", "all_to_all") else 1)
        self._content = data.tiled(data.contribution(dtype, op, self._rank), send)
        self._send: Any = self._place.put(self._content, dtype)
        self._recv: Any = self._place.put(np.zeros(recv, self._content.dtype), dtype)

    def ways(self, against: str | None) -> dict[str, Way]:
        """All of them by name, and one of OTHERS."""
        found = {}
        if self._what != "broadcast":
            found[OUT_OF_PLACE] = self._way(self._send, self._recv, self._quantization)
        if self._what != "all_to_all":
            found[IN_PLACE] = self._in_place()
        if against in TORCH:
            found[against] = self._torch()
        elif against == UNQUANTIZED:
            found[UNQUANTIZED] = self._way(self._send, self._recv, None)
        elif against == PIECES:
            found[PIECES] = self._pieces(found[OUT_OF_PLACE])
        elif against == TENSORS:
            found[TENSORS] = self._tensors(found[OUT_OF_PLACE])
        return found

    def check(self, way: Way) -> int:
        """Does it once more, from known contents, and counts the wrong elements."""
        way.reset()
        way.run()
        result, count, size = way.result(), self._count, self._peers
        if self._what == "all_gather":
            rows = result.reshape(size, count)
            return sum(data.count_wrong(rows[r], self._brought(r)) for r in range(size))
        if self._what == "all_to_all":  # what others have for us begins somewhere in their table
            rows, at = result.reshape(size, count), -(self._rank * count % data.PERIOD)
            brought = (np.roll(self._brought(r), at) for r in range(size))
            return sum(data.count_wrong(*each) for each in zip(rows, brought, strict=True))
        if self._what == "broadcast":
            return data.count_wrong(result, self._brought(0))
        table = data.expected(self._dtype, self._op, size)
        if self._what == "reduce_scatter":  # our part begins somewhere in the table
            table = np.roll(table, -(self._rank * count % data.PERIOD))
        if way.quantization is None:
            return data.count_wrong(result, table)
        distance = data.error_max(self._dtype, self._op, size, way.quantization)
        return data.count_far(result, table, self._dtype, distance)

    def _brought(self, rank: int) -> data.Bits:
        return data.contribution(self._dtype, self._op, rank)

    def _in_place(self) -> Way:
        own = slice(self._rank * self._count, (self._rank + 1) * self._count)
        if self._what == "all_gather":
            return self._way(self._recv[own], self._recv, None)
        if self._what == "reduce_scatter":
            return self._way(self._send, self._send[own], self._quantization)
        return self._way(self._recv, self._recv, self._quantization)

    def _way(self, send: Array, recv: Array, quantization: str | None) -> Way:
        one, place = np.zeros(1, np.float32), self._place

        def meet() -> None:
            self._comm.all_reduce(one, op=ReduceOp.MAX)

        def reset() -> None:
            held = place.bits(recv)
            place.fill(recv, np.invert(held.view(np.uint8)).view(held.dtype))  # right in no element
            place.fill(send, self._content)

        arrays = (recv,) if self._what == "broadcast" else (send, recv)
        how: dict[str, Any] = {"tag": _TAG}
        if self._what in REDUCING:
            how |= {"op": self._op, "quantization": quantization}
        run = partial(getattr(self._comm, self._what), *arrays, **how)
        launch = partial(getattr(self._comm, f"{self._what}_async"), *arrays, **how)
        result = partial(place.bits, recv)
        return Way(meet, run, lambda: launch().wait()[2].tx_bytes, reset, result, quantization)

    def _pieces(self, whole: Way) -> Way:
        """The same all-reduce as _PIECES smaller ones, all under way at once."""
        bounds = [self._count * i // _PIECES for i in range(_PIECES + 1)]

        def run() -> int:
            handles = [
                self._comm.all_reduce_async(
                    self._send[begin:end],
                    self._recv[begin:end],
                    op=self._op,
                    tag=_TAG + i,
                    quantization=self._quantization,
                )
                for i, (begin, end) in enumerate(pairwise(bounds))
            ]
            ended = [handle.wait() for handle in handles]
            for handle in handles:
                if handle.error is not None:
                    raise handle.error
            return sum(info.tx_bytes for _, _, info in ended)

        return replace(whole, run=run, sent=run)

    def _tensors(self, whole: Way) -> Way:
        """The same all-reduce as one list of tensors, whose sizes are in proportion to a GPT's."""
        ends = [self._count * end // sum(_ROWS) for end in accumulate(_ROWS, initial=0)]
        name = self._quantization
        quantization = None if name is None else QuantizationOptions.of(name)
        kind = pccl.ReduceOperandDescriptor(self._dtype)
        listed = []
        for i, (begin, end) in enumerate(pairwise(ends)):
            work = pccl.ReduceDescriptor(end - begin, self._op, _TAG + i, kind, quantization)
            arrays = self._send[begin:end], self._recv[begin:end]
            listed.append(pccl.ReduceOpDescriptor.from_torch(*arrays, work))

        def run() -> int:
            return self._comm.all_reduce_multiple_with_retry(listed).tx_bytes

        return replace(whole, run=run, sent=run)

    def _torch(self) -> Way:
        import torch
        import torch.distributed as dist

        send, recv = torch.as_tensor(self._send), torch.as_tensor(self._recv)
        one = torch.zeros(1, device=recv.device)
        op = {
            ReduceOp.SUM: dist.ReduceOp.SUM,
            ReduceOp.AVG: dist.ReduceOp.AVG,
            ReduceOp.PROD: dist.ReduceOp.PRODUCT,
            ReduceOp.MAX: dist.ReduceOp.MAX,
            ReduceOp.MIN: dist.ReduceOp.MIN,
        }[self._op]
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(recv, op),
            "reduce_scatter": lambda: dist.reduce_scatter(recv, list(send.chunk(self._peers)), op),
            "all_gather": lambda: dist.all_gather(list(recv.chunk(self._peers)), send),
            "broadcast": lambda: dist.broadcast(recv, 0),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
        }

        def finished(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                call()
                self._place.finish()  # nccl's calls return when they are queued

            return run

        meet = finished(lambda: dist.all_reduce(one))
        run = finished(calls[self._what])
        return Way(meet, run, lambda: 0, lambda: None, partial(self._place.bits, self._recv))
