"""Averages pseudo-gradients: in fp32 around the ring; or quantized, by a gather or two stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pccl import (
    AsyncReduceHandle,
    Communicator,
    PCCLError,
    ReduceInfo,
    ReduceOp,
    TensorInfo,
    extension,
    kernels,
    operands,
)
from pccl.kernels import Wire

Algorithm = Literal["gather", "two-stage", "ring"]
Tensors = list[torch.Tensor]

_WEIGHTS_MAX = 1 << 32  # the sum of all weights, which divides a mean, is smaller
_BLOCK = 1024  # numbers: a multiple of the blocks of every format that allows two stages

_log = logging.getLogger("pccl.diloco")


class Selector:
    """Chooses the algorithm by the bytes per peer: see docs/howto/diloco.md, "Fewer bytes".

    All peers must choose the same algorithm, although two peers may see different world sizes. So
    it uses the number of peers in the last applied mean, which all know. A choice holds for the
    whole round.
    """

    def __init__(self) -> None:
        self._peers = torch.zeros(1, dtype=torch.int64)  # 0 until a mean was applied

    def entries(self) -> list[TensorInfo]:
        return [TensorInfo.from_torch(self._peers, "diloco.contributors")]

    def choose(self, sizes: Sizes, before: Algorithm) -> tuple[Algorithm, str]:
        """The algorithm of a round, and the reason, which is logged if it has changed."""
        peers = int(self._peers[0])
        received = sizes.received(peers)
        chosen: Algorithm = "gather"
        two_stage = received.get("two-stage", 0)
        # two stages quantize twice, so they must save a fifth
        if two_stage and 5 * two_stage <= 4 * received["gather"]:
            chosen = "two-stage"
        if received["ring"] < received[chosen]:
            chosen = "ring"
        counts = ", ".join(f"{count} bytes by {name!r}" for name, count in received.items())
        reason = f"{chosen!r}: of {peers} peers, each receives {counts}"
        if chosen != before:
            _log.info("from now on pseudo-gradients are averaged by %s", reason)
        return chosen, reason

    def applied(self, peers: int) -> None:
        """Records that all peers are about to apply a mean of `peers` peers."""
        self._peers[0] = peers


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that one peer contributes to a round."""

    quantized: int
    plain: int  # in fp32
    beside: int = 0  # tensors that are sent with it and never quantized
    two_stage: bool = False  # whether the mean may be quantized again

    def received(self, peers: int) -> dict[Algorithm, int]:
        """Bytes that each of `peers` peers receives, by algorithm."""
        others = max(0, peers - 1)
        found: dict[Algorithm, int] = {"gather": others * (self.quantized + self.beside)}
        if self.two_stage and peers <= extension.DIRECT_MAX:
            parts = 2 * others * self.quantized // max(1, peers)
            found["two-stage"] = parts + others * self.beside
        found["ring"] = 2 * others * (self.plain + self.beside) // max(1, peers)
        return found


@dataclass(frozen=True, slots=True)
class Votes:
    """Values that are averaged with the progress, but not multiplied by weights."""

    sent: Tensors
    received: Tensors  # buffers for their sums; for their means, if all peers weigh the same
    late: bool = False  # this peer's progress has weight 0 because it came too late


class Total:
    """Sums over all peers: weights, contributors (weights above 0), late peers, and votes."""

    def __init__(self, weight: int | None, votes: Votes) -> None:
        self.weight = 1 if weight is None else weight  # the factor of this peer's progress
        self.own: torch.Tensor | None = None  # this peer's; None: all peers weigh the same
        self._sum = torch.zeros(3, dtype=torch.int64)
        self.sent = list(votes.sent)
        self.received = list(votes.received)  # the buffers for the sums of an all-reduce
        if weight is not None:
            self.own = torch.tensor([weight, int(weight > 0), int(votes.late)])
            self.sent.append(self.own)
            self.received.append(self._sum)

    def add_up(self, rows: Sequence[torch.Tensor]) -> None:
        for row, sum in zip(rows, self.received, strict=True):
            torch.sum(row, 0, dtype=sum.dtype, out=sum)

    @property
    def contributors(self) -> int | None:
        """Peers whose weight is above 0; None if all peers weigh the same."""
        return None if self.own is None else int(self._sum[1])

    @property
    def late(self) -> int:
        """Peers whose weight is 0 because they came too late."""
        return int(self._sum[2])

    def divisor(self, peers: int) -> int:
        """The divisor of a sum over `peers` peers; 1 if all weights are 0."""
        return peers if self.own is None else _divisor(int(self._sum[0]))


def _divisor(weights: int) -> int:
    if weights >= _WEIGHTS_MAX:
        raise ValueError(
            f"all peers together trained on {weights} samples in one round, and the sum must be "
            f"less than {_WEIGHTS_MAX}: give `samples` in a larger unit"
        )
    return max(1, weights)


def _weighed(progress: torch.Tensor, weight: int | None) -> torch.Tensor:
    """The product; with weight 0, numbers that are not finite become 0, too."""
    if weight is None:
        return progress
    return progress * weight if weight else torch.zeros_like(progress)


class Averager:
    """Averages the progress of a round in fp32 around the ring.

    Progress is a list: the pseudo-gradient, and then tensors that are never quantized.
    """

    algorithm: Algorithm = "ring"
    reason = "'ring': wire='fp32' has no other"

    def __init__(self) -> None:
        self._progress: Tensors = []
        self.total = Total(None, Votes([], []))

    def load(self, progress: Tensors, weight: int | None, votes: Votes) -> None:
        """Prepares what is sent, which is the same in all attempts."""
        self.total = Total(weight, votes)
        self._progress = [_weighed(each, weight) for each in progress]

    def run(self, comm: Communicator, means: Tensors) -> ReduceInfo:
        """Makes one attempt to write the means over all peers."""
        info = comm.all_reduce(*self._operands(means), op=self._op)
        self.store(means)
        return info

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> Handle:
        """Starts one attempt in the background; after its success, `store` writes the means."""
        return comm.all_reduce_async(*self._operands(means), op=self._op, tag=tag)

    def store(self, means: Tensors) -> None:
        """Writes the means of a successful launched attempt."""
        if self.total.own is not None:
            divisor = self.total.divisor(1)
            kernels.divide(means[0], divisor)
            for mean in means[1:]:
                kernels.add(mean, mean, torch.zeros_like(mean), divisor=divisor)

    def sent(self) -> torch.Tensor:
        """This peer's input to the mean, divided by its weight, which must not be 0."""
        return self._progress[0] / self.total.weight

    def commit(self, peers: int, own: bool) -> None:
        """Records that all peers are about to apply means of `peers`; `own`: with this one."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads such a state, if it belongs to the same wire."""

    @property
    def _op(self) -> ReduceOp:
        return ReduceOp.AVG if self.total.own is None else ReduceOp.SUM

    def _operands(self, means: Tensors) -> tuple[Any, Any]:
        if len(means) == 1 and not self.total.sent:
            return self._progress[0], means[0]
        return [*self._progress, *self.total.sent], [*means, *self.total.received]


@dataclass(frozen=True, slots=True)
class Codec:
    """A quantization with error feedback."""

    format: kernels.Format
    decay: float = 1.0  # the factor of a residual in the next pseudo-gradient
    two_stage: bool = False  # whether a mean may be quantized again


class TwoStageMean:
    """One attempt at a mean in two stages, with the interface of a collective's handle.

    The first stage is an all-to-all of the quantized parts, in whole blocks of the format. The
    second is a gather of the means, and of the tensors `beside`. Both use the ranks of the first,
    so if a peer is lost in between, the second fails on all.
    """

    def __init__(
        self,
        comm: Communicator,
        payload: torch.Tensor,
        beside: Tensors,
        weights: torch.Tensor | None,
        codec: Codec,
        count: int,
        tag: int,
    ) -> None:
        self._comm, self._beside, self._weights, self._codec = comm, beside, weights, codec
        self._tag = tag
        ring = extension.ring(comm)
        self._ranks = extension.ranks(ring, extension.member(comm).number)
        members = self._ranks.members
        self.parts = _parts(count, members)
        self.own_part = self.parts[self._ranks.rank]
        self._sizes = [kernels.quantized_size(codec.format, len(part)) for part in self.parts]
        header = _bytes_of(weights) if weights is not None else payload[:0]
        sent = [each for piece in torch.split(payload, self._sizes) for each in (header, piece)]
        rows = [len(header) + size for size in self._sizes]
        own = rows[self._ranks.rank]
        self.codes: Sequence[torch.Tensor] = []  # the quantized mean of each part
        self.rows: Tensors = []  # for each tensor beside, the values of all ranks
        self.error: PCCLError | None = None
        self.divisor = 0
        self.second_error = torch.empty(0)
        self._received = torch.empty(own * members, dtype=torch.uint8)
        self._info = ReduceInfo(0, 0, 0)
        self._second: AsyncReduceHandle | None = None
        work = operands.all_to_all(
            torch.cat(sent), self._received, rows, [own] * members, self._ranks
        )
        self._first = extension.launch(comm, "all_to_all", work, tag)

    def done(self) -> bool:
        """True if it has ended; starts the second stage after the first."""
        if self._second is None and self.error is None:
            if not self._first.done():
                return False
            self._reduce()
        return self._second is None or self._second.done()

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """See `AsyncReduceHandle.wait`."""
        if self._second is None and self.error is None:
            self._reduce()
        if self._second is not None:
            self._end(self._second)
            if self.error is None:
                self._unpack(self._second.result)
        if self.error is not None:
            return False, self.error.result.value, self._info
        return True, 0, self._info

    def _end(self, handle: AsyncReduceHandle) -> None:
        committed, _, info = handle.wait()
        before = self._info
        self._info = ReduceInfo(
            info.world_size, before.tx_bytes + info.tx_bytes, before.rx_bytes + info.rx_bytes
        )
        if not committed:
            self.error = handle.error

    def _reduce(self) -> None:
        self._end(self._first)
        if self.error is not None:
            return
        members, rank, format = self._ranks.members, self._ranks.rank, self._codec.format
        mean = torch.empty(len(self.own_part))
        codes = torch.empty(self._sizes[rank], dtype=torch.uint8)
        decoded = torch.empty_like(mean)
        rows = self._received.view(members, len(self._received) // members)
        payloads = rows[:, rows.shape[1] - len(codes) :]
        self.divisor = members
        if self._weights is not None:
            weights = rows[:, : rows.shape[1] - len(codes)].contiguous().view(torch.int64)
            self.divisor = _divisor(int(weights[:, 0].sum()))
        if len(mean):
            _add_up(mean, payloads.unbind(), format)
            kernels.divide(mean, self.divisor)
            kernels.quantize(codes, mean, format)
            kernels.dequantize(decoded, codes, format)
            kernels.subtract(mean, mean, decoded)
        self.second_error = mean
        sent = torch.cat([codes, *map(_bytes_of, self._beside)])
        beside = len(sent) - len(codes)
        work = operands.all_gather(sent, None, self._ranks, [size + beside for size in self._sizes])
        try:
            self._second = extension.launch(self._comm, "all_gather", work, self._tag)
        except PCCLError as error:
            self.error = error

    def _unpack(self, gathered: Any) -> None:
        lengths = [each.nbytes for each in self._beside]
        beside = sum(lengths)
        pieces = gathered.split([size + beside for size in self._sizes])
        self.codes = [piece[: len(piece) - beside] for piece in pieces]
        cut = [piece[len(piece) - beside :].split(lengths) for piece in pieces]
        self.rows = [
            torch.stack([row[i].clone().view(each.dtype).view(each.shape) for row in cut])
            for i, each in enumerate(self._beside)
        ]


def _add_up(total: torch.Tensor, payloads: Sequence[torch.Tensor], format: kernels.Format) -> None:
    """total = the sum of the quantized numbers of all ranks."""
    for rank, payload in enumerate(payloads):
        try:
            (kernels.accumulate if rank else kernels.dequantize)(total, payload, format)
        except ValueError as error:
            raise ValueError(
                f"rank {rank} of {len(payloads)} has sent an invalid pseudo-gradient: {error}"
            ) from error


def _parts(count: int, members: int) -> list[range]:
    """Cuts `count` numbers into nearly equal parts that begin at blocks of every format."""
    blocks = -(-count // _BLOCK)
    ends = [min(count, _BLOCK * (blocks * (rank + 1) // members)) for rank in range(members)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Quantized(Averager):
    """Quantizes pseudo-gradients, with error feedback: see docs/internals/diloco.md, "Quantized".

    If the selector chooses the ring, a peer sends `a` itself, and its residual becomes 0.
    """

    def __init__(self, codec: Codec, count: int, selector: Selector) -> None:
        super().__init__()
        self.algorithm, self.reason = "gather", "'gather': no round has ended yet"
        self._codec = codec
        self._selector = selector
        self._residual = torch.zeros(count)
        self._next = torch.zeros(count)  # the residual after this round
        self._room = torch.empty(count)
        size = kernels.quantized_size(codec.format, count)
        self._payload = torch.empty(size, dtype=torch.uint8)
        self._beside: Tensors = []
        self._gathered: Any = []  # tensors
        self._attempt: TwoStageMean | None = None
        # a part, and the errors of its mean, which are added to its residual
        self._second: tuple[range, torch.Tensor] | None = None

    def load(self, progress: Tensors, weight: int | None, votes: Votes) -> None:
        delta, *others = progress
        beside = sum(each.nbytes for each in [*others, *votes.sent])
        sizes = Sizes(self._payload.nbytes, delta.nbytes, beside, self._codec.two_stage)
        self.algorithm, self.reason = self._selector.choose(sizes, self.algorithm)
        self._attempt, self._second = None, None
        torch.mul(self._residual, self._codec.decay, out=self._room)
        kernels.add(self._room, self._room, delta)
        if self.algorithm == "ring":
            self._next.zero_()
            super().load([self._room, *others], weight, votes)
            return
        self.total = Total(weight, votes)
        weighed = _weighed(self._room, weight)
        kernels.quantize(self._payload, weighed, self._codec.format)
        kernels.dequantize(self._next, self._payload, self._codec.format)
        if weight is not None:
            self._next /= max(1, weight)
            others = [_weighed(each, weight) for each in others]
        kernels.subtract(self._next, self._room, self._next)
        self._beside = [*others, *self.total.sent]

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

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> Handle:
        if self.algorithm == "ring":
            return super().launch(comm, means, tag)
        if self.algorithm == "two-stage":
            count, weights = self._residual.numel(), self.total.own
            self._attempt = TwoStageMean(
                comm, self._payload, self._beside, weights, self._codec, count, tag
            )
            return self._attempt
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        handle = comm.all_gather_async([self._payload, *self._beside], tag=tag)
        self._gathered = handle.result
        return handle

    def store(self, means: Tensors) -> None:
        if self.algorithm == "ring":
            super().store(means)
            return
        mean, *others = means
        if self._attempt is not None:
            rows, divisor = self._store_parts(self._attempt, mean)
        else:
            payloads, *rows = self._gathered
            self._gathered = []
            self.total.add_up(rows[len(others) :])
            divisor = self.total.divisor(len(payloads))
            _add_up(mean, payloads, self._codec.format)
            kernels.divide(mean, divisor)
        for other, row in zip(others, rows[: len(others)], strict=True):
            other.copy_(row[0])
            last = len(row) - 1
            for rank in range(1, len(row)):
                kernels.add(other, other, row[rank], divisor=divisor if rank == last else 1)

    def _store_parts(self, attempt: TwoStageMean, mean: torch.Tensor) -> tuple[Tensors, int]:
        for part, codes in zip(attempt.parts, attempt.codes, strict=True):
            if part:
                kernels.dequantize(mean[part.start : part.stop], codes, self._codec.format)
        self.total.add_up(attempt.rows[len(self._beside) - len(self.total.sent) :])
        # The sum over all peers has lost the error of the mean times the divisor, which this peer's
        # next contribution restores. A late peer has weight 0 here, and restores the average.
        average = attempt.divisor / max(1, self.total.contributors or len(attempt.parts))
        by = attempt.divisor / (self.total.weight or average)
        self._second = attempt.own_part, attempt.second_error * by
        return attempt.rows, attempt.divisor

    def sent(self) -> torch.Tensor:
        return super().sent() if self.algorithm == "ring" else self._room - self._next

    def commit(self, peers: int, own: bool) -> None:
        if own:
            self._residual, self._next = self._next, self._residual
        if self._second is not None:
            part, lost = self._second
            self._residual[part.start : part.stop] += lost
            self._second = None
        self._selector.applied(peers)

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._residual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "residual" in state:
            self._residual.copy_(state["residual"])


CODECS: dict[Wire, Codec] = {
    # e3m0: Streaming DiLoCo, arXiv 2501.18512
    **{format: Codec(format, two_stage=True) for format in get_args(kernels.Format)},
    "2bit": Codec("2bit", decay=0.9),  # MuLoCo, arXiv 2505.23725
    "sparse": Codec("sparse", decay=0.95),  # SparseLoCo, arXiv 2508.15706; a mean is not sparse
}


Handle = AsyncReduceHandle | TwoStageMean


def averager_of(wire: Wire, count: int, selector: Selector) -> Averager:
    if wire == "fp32":
        return Averager()
    return Quantized(CODECS[wire], count, selector)
