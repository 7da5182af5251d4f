"""The modes, one class each: when a round averages, and when its mean is applied.

docs/internals/diloco.md has their equations, and says what happens when a peer is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pccl import PCCLError, Result, SharedState, TensorInfo
from pccl.diloco.exchange import AsyncAverage, Average, Exchange
from pccl.diloco.membership import Group
from pccl.diloco.outer import View
from pccl.diloco.pace import Pace
from pccl.diloco.stats import Outcome


class Schedule(ABC):
    """The interface of a mode to the trainer."""

    def __init__(self) -> None:
        # in rounds: the least `progress`, which a round without an outer step raises too
        self._reached = torch.zeros(1, dtype=torch.int64)

    def progress(self, inner_step: int, outer_steps: int) -> float:
        """The progress of a run of `outer_steps`, after `inner_step` inner steps since a round."""
        reached = max(int(self._reached), self._position(inner_step))
        return min(1.0, reached / self._rounds(outer_steps))

    @abstractmethod
    def _position(self, inner_step: int) -> float:
        """The progress in rounds, computed only from what all peers have in common."""

    def _rounds(self, outer_steps: int) -> int:
        return outer_steps

    def _begin_round(self) -> None:
        """Raises the least progress to the end of this round; all peers of the group do."""
        self._reached[0] = max(int(self._reached), int(self._position(0)) + 1)

    def begin(self) -> int:
        """Starts from the received shared state. Returns the inner step this peer goes on at."""
        return 0

    @abstractmethod
    def due(self, inner_step: int) -> bool:
        """True if `round` must be called after this inner step; the first step is 1."""

    def poll(self) -> None:
        """Keeps background work going; called after inner steps at which no round is due."""

    @abstractmethod
    def round(self, group: Group, inner_step: int) -> Outcome | None:
        """Runs an outer round, or one of its parts: all but the last return None."""

    def rescue(self) -> bool:
        """Ends background work after the run has gone on without this peer.

        Returns whether the exchange holds progress for the next round.
        """
        return False

    def finish(self, group: Group) -> None:
        """Applies the mean that is under way, at the end of the training."""

    def entries(self) -> list[TensorInfo]:
        """Shared-state entries beside theta, v and k that a newcomer needs to be in phase."""
        return [TensorInfo.from_torch(self._reached, "diloco.reached")]

    def state_dict(self, group: Group) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads such a state."""


class Synchronous(Schedule):
    """Averages the progress of a round and applies the mean at its end."""

    def __init__(self, exchange: Exchange, pace: Pace, late_decay: float) -> None:
        super().__init__()
        self._exchange = exchange
        self._pace = pace
        self._late_decay = late_decay

    def _position(self, inner_step: int) -> float:
        return self._exchange.outer_step + self._pace.fraction(inner_step)

    def due(self, inner_step: int) -> bool:
        return self._pace.due(inner_step)

    def round(self, group: Group, inner_step: int) -> Outcome:
        self._begin_round()
        exchange = self._exchange
        exchange.weight.late = self._pace.late
        exchange.measure()
        group.arrive(self._pace)
        retries = 0
        while True:
            average = exchange.run()
            retries += average.retries
            if group.lacks_the_late(average):  # as all peers find: averages again, with the late
                self._pace.late = exchange.weight.late = False
                average = exchange.run()
                retries += average.retries
            stepped = group.suffices(average, exchange.outer_step)
            if stepped or not group.waits(average.peers):
                break
            group.wait_for_others(exchange.outer_step, average.peers)
        if average.info is None:
            self._pace.late = exchange.weight.late = False  # this peer was alone: nobody waited
        if stepped:
            exchange.accept(average)
            exchange.step(average.contributors)
        admitted = group.are_pending()
        if admitted:
            group.admit()
        if stepped or admitted:
            group.agree(admitted)
        if stepped:
            exchange.adopt()
            if exchange.weight.late:
                exchange.reclaim(self._late_decay)
        return Outcome(average.contributors, retries, admitted)

    def rescue(self) -> bool:
        return self._exchange.rescue()

    def entries(self) -> list[TensorInfo]:
        return [*super().entries(), *self._pace.entries()]


@dataclass(frozen=True, slots=True)
class _Mean:
    """The result of an averaging, whether it is applied, and whether the group waits for peers."""

    average: Average
    suffices: bool
    waits: bool = False

    @property
    def contributors(self) -> int:
        return self.average.contributors


class Delayed(Schedule):
    """Averages the progress of a round while the next one trains, and applies the mean after that.

    With the view `Eager` this is mode "eager".

    A newcomer is not in the mean under way, and without it would be out of phase. So when peers are
    pending, a round averages in the foreground, then admits them, and they receive that mean. All
    peers make the same sequence of calls in every round: only outcomes that are equal on all of
    them decide it (are peers pending? did a mean commit, of how many?).
    """

    def __init__(self, exchange: Exchange, pace: Pace, view: View, late_decay: float) -> None:
        super().__init__()
        self._exchange = exchange
        self._pace = pace
        self._view = view
        self._late_decay = late_decay
        self._running: AsyncAverage | None = None
        self._mean: _Mean | None = None
        self._alone = False  # whether the last launch found no other peer
        # contributors of the mean that newcomers receive; 0: there is none
        self._contributors = torch.zeros(1, dtype=torch.int64)

    def _position(self, inner_step: int) -> float:
        behind = self._running is not None or self._mean is not None or self._contributors[0] > 0
        return self._exchange.outer_step + int(behind) + self._pace.fraction(inner_step)

    def _rounds(self, outer_steps: int) -> int:
        return outer_steps + 1  # the first has no mean to apply

    def begin(self) -> int:
        self._view.reset()
        return 0

    def due(self, inner_step: int) -> bool:
        return self._pace.due(inner_step)

    def poll(self) -> None:
        if self._running is not None:
            self._running.poll()

    def round(self, group: Group, inner_step: int) -> Outcome:
        """Applies the mean of the last round, and launches that of this round."""
        self._begin_round()
        group.arrive(self._pace)
        mean = self._take(group)
        if mean is not None and not mean.suffices:
            self._give_back()
        late = self._exchange.weight.late = self._pace.late
        self._exchange.measure()
        stepped = mean is not None and mean.suffices
        contributors = mean.contributors if mean is not None and stepped else 0
        if stepped:
            self._exchange.step(contributors)
        self._view.look_ahead(stepped, contributors or group.size, late)
        if (self._alone and group.waits(1)) or (mean is not None and mean.waits):
            self._announce(None)
            here = mean.average.peers if mean is not None else 1
            group.wait_for_others(self._exchange.outer_step, here)
        self._alone = False
        admitted = self._depart(group, stepped)
        return Outcome(
            contributors=contributors,
            retries=mean.average.retries if mean is not None else 0,
            admitted=admitted,
        )

    def rescue(self) -> bool:
        running, self._running = self._running, None
        if running is not None and running.drain():
            self._exchange.discard()
        elif running is not None:
            self._give_back()
        self._mean = None
        return self._exchange.rescue()

    def finish(self, group: Group) -> None:
        """Applies the mean of the last round; if there is none, this peer keeps its progress."""
        mean = self._take(group)
        if mean is not None and mean.suffices:
            self._exchange.step(mean.contributors)
            self._view.reset()
            self._exchange.adopt()
        elif mean is not None:
            self._give_back()

    def _take(self, group: Group) -> _Mean | None:
        """The mean to apply; None if the last round launched nothing."""
        self._wait(group)
        mean, self._mean = self._mean, None
        if mean is None and self._contributors[0]:  # this is a newcomer's first round
            received = Average(None, 0, weighty=int(self._contributors[0]))
            mean = _Mean(received, suffices=True)
        self._contributors[0] = 0
        return mean

    def _wait(self, group: Group) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self._mean = self._assess(group, self._exchange.wait(running))

    def _assess(self, group: Group, average: Average) -> _Mean:
        is_empty = average.info is None and self._exchange.weight.late  # alone, with weight 0
        suffices = group.suffices(average, self._exchange.outer_step) and not is_empty
        if suffices:
            self._exchange.accept(average)
        return _Mean(average, suffices, group.waits(average.peers))

    def _depart(self, group: Group, stepped: bool) -> bool:
        """Launches the mean of this round, or admits newcomers; returns whether it admitted any."""
        if not group.are_pending():
            if stepped:
                group.agree(admitted=False)
            self._launch(group)
            return False
        mean = self._assess(group, self._exchange.run())
        self._mean = mean if mean.suffices else None
        group.admit()
        self._announce(self._mean)
        group.agree(admitted=True)
        if self._mean is not None:
            self._adopt()
        else:
            self._keep_progress()
        return True

    def _launch(self, group: Group) -> None:
        """Launches, unless this peer is alone."""
        try:
            self._running = self._exchange.launch()
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            self._pace.late = self._exchange.weight.late = False  # nobody waited for it
            self._mean = self._assess(group, Average(None, 0))
            if not self._mean.suffices:
                self._alone = True
                self._mean = None
                self._keep_progress()
                return
        self._adopt()

    def _adopt(self) -> None:
        """The model becomes theta; that of a late peer also keeps its progress."""
        self._exchange.adopt()
        if self._exchange.weight.late:
            self._exchange.reclaim(self._late_decay)

    def _give_back(self) -> None:
        """Gives the progress of a failed mean back to the model."""
        if not self._exchange.weight.late:  # a late peer's model has it
            self._exchange.reclaim()
        self._view.rebase()

    def _keep_progress(self) -> None:
        """The model becomes theta with this peer's own progress."""
        self._view.reset()
        self._exchange.adopt()
        self._exchange.reclaim()

    def _announce(self, mean: _Mean | None) -> None:
        """Writes the mean that newcomers receive."""
        self._contributors[0] = mean.contributors if mean is not None else 0
        if mean is None:
            for tensor in self._exchange.means:
                tensor.zero_()

    def entries(self) -> list[TensorInfo]:
        return [
            *super().entries(),
            *self._pace.entries(),
            TensorInfo.from_torch(self._contributors, "diloco.delayed.contributors"),
            *(
                TensorInfo.from_torch(tensor, f"diloco.delayed.mean.{i}")
                for i, tensor in enumerate(self._exchange.means)
            ),
        ]

    def state_dict(self, group: Group) -> dict[str, Any]:
        """Waits for the mean that is being averaged."""
        self._wait(group)
        mean = self._mean
        contributors = int(self._contributors[0])
        if mean is not None:
            contributors = mean.contributors if mean.suffices else 0
        means = self._exchange.means if contributors else []
        return {"contributors": contributors, "means": [tensor.clone() for tensor in means]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._contributors[0] = state.get("contributors", 0)
        # the saved run may have had another `buffers`, and so more or fewer means
        for tensor, saved in zip(self._exchange.means, state.get("means", []), strict=False):
            tensor.copy_(saved)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model.

    Attributes:
        exchange: of its parameters.
        shared: the state of it that all peers share.
    """

    exchange: Exchange
    shared: SharedState


class Streaming(Schedule):
    """Averages each fragment once in H inner steps, and applies its mean tau inner steps later.

    At most one mean is under way, because tau < floor(H / P). Newcomers are admitted where a
    fragment is due: it is averaged and applied in the foreground, so nothing is under way then, and
    all peers reach the next fragment together.
    """

    def __init__(
        self, fragments: Sequence[Fragment], inner_steps: int, overlap: int, alpha: float
    ) -> None:
        super().__init__()
        self._fragments = fragments
        self._overlap = overlap
        self._alpha = alpha
        count = len(fragments)
        self._launches = {(p + 1) * inner_steps // count: p for p in range(count)}
        self._arrivals = {(at - 1 + overlap) % inner_steps + 1 for at in self._launches}
        self._first = min(self._launches) + overlap  # the first arrival
        self._inner_step = torch.zeros(1, dtype=torch.int64)
        self._inner_steps = inner_steps
        self._current = fragments[-1]  # of the last launch
        self._running: AsyncAverage | None = None
        self._average: Average | None = None
        self._stepped = True  # in the last round

    def begin(self) -> int:
        return int(self._inner_step)

    def _position(self, inner_step: int) -> float:
        applied = sum(fragment.exchange.outer_step for fragment in self._fragments)
        if not applied:
            return min(1.0, inner_step / self._first)
        cycle = self._inner_steps
        since = min((inner_step - at) % cycle for at in self._arrivals)
        until = min((at - inner_step - 1) % cycle + 1 for at in self._arrivals)
        return applied + since / (since + until)

    def _rounds(self, outer_steps: int) -> int:
        return outer_steps * len(self._fragments)

    def due(self, inner_step: int) -> bool:
        under_way = self._running is not None or self._average is not None
        return inner_step in (self._arrivals if under_way else self._launches)

    def poll(self) -> None:
        if self._running is not None:
            self._running.poll()

    def round(self, group: Group, inner_step: int) -> Outcome | None:
        """Launches a fragment and returns None, or applies its mean."""
        self._inner_step[0] = inner_step % self._inner_steps
        average = self._wait()
        if average is not None:
            self._average = None
            return self._settle(group, average, pending=False)
        self._current = self._fragments[self._launches[inner_step]]
        pending = group.are_pending()
        exchange = self._current.exchange
        exchange.measure()
        if pending or not self._overlap:
            return self._settle(group, exchange.run(), pending)
        self._launch()
        return None

    def _launch(self) -> None:
        try:
            self._running = self._current.exchange.launch()
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            self._average = Average(None, 0)

    def _wait(self) -> Average | None:
        """The mean to apply; None if nothing was launched."""
        if self._running is not None:
            running, self._running = self._running, None
            self._average = self._current.exchange.wait(running)
        return self._average

    def _settle(self, group: Group, average: Average, pending: bool) -> Outcome:
        """Takes the outer step, and admits newcomers."""
        self._begin_round()
        exchange = self._current.exchange
        stepped = self._stepped = self._apply(group, average)
        admitted = pending
        if pending:
            group.admit()
        if stepped or pending:
            group.agree(pending, self._current.shared)
        elif group.waits(average.peers):
            group.wait_for_others(exchange.outer_step, average.peers)
            admitted = True
        if stepped:
            exchange.adopt(self._alpha)
        fragment = self._fragments.index(self._current)
        return Outcome(average.contributors, average.retries, admitted, fragment)

    def _apply(self, group: Group, average: Average) -> bool:
        exchange = self._current.exchange
        if not group.suffices(average, exchange.outer_step):
            return False
        exchange.accept(average)
        exchange.step(average.contributors)
        return True

    def finish(self, group: Group) -> None:
        """Applies the mean under way. The model becomes theta, unless this peer had no mean."""
        average = self._wait()
        if average is not None:
            self._average = None
            self._stepped = self._apply(group, average)
        if self._stepped:
            for fragment in self._fragments:
                fragment.exchange.adopt()

    def entries(self) -> list[TensorInfo]:
        position = TensorInfo.from_torch(self._inner_step, "diloco.streaming.position")
        return [*super().entries(), position]

    def state_dict(self, group: Group) -> dict[str, Any]:
        return {"position": int(self._inner_step), "inner_steps": self._inner_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the position, if the saved run had the same `inner_steps`."""
        same = state.get("inner_steps") == self._inner_steps
        self._inner_step[0] = state["position"] if same else 0
