"""The variants of one collective of one size: the call, its input, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import pccl
from pccl.cli.bench import data
from pccl.types import DataType, ReduceOp

OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
GLOO = "gloo"
UNQUANTIZED = "unquantized"
PIECES = "pieces"
OTHERS = (GLOO, UNQUANTIZED, PIECES)  # what pccl may be measured against
PIECES_OF_ALL = 16
REDUCING = ("all_reduce", "reduce_scatter")

_TAG = 1  # of what is timed; the meetings before it have tag 0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do it.

    Attributes:
        meet: lets all peers begin together.
        run: what is timed.
        sent: does it once more; the bytes that this peer sent.
        reset: gives the buffers known contents.
        result: where the result is.
        quantization: of the result; None: it is exact.
    """

    meet: Callable[[], object]
    run: Callable[[], object]
    sent: Callable[[], int]
    reset: Callable[[], None]
    result: data.Bits
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
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        what: str,
        dtype: DataType,
        op: ReduceOp,
        count: int,
        quantization: str | None = None,
    ) -> None:
        self._quantization = quantization
        self._comm, self._what, self._dtype, self._op = comm, what, dtype, op
        self._rank, self._peers, self._count = comm.rank, comm.world_size, count
        send = count * (self._peers if what in ("reduce_scatter", "all_to_all") else 1)
        recv = count * (self._peers if what in ("all_gather", "all_to_all") else 1)
        self._content = data.tiled(data.contribution(dtype, op, self._rank), send)
        self._send = self._content.copy()
        self._recv = np.zeros(recv, self._send.dtype)

    def ways(self, against: str | None) -> dict[str, Way]:
        """All of them by name, and one of OTHERS."""
        found = {}
        if self._what != "broadcast":
            found[OUT_OF_PLACE] = self._way(self._send, self._recv, self._quantization)
        if self._what != "all_to_all":
            found[IN_PLACE] = self._in_place()
        if against == GLOO:
            found[GLOO] = self._gloo()
        elif against == UNQUANTIZED:
            found[UNQUANTIZED] = self._way(self._send, self._recv, None)
        elif against == PIECES:
            found[PIECES] = self._pieces(found[OUT_OF_PLACE])
        return found

    def check(self, way: Way) -> int:
        """Does it once more, from known contents, and counts the wrong elements."""
        way.reset()
        way.run()
        count, size = self._count, self._peers
        if self._what == "all_gather":
            rows = way.result.reshape(size, count)
            return sum(data.count_wrong(rows[r], self._brought(r)) for r in range(size))
        if self._what == "all_to_all":  # what others have for us begins somewhere in their table
            rows, at = way.result.reshape(size, count), -(self._rank * count % data.PERIOD)
            brought = (np.roll(self._brought(r), at) for r in range(size))
            return sum(data.count_wrong(*each) for each in zip(rows, brought, strict=True))
        if self._what == "broadcast":
            return data.count_wrong(way.result, self._brought(0))
        table = data.expected(self._dtype, self._op, size)
        if self._what == "reduce_scatter":  # our part begins somewhere in the table
            table = np.roll(table, -(self._rank * count % data.PERIOD))
        if way.quantization is None:
            return data.count_wrong(way.result, table)
        distance = data.error_max(self._dtype, self._op, size, way.quantization)
        return data.count_far(way.result, table, self._dtype, distance)

    def _brought(self, rank: int) -> data.Bits:
        return data.contribution(self._dtype, self._op, rank)

    def _in_place(self) -> Way:
        own = slice(self._rank * self._count, (self._rank + 1) * self._count)
        if self._what == "all_gather":
            return self._way(self._recv[own], self._recv, None)
        if self._what == "reduce_scatter":
            return self._way(self._send, self._send[own], self._quantization)
        return self._way(self._recv, self._recv, self._quantization)

    def _way(self, send: data.Bits, recv: data.Bits, quantization: str | None) -> Way:
        one = np.zeros(1, np.float32)

        def meet() -> None:
            self._comm.all_reduce(one, op=ReduceOp.MAX)

        def reset() -> None:
            np.invert(recv.view(np.uint8), out=recv.view(np.uint8))  # right in no element
            send[:] = self._content

        source, target = (data.as_array(bits, self._dtype) for bits in (send, recv))
        arrays = (target,) if self._what == "broadcast" else (source, target)
        how: dict[str, Any] = {"tag": _TAG}
        if self._what in REDUCING:
            how |= {"op": self._op, "quantization": quantization}
        run = partial(getattr(self._comm, self._what), *arrays, **how)
        launch = partial(getattr(self._comm, f"{self._what}_async"), *arrays, **how)
        return Way(meet, run, lambda: launch().wait()[2].tx_bytes, reset, recv, quantization)

    def _pieces(self, whole: Way) -> Way:
        """The same all-reduce as PIECES_OF_ALL smaller ones, all under way at once."""
        source, target = (data.as_array(bits, self._dtype) for bits in (self._send, self._recv))
        bounds = [self._count * i // PIECES_OF_ALL for i in range(PIECES_OF_ALL + 1)]

        def run() -> int:
            handles = [
                self._comm.all_reduce_async(
                    source[begin:end],
                    target[begin:end],
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

    def _gloo(self) -> Way:
        import torch
        import torch.distributed as dist

        send, recv = (
            torch.as_tensor(data.as_array(bits, self._dtype)) for bits in (self._send, self._recv)
        )
        one = torch.zeros(1)
        op = {
            ReduceOp.SUM: dist.ReduceOp.SUM,
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
        meet = partial(dist.all_reduce, one)
        return Way(meet, calls[self._what], lambda: 0, lambda: None, self._recv)
