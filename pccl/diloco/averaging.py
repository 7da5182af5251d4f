"""How pseudo-gradients are averaged: around the ring as they are, or quantized and gathered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

_WEIGHTS_MAX = 1 << 32  # the divisor of a mean
_BLOCK = 1024  # numbers: whole blocks of every format of which a mean may be quantized again

_log = logging.getLogger("pccl.diloco")


class Selector:
    """Chooses by what a peer receives, so that no wire costs more than an fp32 all-reduce.

    Of R peers, with q bytes of a quantized pseudo-gradient and p in fp32, each receives

        gather       (R - 1) q
        two-stage    (R - 1) (1 / 2 + 1 / R) q    parts go to their owners along the ring, and back
        ring         (R - 1) 2 / R p

    Two stages quantize twice, so they are chosen where they save a fifth, which is from 4 peers.

    All peers must choose the same, and which peers there are is no ground for that: one of them has
    heard of a loss, another has not yet. So R is the number of contributors of the mean that was
    last applied, on which they have agreed and which newcomers receive; it may be out of date by a
    round. And a choice stands until the round has its mean, whoever is lost meanwhile.
    """

    def __init__(self) -> None:
        self._peers = torch.zeros(1, dtype=torch.int64)  # 0 until a mean was applied

    def entries(self) -> list[TensorInfo]:
        """The entries of the shared state."""
        return [TensorInfo.from_torch(self._peers, "diloco.contributors")]

    def choose(self, sizes: Sizes, before: Algorithm) -> Algorithm:
        """The algorithm of a round. If it is not that of the round before, the log says why."""
        peers = int(self._peers[0])
        received = sizes.received(peers)
        chosen: Algorithm = "gather"
        two_stage = received.get("two-stage", 0)
        if two_stage and 5 * two_stage <= 4 * received["gather"]:
            chosen = "two-stage"
        if received["ring"] < received[chosen]:
            chosen = "ring"
        if chosen != before:
            _log.info(
                "from now on pseudo-gradients are averaged by %s: of %d peers, each receives %s",
                _NAMES[chosen],
                peers,
                ", ".join(f"{count} bytes by {_NAMES[name]}" for name, count in received.items()),
            )
        return chosen

    def applied(self, peers: int) -> None:
        """A mean of `peers` peers is going to be applied, on all of them."""
        self._peers[0] = peers


_NAMES: dict[Algorithm, str] = {
    "gather": "gathering them quantized",
    "two-stage": "a mean in two stages",
    "ring": "an fp32 all-reduce",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what each peer has for a round.

    Attributes:
        quantized: its pseudo-gradient.
        plain: that in fp32.
        beside: what goes with it as it is.
        two_stage: whether the mean may be quantized again.
    """

    quantized: int
    plain: int
    beside: int = 0
    two_stage: bool = False

    def received(self, peers: int) -> dict[Algorithm, int]:
        """The bytes that a peer receives, by algorithm."""
        others = max(0, peers - 1)
        found: dict[Algorithm, int] = {"gather": others * (self.quantized + self.beside)}
        if self.two_stage:
            around = others * (peers + 2) * self.quantized // max(1, 2 * peers)
            found["two-stage"] = around + others * self.beside
        found["ring"] = 2 * others * (self.plain + self.beside) // max(1, peers)
        return found


@dataclass(frozen=True, slots=True)
class Votes:
    """The values that travel beside the progress; weights do not change them.

    Attributes:
        sent: of this peer.
        received: what they are added up in; or their mean, if all peers weigh the same.
        late: whether this peer's progress weighs nothing because it came too late.
    """

    sent: Tensors
    received: Tensors
    late: bool = False


class Total:
    """The sum of all weights, how many are not 0, how many peers are late, and the votes.

    Attributes:
        own: this peer's part of these sums; None: all weigh the same, and nothing is added up.
    """

    def __init__(self) -> None:
        self.own: torch.Tensor | None = None
        self._sum = torch.zeros(3, dtype=torch.int64)
        self._votes = Votes([], [])

    def load(self, weight: int | None, votes: Votes) -> None:
        """The weight of this peer; None: all weigh the same, and weights are not added up."""
        self.own = None
        if weight is not None:
            self.own = torch.tensor([weight, int(weight > 0), int(votes.late)])
        self._votes = votes

    @property
    def weight(self) -> int:
        """By which this peer has multiplied its progress."""
        return 1 if self.own is None else int(self.own[0])

    @property
    def weighs(self) -> bool:
        return self.own is not None

    @property
    def sent(self) -> Tensors:
        return [*self._votes.sent, *([] if self.own is None else [self.own])]

    @property
    def received(self) -> Tensors:
        """Where an all-reduce adds it up."""
        return [*self._votes.received, *([] if self.own is None else [self._sum])]

    def add_up(self, rows: Sequence[torch.Tensor]) -> None:
        """Adds up what a gather has brought."""
        for row, sum in zip(rows, self.received, strict=True):
            torch.sum(row, 0, dtype=sum.dtype, out=sum)

    @property
    def contributors(self) -> int | None:
        """Peers whose progress weighs anything; None if that of all weighs the same."""
        return None if self.own is None else int(self._sum[1])

    @property
    def late(self) -> int:
        """Peers whose progress weighs nothing because they came too late."""
        return 0 if self.own is None else int(self._sum[2])

    def divisor(self, peers: int) -> int:
        """The divisor of a sum over `peers` peers; 1 if all weights are 0.

        Raises:
            ValueError: the weights are too large, on all peers.
        """
        if self.own is None:
            return peers
        return _divisor(int(self._sum[0]))


def _divisor(weights: int) -> int:
    if weights >= _WEIGHTS_MAX:
        raise ValueError(
            f"all peers together trained on {weights} samples in one round, and {_WEIGHTS_MAX} "
            "cannot be counted: give `samples` in a larger unit"
        )
    return max(1, weights)


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

    def launch(self, comm: Communicator, means: Tensors, tag: int) -> Handle:
        """Averages in the background; `store` must follow when it has succeeded."""
        return comm.all_reduce_async(*self._operands(means), op=self._op, tag=tag)

    def store(self, means: Tensors) -> None:
        """Writes the means that a launched attempt has brought."""
        if self._total.weighs:
            divisor = self._total.divisor(1)
            kernels.divide(means[0], divisor)
            for mean in means[1:]:
                kernels.add(mean, mean, torch.zeros_like(mean), divisor=divisor)

    def sent(self) -> torch.Tensor:
        """The input of the mean, from a peer whose weight is not 0."""
        return self._progress[0] / self._total.weight

    def commit(self, peers: int, own: bool) -> None:
        """The means of `peers` peers are going to be applied; `own`: this peer is one of them."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this peer between two rounds."""
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


@dataclass(frozen=True, slots=True)
class Codec:
    """How a pseudo-gradient is quantized, and its residual.

    Attributes:
        format: of what is sent.
        decay: by which a residual is multiplied before it is added to the next pseudo-gradient.
        two_stage: whether a mean may be quantized again.
    """

    format: kernels.Format
    decay: float = 1.0
    two_stage: bool = False


class TwoStageMean:
    """One attempt at a mean in two stages, as the handle of one collective.

    The numbers are cut into a part for each rank, in whole blocks of the format. First each peer
    gives its quantized part r to the peer of rank r, which adds them in the order of the ranks,
    divides, and quantizes the mean. Then all gather these, and what goes beside.

    Both stages are among the ranks of the first, so if a peer is lost in between, the second fails
    on all of them.

    Attributes:
        codes: the quantized mean of each part, once it has committed.
        rows: of each tensor beside, what all ranks have given.
        error: why it has failed.
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
        self._sizes = [kernels.quantized_size(codec.format, len(part)) for part in self.parts]
        header = _bytes_of(weights) if weights is not None else payload[:0]
        sent = [each for piece in torch.split(payload, self._sizes) for each in (header, piece)]
        rows = [len(header) + size for size in self._sizes]
        own = rows[self._ranks.rank]
        self.codes: Sequence[torch.Tensor] = []
        self.rows: Tensors = []
        self.error: PCCLError | None = None
        self.divisor = 0
        self.second_error = torch.empty(0)
        self._received = torch.empty(own * members, dtype=torch.uint8)
        self._info = ReduceInfo(0, 0, 0)
        self._second: AsyncReduceHandle | None = None
        work, _ = operands.all_to_all(
            torch.cat(sent), self._received, rows, [own] * members, self._ranks
        )
        self._first = extension.launch(comm, "all_to_all", work, tag)

    def done(self) -> bool:
        """True if it has ended; begins the second stage when the first has."""
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
        """The end of the first stage, and the begin of the second."""
        self._end(self._first)
        if self.error is not None:
            return
        members, rank, format = self._ranks.members, self._ranks.rank, self._codec.format
        mean = torch.empty(len(self.parts[rank]))
        codes = torch.empty(self._sizes[rank], dtype=torch.uint8)
        decoded = torch.empty_like(mean)
        rows = self._received.view(members, len(self._received) // members)
        payloads = rows[:, rows.shape[1] - len(codes) :]
        self.divisor = members
        if self._weights is not None:
            weights = rows[:, : rows.shape[1] - len(codes)].contiguous().view(torch.int64)
            self.divisor = _divisor(int(weights[:, 0].sum()))
        if len(mean):
            for number, payload in enumerate(payloads):
                (kernels.accumulate if number else kernels.dequantize)(mean, payload, format)
            kernels.divide(mean, self.divisor)
            kernels.quantize(codes, mean, format)
            kernels.dequantize(decoded, codes, format)
            kernels.subtract(mean, mean, decoded)
        self.second_error = mean
        sent = torch.cat([codes, *map(_bytes_of, self._beside)])
        beside = len(sent) - len(codes)
        work, result = operands.all_gather(
            sent, None, self._ranks, [size + beside for size in self._sizes]
        )
        try:
            self._second = extension.launch(self._comm, "all_gather", work, self._tag, result)
        except PCCLError as error:
            self.error = error

    def _unpack(self, gathered: Any) -> None:
        beside = sum(each.nbytes for each in self._beside)
        pieces = gathered.split([size + beside for size in self._sizes])
        self.codes = [piece[: len(piece) - beside] for piece in pieces]
        lengths = [each.nbytes for each in self._beside]
        cut = [piece[len(piece) - beside :].split(lengths) for piece in pieces]
        self.rows = [
            torch.stack([row[i].clone().view(each.dtype).view(each.shape) for row in cut])
            for i, each in enumerate(self._beside)
        ]

    @property
    def own_part(self) -> range:
        """The numbers that this peer has added up."""
        return self.parts[self._ranks.rank]


def _parts(count: int, members: int) -> list[range]:
    """Cuts `count` numbers into nearly equal parts that begin at blocks of every format."""
    blocks = -(-count // _BLOCK)
    ends = [min(count, _BLOCK * (blocks * (rank + 1) // members)) for rank in range(members)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Quantized(Averager):
    """Quantizes the pseudo-gradient once, and sums those of all peers up in fp32 in the order of
    the ranks, after a gather or in two stages: see docs/internals/diloco.md.

    With e this peer's residual, a = decay e + d and a weight w, Q(w a) is sent, and a - Q(w a) / w
    is the residual once the mean is going to be applied; with w = 0 the old one stands. In two
    stages the owner of a part adds what the mean has lost there. Where the selector finds that the
    ring receives less, a itself goes around it, and e is 0 then.
    """

    def __init__(self, codec: Codec, count: int, selector: Selector) -> None:
        super().__init__()
        self.algorithm = "gather"
        self._codec = codec
        self._selector = selector
        self._residual = torch.zeros(count)
        self._next = torch.zeros(count)  # the residual, once the round commits
        self._room = torch.empty(count)
        size = kernels.quantized_size(codec.format, count)
        self._payload = torch.empty(size, dtype=torch.uint8)
        self._beside: Tensors = []
        self._gathered: Any = []  # tensors
        self._attempt: TwoStageMean | None = None
        self._second: tuple[range, torch.Tensor] | None = None  # what the mean has lost here

    def load(self, progress: Tensors, weight: int | None, votes: Votes) -> None:
        delta, *others = progress
        beside = sum(each.nbytes for each in [*others, *votes.sent])
        self.algorithm = self._selector.choose(
            Sizes(self._payload.nbytes, delta.nbytes, beside, self._codec.two_stage), self.algorithm
        )
        self._attempt, self._second = None, None
        torch.mul(self._residual, self._codec.decay, out=self._room)
        kernels.add(self._room, self._room, delta)
        if self.algorithm == "ring":
            self._next.zero_()
            super().load([self._room, *others], weight, votes)
            return
        self._total.load(weight, votes)
        weighed = self._room if weight is None else self._room * weight
        kernels.quantize(self._payload, weighed, self._codec.format)
        kernels.dequantize(self._next, self._payload, self._codec.format)
        if weight is not None:
            self._next /= max(1, weight)
            others = [each * weight for each in others]
        kernels.subtract(self._next, self._room, self._next)
        self._beside = [*others, *self._total.sent]

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
            count, weights = self._residual.numel(), self._total.own
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
            self._total.add_up(rows[len(others) :])
            divisor = self._total.divisor(len(payloads))
            self._store_sum(payloads, mean, divisor)
        for other, row in zip(others, rows[: len(others)], strict=True):
            other.copy_(row[0])
            last = len(row) - 1
            for rank in range(1, len(row)):
                kernels.add(other, other, row[rank], divisor=divisor if rank == last else 1)

    def _store_sum(
        self, payloads: Sequence[torch.Tensor], mean: torch.Tensor, divisor: int
    ) -> None:
        for rank, payload in enumerate(payloads):
            read = kernels.accumulate if rank else kernels.dequantize
            try:
                read(mean, payload, self._codec.format)
            except ValueError as error:
                raise ValueError(
                    f"the peer of rank {rank}, of {len(payloads)}, has sent a pseudo-gradient that "
                    f"is none: {error}"
                ) from error
        kernels.divide(mean, divisor)

    def _store_parts(self, attempt: TwoStageMean, mean: torch.Tensor) -> tuple[Tensors, int]:
        for part, codes in zip(attempt.parts, attempt.codes, strict=True):
            if part:
                kernels.dequantize(mean[part.start : part.stop], codes, self._codec.format)
        self._total.add_up(attempt.rows[len(self._beside) - len(self._total.sent) :])
        # The sum of all contributions has lost so much; it returns in that of this peer, by its
        # weight, or a usual one if it is late for this mean and has none.
        usual = attempt.divisor / max(1, self._total.contributors or len(attempt.parts))
        by = attempt.divisor / (self._total.weight or usual)
        self._second = attempt.own_part, attempt.second_error * by
        return attempt.rows, attempt.divisor

    def sent(self) -> torch.Tensor:
        return super().sent() if self.algorithm == "ring" else self._room - self._next

    def commit(self, peers: int, own: bool) -> None:
        """The new residual becomes real."""
        if own:
            self._residual, self._next = self._next, self._residual
        if self._second is not None:
            part, lost = self._second
            self._residual[part.start : part.stop] += lost
            self._second = None
        self._selector.applied(peers)

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the residual, if the state has one; else it begins at 0."""
        if "residual" in state:
            self._residual.copy_(state["residual"])


CODECS: dict[Wire, Codec] = {
    "int8": Codec("int8", two_stage=True),
    "int4": Codec("int4", two_stage=True),
    "e3m0": Codec("e3m0", two_stage=True),  # Streaming DiLoCo, arXiv 2501.18512
    "2bit": Codec("2bit", decay=0.9),  # MuLoCo, arXiv 2505.23725
    "sparse": Codec("sparse", decay=0.95),  # SparseLoCo, arXiv 2508.15706; a mean is not sparse
}


Handle = AsyncReduceHandle | TwoStageMean


def averager_of(wire: Wire, count: int, selector: Selector) -> Averager:
    """The averager of `count` parameters for a wire."""
    if wire == "fp32":
        return Averager()
    return Quantized(CODECS[wire], count, selector)
