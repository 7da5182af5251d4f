"""How progress is averaged: as it is, around the ring; or quantized, gathered, and summed up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from pccl import AsyncReduceHandle, Communicator, ReduceInfo, ReduceOp, kernels
from pccl.diloco.route import Route, Way

Tensors = list[torch.Tensor]


class Carrier(Protocol):
    """Averages a round's progress: this peer's pseudo-gradient, and then what goes as it is."""

    @property
    def way(self) -> Way:
        """That which the progress went that was last loaded."""

    def load(self, progress: Tensors) -> None:
        """Prepares what is sent; it stays the same for all attempts."""

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        """One attempt to write the means over all peers."""

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> AsyncReduceHandle:
        """The same in the background; `unload` must follow when it has succeeded."""

    def unload(self, means: Tensors) -> None:
        """Writes the means that a launched attempt has brought."""

    def commit(self, contributors: int) -> None:
        """The means, of so many peers, are going to be applied."""

    def state_dict(self) -> dict[str, Any]:
        """What this peer keeps from one round to the next."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state, if it is of the same carrier."""


class Ring:
    """Sums up in fp32 around the ring."""

    way: Way = "ring"

    def __init__(self) -> None:
        self._progress: Tensors = []

    def load(self, progress: Tensors) -> None:
        """It is sent as it is."""
        self._progress = progress

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        """One all-reduce."""
        return comm.all_reduce(*self._operands(means), op=ReduceOp.AVG)

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> AsyncReduceHandle:
        """The same in the background."""
        return comm.all_reduce_async(*self._operands(means), op=ReduceOp.AVG, tag=tag)

    def _operands(self, means: Tensors) -> tuple[Any, Any]:
        if len(means) == 1:
            return self._progress[0], means[0]
        return self._progress, means

    def unload(self, means: Tensors) -> None:
        """The all-reduce has written them."""

    def commit(self, contributors: int) -> None:
        """Nothing is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


class Quantized:
    """Quantizes the pseudo-gradient once, gathers those of all peers, and sums them up in fp32.

    With e this peer's residual, Q the quantization and R the number of peers:

        a = decay e + d;   send Q(a)
        D = (Q(a of rank 0) + Q(a of rank 1) + ...) / R     in this order, on all peers
        e <- a - Q(a)                                       when D is going to be applied

    So what quantization takes from one round is given to the next (error feedback). If no mean is
    made or applied, the old e stands, and a retry sends the same bytes. Each contribution is
    quantized once, whatever the number of peers; around a ring it would be at every hop, by others,
    and no peer could feed that back.

    With so many peers that an fp32 all-reduce receives fewer bytes, `Route` says so: then a itself
    goes around the ring, and e <- 0.
    """

    def __init__(self, format: kernels.Format, count: int, decay: float, route: Route) -> None:
        self.way: Way = "gather"
        self._format = format
        self._decay = decay
        self._route = route
        self._ring = Ring()
        self._residual = torch.zeros(count)
        self._next = torch.zeros(count)  # e, once the round commits
        self._room = torch.empty(count)
        self._payload = torch.empty(kernels.quantized_size(format, count), dtype=torch.uint8)
        self._sent: Tensors = []
        self._gathered: Any = []  # tensors

    def load(self, progress: Tensors) -> None:
        """Adds the residual to the pseudo-gradient, and quantizes that unless it goes around."""
        others = sum(each.nbytes for each in progress[1:])
        self.way = self._route.choose(
            self._payload.nbytes + others, progress[0].nbytes + others, self.way
        )
        torch.mul(self._residual, self._decay, out=self._room)
        kernels.add(self._room, self._room, progress[0])
        if self.way == "ring":
            self._next.zero_()
            self._ring.load([self._room, *progress[1:]])
            return
        kernels.quantize(self._payload, self._room, self._format)
        kernels.dequantize(self._next, self._payload, self._format)
        kernels.subtract(self._next, self._room, self._next)
        self._sent = [self._payload, *progress[1:]]

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        """One all-gather and the sum, or one all-reduce."""
        if self.way == "ring":
            return self._ring.run(comm, means)
        handle = self.launch(comm, means, tag=0)
        committed, _, info = handle.wait()
        if not committed:
            assert handle.error is not None
            raise handle.error
        self.unload(means)
        return info

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> AsyncReduceHandle:
        """Gathers in the background, or reduces."""
        if self.way == "ring":
            return self._ring.launch(comm, means, tag)
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        handle = comm.all_gather_async(self._sent, tag=tag)
        self._gathered = handle.result
        return handle

    def unload(self, means: Tensors) -> None:
        """Sums up in the order of the ranks what was gathered."""
        if self.way == "ring":
            return
        payloads, *plain = self._gathered
        self._gathered = []
        mean = means[0]
        for rank, payload in enumerate(payloads):
            read = kernels.accumulate if rank else kernels.dequantize
            try:
                read(mean, payload, self._format)
            except ValueError as error:
                raise ValueError(
                    f"the peer of rank {rank}, of {len(payloads)}, has sent a pseudo-gradient that "
                    f"is none: {error}"
                ) from error
        kernels.divide(mean, len(payloads))
        for mean, rows in zip(means[1:], plain, strict=True):
            mean.copy_(rows[0])
            for rank in range(1, len(rows)):
                kernels.add(mean, mean, rows[rank], divisor=_divisor(rank, rows))

    def commit(self, contributors: int) -> None:
        """The new residual becomes real."""
        self._residual, self._next = self._next, self._residual
        self._route.applied(contributors)

    def state_dict(self) -> dict[str, Any]:
        """The residual."""
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the residual, if the state has one; else it begins at 0."""
        if "residual" in state:
            self._residual.copy_(state["residual"])


def _divisor(rank: int, rows: torch.Tensor) -> int:
    """The last addition of a mean divides."""
    return len(rows) if rank == len(rows) - 1 else 1
