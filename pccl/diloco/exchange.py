"""What a round averages: taken from the model, exchanged until it commits, and given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from pccl import Communicator, PCCLError, ReduceInfo, Result, TooFewPeersError
from pccl.diloco.accounts import Accounts
from pccl.diloco.carriers import Carrier, Votes
from pccl.diloco.flight import Average, Flight
from pccl.diloco.meter import Meter
from pccl.diloco.model_state import Buffers
from pccl.diloco.outer_state import OuterState
from pccl.diloco.replica import Replica
from pccl.diloco.shares import Share
from pccl.diloco.witness import Witness

TAG = 0xD110C0  # of what runs while the script trains, and may take collectives of its own

_log = logging.getLogger("pccl.diloco")


class Exchange:
    """What goes from the model to the peers and back, in each outer round.

    d, with buffers="mean" the changes of the buffers, and with a ledger the votes are averaged by
    one collective of the carrier, so that either everything is averaged or nothing. They do not
    change before its outcome is known, so that it can be repeated with the survivors.

    Attributes:
        carrier: what averages.
        share: what this peer's progress weighs.
        measured: whether d was measured since the model was given theta.
        sent: whether a collective has begun with it since then.
    """

    def __init__(
        self,
        comm: Communicator,
        state: OuterState,
        buffers: Buffers,
        carrier: Carrier,
        share: Share,
        meter: Meter,
        accounts: Accounts,
        replica: Replica,
    ) -> None:
        self._comm = comm
        self._replica = replica
        self._witness = Witness(replica)
        self.carrier = carrier
        self.share = share
        self._state = state
        self._buffers = buffers
        self._meter = meter
        self._accounts = accounts
        self._moves: list[torch.Tensor] = []  # of the buffers
        self.measured = self.sent = False
        self._loaded = False  # what the carrier has, and no mean was applied that has it

    # ---- the model ----

    def measure(self) -> None:
        """Takes this peer's progress from the model."""
        self._state.measure()
        self._moves = self._buffers.measure()
        self.share.measure()
        self.measured, self.sent = True, False

    def rescue(self) -> bool:
        """The run has gone on without this peer; whether d is progress that nobody else has.

        If a collective has begun with it, nobody can tell any more, and it counts as applied; but
        who was late has given nothing.
        """
        if self.sent and not self.share.late:
            self.forgo()
            return False
        if not self.measured:
            self.measure()
        return True

    def forgo(self) -> None:
        """Others may have applied the mean that was last loaded: none of it is sent again."""
        if self._loaded:
            self._loaded = False
            self.share.applied()
            self.carrier.commit(0, own=self.share.weight != 0)

    def reclaim(self, keep: float = 1.0) -> None:
        """Gives it back to the model, or `keep` of it, because no mean will hold it."""
        self._state.reclaim(keep)
        self._buffers.reclaim(self._moves)
        self._accounts.settle(applied=False)

    def step(self, contributors: int) -> None:
        """Takes the outer step, by the mean of so many."""
        self._state.step(contributors)
        self._accounts.settle(applied=True)
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
            average = self._witness.judge(self._attempt(), self._attempt)
        self._meter.last_reduce = average.info or self._meter.last_reduce
        return self._counted(average)

    def launch(self) -> Flight:
        """Begins to average the progress in the background.

        Raises:
            PCCLError: TOO_FEW_PEERS: this peer is alone.
        """
        self._load()
        try:
            flight: Flight | None = self._take_off()
        except TooFewPeersError:
            flight = None
        return self._witness.launched(flight)

    def _load(self) -> None:
        self.sent = self._loaded = True
        votes = self._accounts.vote(self.share.late)
        progress = [self._state.delta, *self._moves]
        beside = Votes(
            [*votes, *self._witness.sent],
            [*self._accounts.votes, *self._witness.received],
            self.share.late,
        )
        self.carrier.load(progress, self.share.weight, beside)

    def _attempt(self) -> Average:
        return self._until_committed(lambda: self.carrier.run(self._comm, self._averaged))

    def _take_off(self) -> Flight:
        return Flight(lambda: self.carrier.launch(self._comm, self._averaged, TAG))

    def land(self, flight: Flight) -> Average:
        """Waits for the end of what was launched."""
        with self._meter.timed("reduce"):
            average = self._witness.judge(self._unload(flight), self._attempt)
        self._meter.last_reduce = average.info or self._meter.last_reduce
        return self._counted(average)

    def _unload(self, flight: Flight) -> Average:
        average = flight.land()
        if average.info is not None:
            self.carrier.unload(self._averaged)
            self._meter.count(average.info)
        return average

    def _counted(self, average: Average) -> Average:
        if average.info is None:
            return replace(average, weighty=None, late=0)
        total = self.carrier.total
        return replace(average, weighty=total.contributors, late=total.late)

    def accept(self, average: Average) -> None:
        """The mean is going to be applied: that of a peer that was alone is its own progress."""
        self._loaded = False
        self.share.applied()
        if average.info is not None:
            self.carrier.commit(average.peers, own=self.share.weight != 0)
            return
        self._accounts.count_alone()
        for mean, own in zip(self._averaged, [self._state.delta, *self._moves], strict=True):
            mean.copy_(own)

    @property
    def outer_step(self) -> int:
        """k, the outer steps of these parameters."""
        return int(self._state.steps)

    @property
    def means(self) -> list[torch.Tensor]:
        """What an average is written to, and the votes with it."""
        return [self._state.mean, *self._accounts.votes, *self._buffers.means]

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
