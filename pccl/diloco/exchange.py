"""The exchange of a round: taken from the model, averaged until that commits, and given back."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pccl import (
    Communicator,
    PCCLError,
    ReduceInfo,
    Result,
    TensorInfo,
    TooFewPeersError,
)
from pccl.data import Ledger
from pccl.diloco.averaging import Averager, Handle, Votes
from pccl.diloco.model import Buffers, Replica
from pccl.diloco.outer import OuterState
from pccl.diloco.settings import WeightBy
from pccl.diloco.stats import Meter

_log = logging.getLogger("pccl.diloco")


@dataclass(frozen=True, slots=True)
class Average:
    """How an averaging has ended.

    Attributes:
        info: of the attempt that has committed; None if this peer was alone.
        retries: attempts that failed because a peer was lost.
        weighty: peers whose pseudo-gradients weigh anything; None: all of them.
        late: peers whose pseudo-gradients weigh nothing because they came too late.
    """

    info: ReduceInfo | None
    retries: int
    weighty: int | None = None
    late: int = 0

    @property
    def peers(self) -> int:
        """Peers that took part."""
        return 1 if self.info is None else self.info.world_size

    @property
    def contributors(self) -> int:
        """Peers whose pseudo-gradients were averaged."""
        return self.peers if self.weighty is None else self.weighty


class AsyncAverage:
    """An averaging in the background, which is launched again whenever a peer is lost."""

    def __init__(self, launch: Callable[[], Handle]) -> None:
        self._launch = launch
        self._handle: Handle | None = launch()
        self._retries = 0
        self._info: ReduceInfo | None = None
        self._error: PCCLError | None = None

    def poll(self) -> None:
        """Launches again if a peer was lost; waits for nobody."""
        while self._handle is not None and self._handle.done():
            self._end_attempt(self._handle)

    def wait(self) -> Average:
        """Waits for the end."""
        while self._handle is not None:
            self._end_attempt(self._handle)
        if self._error is not None:
            raise self._error
        return Average(self._info, self._retries)

    def drain(self) -> bool:
        """Waits until it uses the memory no more, however it ends.

        Returns whether others may have the mean: False only if it has certainly failed for all.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return self._info is not None
        committed, _, _ = handle.wait()
        certain = (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS)
        return committed or (handle.error is None or handle.error.result not in certain)

    def _end_attempt(self, handle: Handle) -> None:
        committed, _, info = handle.wait()
        self._handle = None
        if committed:
            self._info = info
            return
        error = handle.error
        assert error is not None
        if error.result is Result.TOO_FEW_PEERS:
            return
        if error.result is not Result.RANK_CONNECTION_LOST:
            self._error = error
            raise error
        _log.warning("a peer was lost, once more with the others: %s", error)
        self._retries += 1
        try:
            self._handle = self._launch()
        except PCCLError as refusal:
            if refusal.result is not Result.TOO_FEW_PEERS:
                self._error = refusal
                raise


class ConsistencyCheck:
    """Checks that all processes of a replica have a mean of the same contributors.

    Each process averages its shard with those of the same shard only, so a replica that is lost
    meanwhile may be in the mean of one shard and not in that of another. Numbers that each replica
    draws at random are averaged with its progress, and tell of whom a mean is. The processes of
    each replica compare them: if one of them is alone, all are, because replicas are lost as a
    whole; if the means differ, they are made once more. All replicas find the same.

    Attributes:
        sent: what is averaged together with the progress; nothing for a replica of one process.
        received: what the mean is written to.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []
        if replica.size > 1:
            drawn = [replica.first(secrets.randbits(48)) for _ in range(2)]  # sums fit 64 bits
            self.sent = [torch.tensor(drawn)]
            self.received = [torch.zeros_like(self.sent[0])]

    def verify(self, average: Average, again: Callable[[], Average]) -> Average:
        """The mean that all processes have."""
        if self._replica.size == 1:
            return average
        retries = average.retries
        while True:
            own = [average.peers, *self.received[0].tolist()]
            said = self._replica.exchange(own if average.info is not None else [1, 0, 0])
            if any(row[0] == 1 for row in said):
                return Average(None, retries)
            if all(row == own for row in said):
                return replace(average, retries=retries)
            _log.warning("a replica was lost, and is in the means of some shards: once more")
            average = again()
            retries += 1 + average.retries

    def all_launched(self, running: AsyncAverage | None) -> AsyncAverage:
        """It is under way for all of them, or for none.

        Raises:
            TooFewPeersError: this replica is alone, as one of its processes has found.
        """
        if self._replica.all(running is not None) and running is not None:
            return running
        if running is not None:
            running.wait()  # nobody else is left to take part in it
        raise TooFewPeersError(Result.TOO_FEW_PEERS, "launch", "this replica is alone")


class LedgerHooks:
    """Votes, settles and claims for a ledger.

    Args:
        ledger: None: there is none, and nothing happens.
        counted: whether a round may end before a peer has trained on all of its share.

    Attributes:
        counted: the same, if there is a ledger.
        votes: what the votes of all peers are added up in.
    """

    def __init__(self, ledger: Ledger | None, counted: bool) -> None:
        self._ledger = ledger
        self.counted = counted and ledger is not None
        self.votes: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        if ledger is not None:
            dtype = torch.int64 if counted else torch.uint8
            self.votes = [torch.zeros(ledger.peers_max, dtype=dtype)]

    @property
    def exist(self) -> bool:
        return self._ledger is not None

    def train(self, samples: int) -> None:
        """This peer has trained on `samples` more."""
        if self._ledger is not None and self.counted:
            self._ledger.train(samples)

    def vote(self, late: bool) -> list[torch.Tensor]:
        """The progress is about to be averaged; what travels with it.

        `late`: that of this peer is not in the mean.
        """
        if self._ledger is not None:
            self._own = [torch.from_numpy(self._ledger.vote(counted=self.counted, late=late))]
        return self._own

    def count_alone(self) -> None:
        """The mean is the progress of this peer, also if it came too late for one of others."""
        self.vote(late=False)
        for votes, own in zip(self.votes, self._own, strict=True):
            votes.copy_(own)

    def settle(self, applied: bool) -> None:
        """The mean is applied; or there is none, and the progress is the peer's own again."""
        if self._ledger is not None:
            votes: Any = self.votes[0].numpy()
            self._ledger.settle(votes if applied else None)

    def claim(self, comm: Communicator, wanted: int | None = None) -> None:
        """A round begins; all peers of the group are about to train."""
        if self._ledger is not None:
            self._ledger.claim(comm, wanted)

    def rejoin(self) -> bool:
        """The run has gone on without this peer; whether it may keep its progress.

        With a ledger others train on its samples, so it may not.
        """
        if self._ledger is not None:
            self._ledger.renew()
        return self._ledger is None

    def entries(self) -> list[TensorInfo]:
        """The entries that are equal on all peers."""
        return [] if self._ledger is None else self._ledger.entries()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state for a checkpoint."""
        return {} if self._ledger is None else {"ledger": torch.from_numpy(self._ledger.dump())}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of a DiLoCo whose ledger this one cannot take over."""
        if "ledger" not in state:
            return
        if self._ledger is None:
            raise ValueError("the state has a ledger of samples: give DiLoCo one, as ledger=")
        self._ledger.check(state["ledger"].numpy())

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state. If it has none, the ledger stays as it is."""
        if self._ledger is not None and "ledger" in state:
            self._ledger.restore(state["ledger"].numpy())


class Weight:
    """Counts the samples that are in a pseudo-gradient: those of all processes of its replica.

    Attributes:
        late: whether this peer came late to a deadline round: its progress weighs nothing in it.
    """

    def __init__(self, by: WeightBy, always: bool, replica: Replica) -> None:
        """`always`: there are weights even if all are the same, because a late peer has none."""
        self.late = False
        self._by = by
        self._always = always
        self._trained = 0  # since the base
        self._measured = 0  # of these, those in the pseudo-gradient
        self._weight = 0  # that, and what the replica's other processes say
        self._replica = replica

    def count(self, samples: int) -> None:
        """This peer has trained on `samples` more.

        Raises:
            ValueError: the number is negative.
        """
        if samples < 0:
            raise ValueError(f"samples={samples} must not be negative")
        self._trained += samples

    def measure(self) -> None:
        """The pseudo-gradient has all until now."""
        self._measured = self._weight = self._trained
        if self._by == "samples":
            self._weight = sum(said for (said,) in self._replica.exchange([self._measured]))

    def applied(self) -> None:
        """It is in a mean that is going to be applied."""
        if not self.late:
            self._trained -= self._measured

    def drop(self) -> None:
        """The progress is gone."""
        self._trained = 0

    @property
    def value(self) -> int | None:
        """Of the pseudo-gradient; None: that of all peers is the same."""
        if self.late:
            return 0
        if self._by == "samples":
            return self._weight
        return 1 if self._always else None


_ALIKE = 0.01  # a distance relative to the norm; that of two independent ones is 0.7 and more
TAG = 0xD110C0  # of what runs while the script trains, and may take collectives of its own


class Exchange:
    """The transfer from the model to the peers and back, in each outer round.

    d, with buffers="mean" the changes of the buffers, and with a ledger the votes are averaged by
    one collective of the averager, so that either everything is averaged or nothing. They do not
    change before its outcome is known, so that it can be repeated with the survivors.

    Attributes:
        averager: what averages.
        weight: what this peer's progress weighs.
        alike: whether all peers have sent the same; None until the first mean of several.
        measured: whether d was measured since the model was given theta.
        sent: whether a collective has begun with it since then.
    """

    def __init__(
        self,
        comm: Communicator,
        state: OuterState,
        buffers: Buffers,
        averager: Averager,
        weight: Weight,
        meter: Meter,
        ledger: LedgerHooks,
        replica: Replica,
    ) -> None:
        self._comm = comm
        self._replica = replica
        self._check = ConsistencyCheck(replica)
        self.averager = averager
        self.weight = weight
        self._state = state
        self._buffers = buffers
        self._meter = meter
        self._ledger = ledger
        self._moves: list[torch.Tensor] = []  # of the buffers
        self.measured = self.sent = False
        self.alike: bool | None = None
        self._loaded = False  # what the averager has, and no mean was applied that has it

    # ---- the model ----

    def measure(self) -> None:
        """Takes this peer's progress from the model."""
        self._state.measure()
        self._moves = self._buffers.measure()
        self.weight.measure()
        self.measured, self.sent = True, False

    def rescue(self) -> bool:
        """The run has gone on without this peer; whether d is progress that nobody else has.

        If a collective has begun with it, nobody can tell any more, and it counts as applied; but
        who was late has given nothing.
        """
        if self.sent and not self.weight.late:
            self.discard()
            return False
        if not self.measured:
            self.measure()
        return True

    def discard(self) -> None:
        """Others may have applied the mean that was last loaded: none of it is sent again."""
        if self._loaded:
            self._loaded = False
            self.weight.applied()
            self.averager.commit(0, own=self.weight.value != 0)

    def reclaim(self, keep: float = 1.0) -> None:
        """Gives it back to the model, or `keep` of it, because no mean will hold it."""
        self._state.reclaim(keep)
        self._buffers.reclaim(self._moves)
        self._ledger.settle(applied=False)

    def step(self, contributors: int) -> None:
        """Takes the outer step, by the mean of `contributors` peers."""
        self._state.step(contributors)
        self._ledger.settle(applied=True)
        self._buffers.advance()
        if self._buffers.mode == "first":
            self._buffers.gather()
            shared = self._buffers.shared
            if shared:
                self._until_committed(lambda: self._comm.broadcast(shared, root="first"))

    def adopt(self, keep: float = 0.0) -> None:
        """Gives the model what the peers have agreed on, and leaves it `keep` of its parameters."""
        self._replica.reshard()
        self._state.adopt(keep)
        self._buffers.adopt()
        self.measured = self.sent = False

    # ---- the peers ----

    def run(self) -> Average:
        """Averages the progress, and waits for the end."""
        self._load()
        with self._meter.timed("reduce"):
            average = self._check.verify(self._attempt(), self._attempt)
        self._meter.last_reduce = average.info or self._meter.last_reduce
        return self._counted(average)

    def launch(self) -> AsyncAverage:
        """Begins to average the progress in the background.

        Raises:
            PCCLError: TOO_FEW_PEERS: this peer is alone.
        """
        self._load()
        try:
            running: AsyncAverage | None = AsyncAverage(self._start)
        except TooFewPeersError:
            running = None
        return self._check.all_launched(running)

    def _load(self) -> None:
        self.sent = self._loaded = True
        votes = self._ledger.vote(self.weight.late)
        progress = [self._state.delta, *self._moves]
        beside = Votes(
            [*votes, *self._check.sent],
            [*self._ledger.votes, *self._check.received],
            self.weight.late,
        )
        self.averager.load(progress, self.weight.value, beside)

    def _attempt(self) -> Average:
        return self._until_committed(lambda: self.averager.run(self._comm, self._averaged))

    def _start(self) -> Handle:
        return self.averager.launch(self._comm, self._averaged, TAG)

    def wait(self, running: AsyncAverage) -> Average:
        """Waits for the end of what was launched."""
        with self._meter.timed("reduce"):
            average = self._check.verify(self._store(running), self._attempt)
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
        """The mean is going to be applied: that of a peer that was alone is its own progress."""
        self._loaded = False
        self.weight.applied()
        if average.info is not None:
            self.averager.commit(average.peers, own=self.weight.value != 0)
            return
        self._ledger.count_alone()
        for mean, own in zip(self._averaged, [self._state.delta, *self._moves], strict=True):
            mean.copy_(own)

    @property
    def outer_step(self) -> int:
        """k, the outer steps of these parameters."""
        return int(self._state.steps)

    @property
    def means(self) -> list[torch.Tensor]:
        """The destinations of an average, with the votes."""
        return [self._state.mean, *self._ledger.votes, *self._buffers.means]

    @property
    def _averaged(self) -> list[torch.Tensor]:
        return [self._state.mean, *self._buffers.means]

    def _until_committed(self, call: Callable[[], ReduceInfo]) -> Average:
        """Repeats a collective until it commits, or this peer is alone."""
        retries = 0
        while True:
            try:
                info = call()
            except PCCLError as error:
                if error.result is Result.TOO_FEW_PEERS:
                    return Average(None, retries)
                if error.result is not Result.RANK_CONNECTION_LOST:
                    raise
                _log.warning("a peer was lost, once more with the others: %s", error)
                retries += 1
            else:
                self._meter.count(info)
                return Average(info, retries)
