"""How pseudo-gradients are averaged: around the ring as they are, or quantized and gathered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pccl import AsyncReduceHandle, Communicator, ReduceInfo, ReduceOp, TensorInfo, kernels
from pccl.diloco.settings import Wire

Algorithm = Literal["gather", "ring"]
Tensors = list[torch.Tensor]

_WEIGHTS_MAX = 1 << 32  # the divisor of a mean

_log = logging.getLogger("pccl.diloco")


class Selector:
    """Chooses by what a peer receives, so that no wire costs more than an fp32 all-reduce.

    With R peers a gather receives what all others have quantized, R - 1 times those bytes, and an
    all-reduce 2 (R - 1) / R times the bytes as they are. So from some R on the ring is better.

    All peers must choose the same, and which peers there are is no ground for that: one of them has
    heard of a loss, another has not yet. So R is the number of contributors of the mean that was
    last applied, on which they have agreed and which newcomers receive; it may be out of date by a
    round. And a choice stands until the round has its mean, whoever is lost meanwhile.
    """

    def __init__(self) -> None:
        self._peers = torch.zeros(1, dtype=torch.int64)  # 0 until a mean was applied

    def entries(self) -> list[TensorInfo]:
        """What is part of the shared state."""
        return [TensorInfo.from_torch(self._peers, "diloco.contributors")]

    def choose(self, quantized: int, plain: int, before: Algorithm) -> Algorithm:
        """The algorithm of a round for which a peer has so many bytes in either form.

        If it is not that of the round before, the log says why.
        """
        peers = int(self._peers[0])
        chosen: Algorithm = "ring" if 2 * plain < peers * quantized else "gather"
        if chosen != before:
            gathered, around = (peers - 1) * quantized, 2 * (peers - 1) * plain // max(peers, 1)
            _log.info(
                "from now on these pseudo-gradients %s: of %d peers, each receives %d bytes if "
                "they are quantized and gathered, and %d if they go around the ring in fp32",
                "go around the ring in fp32" if chosen == "ring" else "are gathered",
                peers,
                gathered,
                around,
            )
        return chosen

    def applied(self, peers: int) -> None:
        """A mean of so many peers is going to be applied, on all of them."""
        self._peers[0] = peers


@dataclass(frozen=True, slots=True)
class Votes:
    """What travels beside the progress, and no weight changes.

    Attributes:
        sent: of this peer.
        received: what they are added up in; or their mean, if all peers weigh the same.
        late: whether this peer's progress weighs nothing because it came too late.
    """

    sent: Tensors
    received: Tensors
    late: bool = False


class Total:
    """What all weights add up to, how many are not 0, and how many peers are late; and votes."""

    def __init__(self) -> None:
        self._own: torch.Tensor | None = None
        self._sum = torch.zeros(3, dtype=torch.int64)
        self._votes = Votes([], [])

    def load(self, weight: int | None, votes: Votes) -> None:
        """The weight of this peer; None: all weigh the same, and weights are not added up."""
        self._own = None
        if weight is not None:
            self._own = torch.tensor([weight, int(weight > 0), int(votes.late)])
        self._votes = votes

    @property
    def weight(self) -> int:
        """By which this peer has multiplied its progress."""
        return 1 if self._own is None else int(self._own[0])

    @property
    def weighs(self) -> bool:
        """Whether there are weights."""
        return self._own is not None

    @property
    def sent(self) -> Tensors:
        """What is sent beside the progress."""
        return [*self._votes.sent, *([] if self._own is None else [self._own])]

    @property
    def received(self) -> Tensors:
        """Where an all-reduce adds it up."""
        return [*self._votes.received, *([] if self._own is None else [self._sum])]

    def add_up(self, rows: Sequence[torch.Tensor]) -> None:
        """Adds up what a gather has brought."""
        for row, sum in zip(rows, self.received, strict=True):
            torch.sum(row, 0, dtype=sum.dtype, out=sum)

    @property
    def contributors(self) -> int | None:
        """Peers whose progress weighs anything; None if that of all weighs the same."""
        return None if self._own is None else int(self._sum[1])

    @property
    def late(self) -> int:
        """Peers whose progress weighs nothing because they came too late."""
        return 0 if self._own is None else int(self._sum[2])

    def divisor(self, peers: int) -> int:
        """By what a sum over so many peers is divided; 1 if nobody weighs anything.

        Raises:
            ValueError: the weights are too large, on all peers.
        """
        if self._own is None:
            return peers
        total = int(self._sum[0])
        if total >= _WEIGHTS_MAX:
            raise ValueError(
                f"all peers together trained on {total} samples in one round, and {_WEIGHTS_MAX} "
                "cannot be counted: give `samples` in a larger unit"
            )
        return max(1, total)


class Averager:
    """Averages a round's progress in fp32 around the ring: this peer's pseudo-gradient, and then
    what goes as it is.

    With weights, each peer sends its progress times its weight, and the weight; the sum of the one
    is divided by that of the other.

    Attributes:
        algorithm: by which the progress is averaged that was last loaded.
    """

    algorithm: Algorithm = "ring"

    def __init__(self) -> None:
        self._progress: Tensors = []
        self._total = Total()

    @property
    def total(self) -> Total:
        """The weights of the last attempt."""
        return self._total

    def load(self, progress: Tensors, weight: int | None, votes: Votes) -> None:
        """Prepares what is sent; it stays the same for all attempts.

        `weight`: of this peer's progress in the means; None: that of all peers is the same.
        """
        self._total.load(weight, votes)
        self._progress = progress if weight is None else [each * weight for each in progress]

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        """One attempt to write the means over all peers."""
        info = comm.all_reduce(*self._operands(means), op=self._op)
        self.store(means)
        return info

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> AsyncReduceHandle:
        """The same in the background; `store` must follow when it has succeeded."""
        return comm.all_reduce_async(*self._operands(means), op=self._op, tag=tag)

    def store(self, means: Tensors) -> None:
        """Writes the means that a launched attempt has brought."""
        if self._total.weighs:
            divisor = self._total.divisor(1)
            kernels.divide(means[0], divisor)
            for mean in means[1:]:
                kernels.add(mean, mean, torch.zeros_like(mean), divisor=divisor)

    def sent(self) -> torch.Tensor:
        """What the mean is of that was sent by this peer, whose weight is not 0."""
        return self._progress[0] / self._total.weight

    def commit(self, peers: int, own: bool) -> None:
        """The means, of so many peers, are going to be applied; `own`: that of this peer is in."""

    def state_dict(self) -> dict[str, Any]:
        """What this peer keeps from one round to the next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state, if it is of the same wire."""

    @property
    def _op(self) -> ReduceOp:
        return ReduceOp.SUM if self._total.weighs else ReduceOp.AVG

    def _operands(self, means: Tensors) -> tuple[Any, Any]:
        if len(means) == 1 and not self._total.sent:
            return self._progress[0], means[0]
        return [*self._progress, *self._total.sent], [*means, *self._total.received]


class Quantized(Averager):
    """Quantizes the pseudo-gradient once, gathers those of all peers, and sums them up in fp32 in
    the order of the ranks: see docs/howto/diloco.md, "Fewer bytes".

    With e this peer's residual, a = decay e + d and a weight w, Q(w a) is sent, and a - Q(w a) / w
    is the residual once the mean is going to be applied; with w = 0 the old one stands. Where
    the selector finds that the ring receives less, a itself goes around it, and e is 0 then.
    """

    def __init__(
        self, format: kernels.Format, count: int, decay: float, selector: Selector
    ) -> None:
        super().__init__()
        self.algorithm = "gather"
        self._format = format
        self._decay = decay
        self._selector = selector
        self._residual = torch.zeros(count)
        self._next = torch.zeros(count)  # the residual, once the round commits
        self._room = torch.empty(count)
        self._payload = torch.empty(kernels.quantized_size(format, count), dtype=torch.uint8)
        self._sent: Tensors = []
        self._gathered: Any = []  # tensors

    def load(self, progress: Tensors, weight: int | None, votes: Votes) -> None:
        delta, *others = progress
        beside = sum(each.nbytes for each in [*others, *votes.sent])
        self.algorithm = self._selector.choose(
            self._payload.nbytes + beside, delta.nbytes + beside, self.algorithm
        )
        torch.mul(self._residual, self._decay, out=self._room)
        kernels.add(self._room, self._room, delta)
        if self.algorithm == "ring":
            self._next.zero_()
            super().load([self._room, *others], weight, votes)
            return
        self._total.load(weight, votes)
        weighed = self._room if weight is None else self._room * weight
        kernels.quantize(self._payload, weighed, self._format)
        kernels.dequantize(self._next, self._payload, self._format)
        if weight is not None:
            self._next /= max(1, weight)
            others = [each * weight for each in others]
        kernels.subtract(self._next, self._room, self._next)
        self._sent = [self._payload, *others, *self._total.sent]

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        if self.algorithm == "ring":
            return super().run(comm, means)
        handle = self.launch(comm, means, tag=0)
        committed, _, info = handle.wait()
        if not committed:
            assert handle.error is not None
            raise handle.error
        self.store(means)
        return info

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> AsyncReduceHandle:
        if self.algorithm == "ring":
            return super().launch(comm, means, tag)
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        handle = comm.all_gather_async(self._sent, tag=tag)
        self._gathered = handle.result
        return handle

    def store(self, means: Tensors) -> None:
        if self.algorithm == "ring":
            super().store(means)
            return
        payloads, *rows = self._gathered
        self._gathered = []
        mean, rows, totals = means[0], rows[: len(means) - 1], rows[len(means) - 1 :]
        self._total.add_up(totals)
        divisor = self._total.divisor(len(payloads))
        for rank, payload in enumerate(payloads):
            read = kernels.accumulate if rank else kernels.dequantize
            try:
                read(mean, payload, self._format)
            except ValueError as error:
                raise ValueError(
                    f"the peer of rank {rank}, of {len(payloads)}, has sent a pseudo-gradient that "
                    f"is none: {error}"
                ) from error
        kernels.divide(mean, divisor)
        for mean, row in zip(means[1:], rows, strict=True):
            mean.copy_(row[0])
            last = len(row) - 1
            for rank in range(1, len(row)):
                kernels.add(mean, mean, row[rank], divisor=divisor if rank == last else 1)

    def sent(self) -> torch.Tensor:
        return super().sent() if self.algorithm == "ring" else self._room - self._next

    def commit(self, peers: int, own: bool) -> None:
        """The new residual becomes real."""
        if own:
            self._residual, self._next = self._next, self._residual
        self._selector.applied(peers)

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the residual, if the state has one; else it begins at 0."""
        if "residual" in state:
            self._residual.copy_(state["residual"])


@dataclass(frozen=True, slots=True)
class Codec:
    """How a pseudo-gradient is quantized, and what becomes of that which this takes away.

    Attributes:
        format: of what is sent.
        decay: by which a residual is multiplied before it is added to the next pseudo-gradient.
    """

    format: kernels.Format
    decay: float = 1.0


CODECS: dict[Wire, Codec] = {
    "int8": Codec("int8"),
    "int4": Codec("int4"),
    "e3m0": Codec("e3m0"),  # Streaming DiLoCo, arXiv 2501.18512
    "2bit": Codec("2bit", decay=0.9),  # MuLoCo, arXiv 2505.23725
    "sparse": Codec("sparse", decay=0.95),  # SparseLoCo, arXiv 2508.15706
}


def averager_of(wire: Wire, count: int, selector: Selector) -> Averager:
    """What averages the progress of `count` parameters on a wire."""
    if wire == "fp32":
        return Averager()
    codec = CODECS[wire]
    return Quantized(codec.format, count, codec.decay, selector)
