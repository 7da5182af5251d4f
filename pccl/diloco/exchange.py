"""The exchange of a round: measures the model's progress, averages it, and updates the model."""

from __future__ import annotations

import logging
import math
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from pccl import (
    Communicator,
    KickedError,
    PCCLError,
    ReduceInfo,
    Result,
    TensorInfo,
    TooFewPeersError,
    extension,
)
from pccl.data import Ledger
from pccl.diloco.averaging import Averager, Handle, Votes
from pccl.diloco.model import Buffers, InnerState, Replica
from pccl.diloco.outer import OuterState, Radial
from pccl.diloco.settings import Outliers, WeightBy
from pccl.diloco.stats import Meter, Work, gather_row
from pccl.errors import AGAIN

_log = logging.getLogger("pccl.diloco")

T = TypeVar("T")


_FAR = 10.0  # times the median norm: such a pseudo-gradient is an outlier
_ENOUGH = 3  # norms: the median of fewer does not say what is usual


@dataclass(frozen=True, slots=True)
class Average:
    """The outcome of an averaging."""

    info: ReduceInfo | None  # of the committed attempt; None if this peer was alone
    retries: int  # attempts that failed because a peer was lost
    weighty: int | None = None  # peers whose weight is above 0; None: all of them
    late: int = 0  # peers whose weight is 0 because they came too late

    @property
    def peers(self) -> int:
        return 1 if self.info is None else self.info.world_size

    @property
    def contributors(self) -> int:
        """Peers whose pseudo-gradients were averaged."""
        return self.peers if self.weighty is None else self.weighty


def _may_repeat(error: PCCLError) -> bool:
    """Whether to repeat a collective without a lost peer; False if this peer is alone."""
    if error.result is Result.TOO_FEW_PEERS:
        return False
    if error.result not in AGAIN:
        raise error
    _log.warning("a peer was lost, retrying with the others: %s", error)
    return True


class AsyncAverage:
    """An averaging in the background, which restarts whenever a peer is lost."""

    def __init__(self, launch: Callable[[], Handle]) -> None:
        self._launch = launch
        self._handle: Handle | None = launch()
        self._retries = 0
        self._info: ReduceInfo | None = None
        self._error: PCCLError | None = None
        self._maybe_applied = False  # whether an attempt of unknown outcome may have succeeded

    def poll(self) -> None:
        """Relaunches if a peer was lost; does not wait."""
        while self._handle is not None and self._handle.done():
            self._end_attempt(self._handle)

    def wait(self) -> Average:
        while self._handle is not None:
            self._end_attempt(self._handle)
        if self._error is not None:
            raise self._error
        return Average(self._info, self._retries)

    def drain(self) -> bool:
        """Waits until it no longer uses the memory, whether it succeeds or fails.

        Returns False only if it has certainly failed on all peers, so that none has the mean.
        """
        handle = self._handle
        if handle is not None:
            committed, _, _ = self._attempting(handle.wait)
            certain = handle.error and handle.error.result in (*AGAIN, Result.TOO_FEW_PEERS)
            self._maybe_applied |= committed or not certain
            self._handle = None
        return self._maybe_applied or self._info is not None or self._error is not None

    def _end_attempt(self, handle: Handle) -> None:
        committed, _, info = self._attempting(handle.wait)
        if committed:
            self._info = info
        else:
            assert handle.error is not None
            try:
                if _may_repeat(handle.error):
                    self._retries += 1
                    self._handle = self._attempting(self._launch)
                    return
            except TooFewPeersError:
                pass  # it is alone
            except PCCLError as error:
                self._error, self._handle = error, None
                raise
        self._handle = None

    def _attempting(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except PCCLError:
            raise
        except BaseException:  # such as Ctrl-C: it has abandoned an attempt
            self._maybe_applied = True
            raise


class ConsistencyCheck:
    """Checks that all processes of a replica have means of the same contributors: see
    docs/internals/diloco.md, "When a peer is lost".
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []
        if replica.size > 1:
            drawn = [replica.first(secrets.randbits(48)) for _ in range(2)]  # sums fit in 64 bits
            self.sent = [torch.tensor(drawn)]
            self.received = [torch.zeros_like(self.sent[0])]

    def verify(self, average: Average, again: Callable[[], Average]) -> Average:
        """Repeats the averaging until all processes have means of the same contributors."""
        if self._replica.size == 1:
            return average
        retries = average.retries
        while True:
            own = [average.peers, *self.received[0].tolist()]
            states = self._replica.exchange(own if average.info is not None else [1, 0, 0])
            if any(row[0] == 1 for row in states):
                return Average(None, retries)
            if all(row == own for row in states):
                return replace(average, retries=retries)
            _log.warning("a lost replica is in the means of only some shards: retrying")
            average = again()
            retries += 1 + average.retries

    def all_launched(self, running: AsyncAverage | None) -> AsyncAverage:
        """Checks that all processes have launched it; raises TooFewPeersError if one is alone."""
        if self._replica.all(running is not None) and running is not None:
            return running
        if running is not None:
            running.wait()  # which ends soon, because all others are lost
        raise TooFewPeersError(Result.TOO_FEW_PEERS, "launch", "this replica is alone")


class LedgerHooks:
    """Votes, settles and claims for a ledger; with None, all methods do nothing.

    `counted`: a round may end before a peer has trained on all of its share.
    """

    def __init__(self, ledger: Ledger | None, counted: bool) -> None:
        self._ledger = ledger
        self.counted = counted and ledger is not None
        # how often this peer has given up its samples, and whether its model still includes them
        self.renewals, self.stale = 0, False
        self.votes: list[torch.Tensor] = []  # the buffer for the sum of all
        self._own: list[torch.Tensor] = []
        if ledger is not None:
            dtype = torch.int64 if counted else torch.uint8
            self.votes = [torch.zeros(ledger.peers_max, dtype=dtype)]

    def train(self, samples: int) -> None:
        if self._ledger is not None and self.counted and not self.stale:
            self._ledger.train(samples)

    def measure(self) -> None:
        if self._ledger is not None:
            self._ledger.mark()

    @property
    def waits(self) -> bool:
        """True if this peer has no samples now, but may get some later."""
        ledger = self._ledger
        return ledger is not None and (self.stale or not (ledger.share or ledger.finished))

    def vote(self, late: bool) -> list[torch.Tensor]:
        if self._ledger is not None:
            votes = self._ledger.vote(counted=self.counted, late=late, marked=True)
            self._own = [torch.from_numpy(votes)]
        return self._own

    def count_alone(self) -> None:
        """Records that the mean is this peer's progress alone, even if it was late for others."""
        self.vote(late=False)
        for votes, own in zip(self.votes, self._own, strict=True):
            votes.copy_(own)

    def settle(self, applied: bool) -> None:
        """Ends the vote: the mean is applied, or has failed, so the peer keeps its progress."""
        if self._ledger is not None:
            votes: Any = self.votes[0].numpy()
            self._ledger.settle(votes if applied else None)

    def claim(self, comm: Communicator, wanted: int | None = None) -> None:
        """Claims samples for the next round; all peers of the group call it."""
        if self._ledger is not None:
            self._ledger.claim(comm, wanted)

    def rejoin(self) -> bool:
        """True if a peer that was left behind may keep its progress.

        With a ledger it must not, because others train on its samples.
        """
        if self._ledger is not None:
            self._ledger.renew()
            self.stale = True
        return self._ledger is None

    def renewed(self) -> None:
        """Records that the model no longer includes the samples that were given up."""
        self.renewals += self.stale
        self.stale = False

    def entries(self) -> list[TensorInfo]:
        return [] if self._ledger is None else self._ledger.entries()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self._ledger is None else {"ledger": torch.from_numpy(self._ledger.dump())}

    def check(self, state: Mapping[str, Any]) -> None:
        if "ledger" not in state:
            return
        if self._ledger is None:
            raise ValueError("the state has a ledger of samples: pass one to DiLoCo, as ledger=")
        self._ledger.check(state["ledger"].numpy())

    def load(self, state: Mapping[str, Any]) -> None:
        if self._ledger is not None and "ledger" in state:
            self._ledger.restore(state["ledger"].numpy())


class Weight:
    """Counts the samples in a pseudo-gradient, over all processes of the replica.

    The weight is 0 if the peer came `late` to a deadline round, or if its progress is `excluded`
    and lost.
    """

    def __init__(self, by: WeightBy, always: bool, replica: Replica) -> None:
        """`always`: use weights even if `by` gives all the same one, because late peers have 0."""
        self.late = self.excluded = False
        self._by = by
        self._always = always
        self._trained = Work()  # is in no applied mean yet
        self._measured = Work()  # the part of it that the pseudo-gradient holds
        self._weight = 0  # of the measured work, over the replica's processes
        self._replica = replica

    def count(self, samples: int) -> None:
        self._trained = self._trained.plus(1, samples)

    def measure(self) -> None:
        self._measured = self._trained
        if self._by != "peers":
            samples = sum(count for (count,) in self._replica.exchange([self._measured.samples]))
            self._weight = samples
            if self._by == "rate" and samples:
                self._weight = max(1, samples * samples // self._measured.steps)

    @property
    def trained(self) -> bool:
        return self._trained.steps > 0

    @property
    def measured(self) -> bool:
        """True if the pseudo-gradient holds any inner step."""
        return self._measured.steps > 0

    def applied(self) -> None:
        """Records that a mean with the pseudo-gradient is about to be applied."""
        if not self.late:
            done, self._measured = self._measured, Work()
            self._trained = self._trained.plus(-done.steps, -done.samples)

    def drop(self) -> None:
        self._trained = Work()

    @property
    def value(self) -> int | None:
        """The weight of the pseudo-gradient; None: all peers weigh the same."""
        if self._by == "peers" and not self._always:
            return None
        if self.late or self.excluded:
            return 0
        return self._weight if self._by != "peers" else 1


# the distance of a pseudo-gradient from the mean, relative to its norm; independent ones: >= 0.7
_ALIKE = 0.01
TAG = 0xD110C0  # tags of averaging in the background; the script's own collectives have other tags


@dataclass(eq=False)
class Exchange:
    """Moves progress from the model to the peers, and their mean back, in each outer round.

    One collective averages d, the changes of the buffers and the votes of a ledger. They do not
    change until the outcome is known, so the survivors of a loss can repeat it.
    """

    _comm: Communicator
    _state: OuterState
    _buffers: Buffers
    averager: Averager
    weight: Weight
    _meter: Meter
    ledger: LedgerHooks
    _replica: Replica
    _quarantine: Quarantine | None
    _inner: InnerState
    _radial: Radial | None
    _lock: AbstractContextManager[object]  # of the thread that calls `measure` and `rebase`
    _moves: list[torch.Tensor] = field(default_factory=list)  # of the buffers
    measured: bool = False  # d, since the model last received theta
    sent: bool = False  # likewise
    alike: bool | None = None  # whether all peers have sent the same; None: unknown
    _loaded: bool = False  # whether the averager has progress that no applied mean has

    def __post_init__(self) -> None:
        self._check = ConsistencyCheck(self._replica)

    # ---- the model ----

    def measure(self) -> None:
        self._state.measure()
        self._moves = self._buffers.measure()
        self.weight.measure()
        self.ledger.measure()
        self.measured, self.sent = True, False

    def rescue(self) -> bool:
        """Returns whether this peer, which was dropped, may add d again.

        If a collective with d has started, its outcome is unknown, and d counts as applied, unless
        this peer was late: then its weight was 0.
        """
        if self.gave_away():
            self.discard()
            return False
        if not self.measured:
            self.measure()
        return True

    def gave_away(self) -> bool:
        """True if others may have applied d, which is still in the model."""
        return self.sent and not self.weight.late

    def discard(self) -> None:
        """Discards the last loaded progress, which others may have applied."""
        if self._loaded:
            self._loaded = False
            with self._lock:
                self.weight.applied()
            self.averager.commit(0, own=self.weight.value != 0)

    def reclaim(self, keep: float = 1.0) -> None:
        """Adds the progress, times `keep`, to the model again, because no mean will have it."""
        self._state.reclaim(keep)
        self._buffers.reclaim(self._moves)
        self.ledger.settle(applied=False)

    def keep(self) -> None:
        """Keeps the progress, because the mean has failed and the model still has it."""
        self.measured = self.sent = False
        self.ledger.settle(applied=False)

    def step(self, contributors: int) -> None:
        with self._lock:
            self._state.step(contributors)
            self.ledger.settle(applied=True)
            self._buffers.advance()
        shared = self._buffers.shared
        if self._buffers.mode == "first" and shared:
            self._buffers.gather()
            self._until_committed(lambda: self._comm.broadcast(shared, root="first"))

    def adopt(self, keep: float = 0.0) -> None:
        """Copies theta and shared buffers to the model, which keeps `keep` of its parameters."""
        self._replica.reshard()
        self._state.adopt(keep)
        self._buffers.adopt()
        self.measured = self.sent = False

    def rebase(self, counted: bool, keep: float = 0.0) -> None:
        """Moves the model like theta since it was the base; the model keeps `keep` of its own.

        `counted`: theta includes d, too, so the model drops it.
        """
        self._replica.reshard()
        self._state.rebase(counted, keep)
        self._buffers.adopt()

    # ---- the peers ----

    def vet(self) -> None:
        """Leaves the progress out of the next mean if it would spoil that.

        Its weight is 0 then; if all peers weigh the same, zeros are averaged in its place.
        """
        if self._quarantine is not None:
            factor = self._quarantine.factor(self._state.delta, _are_finite(self._moves))
        else:
            progress = [self._state.delta, *self._moves]
            factor = float(self._replica.all(_are_finite(progress)))
            if not factor:
                _log.error(
                    "the pseudo-gradient of this peer is not finite: it is excluded from this "
                    "mean; look for the cause in its data, its learning rate or its device%s",
                    self._inner.fault(),
                )
        self.weight.excluded = factor == 0
        if factor == 0:
            for each in (self._state.delta, *self._moves):
                each.zero_()
        elif factor != 1:
            self._state.delta.mul_(factor)

    def run(self) -> Average:
        self._load()
        return self._verified(self._attempt)

    def launch(self) -> AsyncAverage:
        """Starts to average the progress; raises TooFewPeersError if this peer is alone."""
        self._load()
        try:
            running: AsyncAverage | None = AsyncAverage(self._start)
        except TooFewPeersError:
            running = None
        return self._check.all_launched(running)

    def _load(self) -> None:
        self.sent = self._loaded = True
        votes = self.ledger.vote(self.weight.late)
        own = [self._state.delta] if self._radial is None else self._radial.split()
        progress = [*own, *self._moves]
        beside = Votes(
            [*votes, *self._check.sent],
            [*self.ledger.votes, *self._check.received],
            self.weight.late,
        )
        self.averager.load(progress, self.weight.value, beside)

    def _attempt(self) -> Average:
        return self._until_committed(lambda: self.averager.run(self._comm, self._averaged))

    def _start(self) -> Handle:
        return self.averager.launch(self._comm, self._averaged, TAG)

    def wait(self, running: AsyncAverage) -> Average:
        return self._verified(lambda: self._store(running))

    def _verified(self, attempt: Callable[[], Average]) -> Average:
        with self._meter.timed("reduce"):
            average = self._check.verify(attempt(), self._attempt)
        self._meter.last_reduce = average.info or self._meter.last_reduce
        return self._counted(average)

    def _store(self, running: AsyncAverage) -> Average:
        average = running.wait()
        if average.info is not None:
            self.averager.store(self._averaged)
            self._meter.count(average.info)
        return average

    def _counted(self, average: Average) -> Average:
        if average.info is None:
            return replace(average, weighty=None, late=0)
        total = self.averager.total
        average = replace(average, weighty=total.contributors, late=total.late)
        if self.alike is None and average.contributors > 1 and self.weight.value != 0:
            sent = self.averager.sent()
            size = float(sent.norm())
            if size:
                self.alike = float(torch.dist(sent, self._state.mean)) < _ALIKE * size
        return average

    def accept(self, average: Average) -> None:
        """Accepts the mean before it is applied: the peer's own progress if it is alone."""
        self._loaded = False
        with self._lock:
            self.weight.applied()
        if average.info is not None:
            self.averager.commit(average.peers, own=self.weight.value != 0)
            if self._radial is not None:
                self._radial.join()
            return
        self.ledger.count_alone()
        means = [self._state.mean, *self._buffers.means]
        for mean, own in zip(means, [self._state.delta, *self._moves], strict=True):
            mean.copy_(own)

    @property
    def outer_step(self) -> int:
        return int(self._state.steps)

    @property
    def means(self) -> list[torch.Tensor]:
        """The buffers for the means, and for the sum of the votes."""
        return [self._state.mean, *self.ledger.votes, *self._buffers.means]

    @property
    def _averaged(self) -> list[torch.Tensor]:
        norms = [] if self._radial is None else [self._radial.mean]
        return [self._state.mean, *norms, *self._buffers.means]

    def _until_committed(self, call: Callable[[], ReduceInfo]) -> Average:
        """Repeats a collective until it commits or this peer is alone."""
        retries = 0
        while True:
            try:
                info = call()
            except PCCLError as error:
                if not _may_repeat(error):
                    return Average(None, retries)
                retries += 1
            else:
                self._meter.count(info)
                return Average(info, retries)


# ---- quarantine ----


@dataclass(eq=False)
class Quarantine:
    """Excludes pseudo-gradients that are not finite, or far larger than all others, from the mean.

    It compares the norms of all peers before each mean.
    """

    _comm: Communicator
    _replica: Replica
    _rounds: int  # in a row without its progress, after which a peer is dropped
    _outliers: Outliers
    names: tuple[str, ...] = ()  # of the peers that were excluded last time
    _times: Counter[int] = field(default_factory=Counter)  # in a row, by the peer's number
    _why: str = ""  # this peer was excluded

    def factor(self, delta: torch.Tensor, others_finite: bool) -> float:
        """The factor of this peer's pseudo-gradient: 0 if it is left out.

        `others_finite`: whether what is averaged beside it, the changes of the buffers, is finite.
        """
        number = extension.member(self._comm).number
        rows = gather_row(self._comm, [number, self._norm(delta, others_finite)])
        norms = {int(peer): norm for peer, norm in rows}
        finite = sorted(norm for norm in norms.values() if math.isfinite(norm))
        usual = finite[(len(finite) - 1) // 2] if finite else 0.0
        clips = self._outliers == "clip"
        most = _FAR * usual if len(finite) >= _ENOUGH and usual and not clips else math.inf
        bad = {peer: norm for peer, norm in norms.items() if not norm <= most or norm == math.inf}
        self._times = Counter({peer: self._times[peer] + 1 for peer in bad})
        self.names = self._named(bad, usual)
        out = not self._replica.all(number not in bad)  # by any of its shards
        if out:
            self._why = _why(norms[number], usual)
            return 0.0
        norm = norms[number]
        return usual / norm if clips and norm > usual > 0 else 1.0

    def _norm(self, delta: torch.Tensor, others_finite: bool) -> float:
        """The norm over all shards; infinity if anything is not finite."""
        square = float(delta.double().square().sum()) if others_finite else math.inf
        (bits,) = struct.unpack("<q", struct.pack("<d", square))
        squares = [struct.pack("<q", row[0]) for row in self._replica.exchange([bits])]
        whole: float = sum(struct.unpack("<d", each)[0] for each in squares)
        return math.sqrt(whole) if math.isfinite(whole) else math.inf

    def _named(self, bad: dict[int, float], usual: float) -> tuple[str, ...]:
        members = extension.names(self._comm) if bad else {}
        names = []
        for peer, norm in sorted(bad.items()):
            names.append(members.get(peer, f"peer {peer}"))
            _log.warning(
                "%s is excluded from this mean (%d in a row): its pseudo-gradient is %s",
                names[-1],
                self._times[peer],
                _why(norm, usual),
            )
        return tuple(names)

    def check(self, inner: InnerState) -> None:
        """Ends this peer's membership, with KickedError, if it was excluded too often."""
        number = extension.member(self._comm).number
        if self._times[number] >= self._rounds:
            self._comm.close()
            raise KickedError(
                Result.INVALID_ARGUMENT,
                "DiLoCo.step",
                f"quarantine: in {self._rounds} rounds in a row this peer's pseudo-gradient was "
                f"{self._why}; look for the cause in its data, its device or its inner optimizer"
                f"{inner.fault()}",
            )


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(math.isfinite(float(each.sum())) for each in tensors)


def _why(norm: float, usual: float) -> str:
    if not math.isfinite(norm):
        return "not finite"
    return f"too large: its norm is {norm:.3g}, and the median of all peers {usual:.3g}"
