"""The schedule of all modes: when each fragment of the model is averaged, and its mean applied.

docs/internals/diloco.md has the equations, the calls of a meeting, and what happens when a peer is
lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pccl import SharedState, TensorInfo, TooFewPeersError
from pccl.diloco.exchange import AsyncAverage, Average, Exchange
from pccl.diloco.membership import Group
from pccl.diloco.outer import View
from pccl.diloco.pace import Pace
from pccl.diloco.settings import Settings
from pccl.diloco.stats import Outcome


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model."""

    number: int  # 0 for the first fragment that is due
    exchange: Exchange
    shared: SharedState
    view: View


@dataclass(frozen=True, slots=True)
class _Mean:
    average: Average
    suffices: bool  # to be applied
    short: int = 0  # its peers, if the group waits for more


class Schedule:
    """Averages one fragment at a time.

    `_overlap` is None if a mean is applied when the progress of the next round is measured.
    """

    group: Group  # set before the first round; its shared state has the `entries`

    def __init__(self, fragments: Sequence[Fragment], pace: Pace, settings: Settings) -> None:
        self._fragments = fragments
        self._pace = pace
        self._overlap = None if settings.mode == "delayed" else settings.overlap
        self._alpha = settings.alpha
        self._late_decay = settings.late_decay
        self._current = fragments[0]  # the fragment of the last launch
        self._running: AsyncAverage | None = None
        self._mean: _Mean | None = None
        self._short = 0  # peers of the last mean, if the next meeting waits for others first
        self._unchecked: Fragment | None = None  # the fragment of the last applied mean
        self._stepped = True  # whether that mean was applied
        self._turn = torch.zeros(1, dtype=torch.int64)  # completed rounds
        # in rounds: the minimum of `progress`, which even a meeting without an outer step raises
        self._reached = torch.zeros(1, dtype=torch.int64)
        # contributors to the mean that newcomers receive; 0: none
        self._contributors = torch.zeros(1, dtype=torch.int64)

    @property
    def _restarts(self) -> bool:
        """True if training starts from theta again when a mean is launched."""
        return self._overlap is None

    # ---- progress ----

    def progress(self, inner_step: int, outer_steps: int) -> float:
        """The progress of a run of `outer_steps`, after `inner_step` inner steps of a round."""
        reached = max(int(self._reached), self._position(inner_step))
        late = 1.0 if self._overlap is None else self._pace.fraction(self._overlap)
        return min(1.0, reached / (outer_steps * len(self._fragments) + late))

    def _position(self, inner_step: int) -> float:
        """The progress in rounds, computed only from values that are equal on all peers."""
        applied = sum(fragment.exchange.outer_step for fragment in self._fragments)
        behind = self._under_way or self._contributors[0] > 0
        return applied + int(behind) + self._pace.fraction(inner_step)

    @property
    def _under_way(self) -> bool:
        return self._running is not None or self._mean is not None

    @property
    def next_fragment(self) -> int:
        """The number of the fragment that is due at the end of this round."""
        return int(self._turn) % len(self._fragments)

    # ---- the steps of a round ----

    def begin(self) -> None:
        for fragment in self._fragments:
            fragment.view.reset()

    def arrives(self, inner_step: int) -> bool:
        """True if `arrive` must be called after this inner step of a round; the first is 1."""
        return self._under_way and inner_step == self._overlap

    def poll(self) -> None:
        """Keeps background work going; called after all other inner steps."""
        if self._running is not None:
            self._running.poll()

    def arrive(self) -> Outcome | None:
        """Applies the mean in progress, if there is one; does not wait for other peers."""
        mean = self._take()
        if mean is None:
            return None
        exchange = self._current.exchange
        self._stepped = mean.suffices
        if mean.suffices:
            exchange.step(mean.average.contributors)
            self._unchecked = self._current
            self._follow(self._current)
        else:
            exchange.keep()
            self._short = mean.short
        return None if mean.short else self._outcome(mean.average)

    def meet(self) -> Outcome | None:
        """Ends a round: averages its fragment, or launches the averaging and returns None."""
        short, self._short = self._short, 0
        if short:
            self._announce(None)
            self.group.wait_for_others(self._current.exchange.outer_step, short)
        self._reached[0] = max(int(self._reached), int(self._position(0)) + 1)
        self._enter(patient=short > 0)
        arrived = self._take() if self._restarts else None
        if arrived is not None and not arrived.suffices:
            self._give_back()
            if arrived.short:
                self._short = arrived.short
                return self.meet()
        outcome = None if self._restarts else self.arrive()
        self._current = self._fragments[self.next_fragment]
        exchange = self._current.exchange
        self._measure(exchange)
        exchange.vet()
        if self._overlap == 0:
            return self._average_now()
        if self._restarts:
            outcome = self._step_late(arrived)
        pending = self.group.are_pending()
        if pending and not self._restarts:
            return self._average_now(pending)
        self._turn += 1
        if outcome is not None and pending:
            self._hand_over()
            return replace(outcome, admitted=True)
        if self._unchecked is not None:  # all peers must have applied the same mean
            self.group.agree(admitted=False, changed=self._unchecked.shared)
            self._unchecked = None
        self._launch()
        return outcome

    def _enter(self, patient: bool) -> None:
        self.group.arrive(patient)

    def _measure(self, exchange: Exchange) -> None:
        exchange.weight.late = self._pace.late
        exchange.measure()

    def _average_now(self, pending: bool = False) -> Outcome | None:
        """Computes a mean and applies it; admits newcomers."""
        exchange = self._current.exchange
        mean = self._run()
        if mean.short:
            self._short = mean.short
            return self.meet()
        self._stepped = mean.suffices
        if mean.suffices:
            exchange.step(mean.average.contributors)
        pending = pending or self.group.are_pending()
        if pending:
            self.group.admit()
        self._turn += 1
        if mean.suffices or pending:
            self.group.agree(pending, None if self._unchecked else self._current.shared)
            self._unchecked = None
        if mean.suffices:
            self._adopt(self._current)
        else:
            exchange.keep()
        return self._outcome(mean.average, admitted=pending)

    def _step_late(self, mean: _Mean | None) -> Outcome:
        """Applies the mean of the last round, after the measurement of this round's progress."""
        current = self._current
        applied = mean is not None and mean.suffices
        contributors = mean.average.contributors if mean is not None and applied else 0
        if applied:
            current.exchange.step(contributors)
            self._unchecked = current
        current.view.look_ahead(applied, own=current.exchange.weight.value != 0)
        retries = mean.average.retries if mean is not None else 0
        return Outcome(contributors, retries, admitted=False)

    def _hand_over(self) -> None:
        """Computes a mean that newcomers receive, and that all apply in the next meeting."""
        mean = self._run()
        self._mean = mean if mean.suffices else None
        self.group.admit()
        self._announce(self._mean)
        self.group.agree(admitted=True)
        self._unchecked = None
        if self._mean is not None:
            self._adopt(self._current)
        else:
            self._keep_progress()

    # ---- means ----

    def _on_time(self) -> None:
        """Counts this peer as on time, because no peer has waited for it."""
        self._pace.late = self._current.exchange.weight.late = False

    def _run(self) -> _Mean:
        """Averages in the foreground, including late peers if too few others have contributed."""
        exchange = self._current.exchange
        average = exchange.run()
        if self.group.lacks_the_late(average):  # all peers find the same
            self._on_time()
            again = exchange.run()
            average = replace(again, retries=again.retries + average.retries)
        if average.info is None:
            self._on_time()
        return self._assess(average)

    def _launch(self) -> None:
        exchange = self._current.exchange
        try:
            self._running = exchange.launch()
        except TooFewPeersError:
            self._on_time()
            self._mean = self._assess(Average(None, 0))
        if self._restarts and self._mean is not None and not self._mean.suffices:
            self._short = self._mean.short
            self._mean = None
            self._keep_progress()
        elif self._restarts:
            self._adopt(self._current)

    def _take(self) -> _Mean | None:
        """Waits for the mean in progress, and removes it; None if there is none."""
        self._wait()
        mean, self._mean = self._mean, None
        if mean is None and self._contributors[0]:  # this is a newcomer's first round
            received = Average(None, 0, weighty=int(self._contributors[0]))
            mean = _Mean(received, suffices=True)
        self._contributors[0] = 0
        return mean

    def _wait(self) -> None:
        if self._running is not None:
            average = self._current.exchange.wait(self._running)
            self._mean, self._running = self._assess(average), None

    def _assess(self, average: Average) -> _Mean:
        exchange = self._current.exchange
        weight = exchange.weight
        is_empty = average.info is None and (weight.late or weight.excluded)
        suffices = self.group.suffices(average, exchange.outer_step) and not is_empty
        if suffices:
            exchange.accept(average)
        waits = not suffices and self.group.waits(average.peers)
        return _Mean(average, suffices, average.peers if waits else 0)

    def _outcome(self, average: Average, admitted: bool = False) -> Outcome:
        return Outcome(average.contributors, average.retries, admitted, self._current.number)

    # ---- the model ----

    def _adopt(self, fragment: Fragment) -> None:
        """Copies theta to the model. A late peer also keeps its own progress."""
        weight = fragment.exchange.weight
        if not self._restarts:
            fragment.view.reset()
        fragment.exchange.adopt(0.0 if weight.excluded else self._alpha)
        if weight.late:
            fragment.exchange.reclaim((1 - self._alpha) * self._late_decay)

    def _follow(self, fragment: Fragment) -> None:
        """Applies a mean some inner steps after its launch, and keeps the progress since then."""
        exchange = fragment.exchange
        if exchange.weight.excluded or exchange.weight.late:
            self._adopt(fragment)
        else:
            exchange.rebase(counted=True, keep=self._alpha)
            exchange.measured = exchange.sent = False

    def _give_back(self) -> None:
        """Returns the progress of a failed mean to the model."""
        if not self._current.exchange.weight.late:  # a late peer's model has it
            self._current.exchange.reclaim()
        self._current.view.rebase()

    def _keep_progress(self) -> None:
        """Sets the model to theta with this peer's own progress."""
        self._current.view.reset()
        self._current.exchange.adopt()
        self._current.exchange.reclaim()

    def _announce(self, mean: _Mean | None) -> None:
        self._contributors[0] = mean.average.contributors if mean is not None else 0
        if mean is None and self._restarts:
            for tensor in self._current.exchange.means:
                tensor.zero_()

    def rescue(self) -> list[Exchange]:
        """Ends background work after the run has continued without this peer, and returns the
        exchanges that hold progress for the next mean."""
        running = self._running
        if running is not None and running.drain():
            self._current.exchange.discard()
        elif running is not None and self._restarts:
            self._give_back()
        elif running is not None:
            self._current.exchange.keep()
        self._running, self._mean, self._short, self._unchecked = None, None, 0, None
        return [each.exchange for each in self._fragments if each.exchange.rescue()]

    def resume(self, rescued: Sequence[Exchange], keep: bool) -> None:
        """Copies the received theta to the model, with the rescued progress if that is kept."""
        self.begin()
        for fragment in self._fragments:
            fragment.exchange.adopt()
            fragment.exchange.ledger.renewed()
            if keep and fragment.exchange in rescued:
                fragment.exchange.reclaim(self._late_decay)

    def finish(self) -> None:
        """Applies the mean in progress. The model becomes theta, unless this peer had no mean."""
        mean = self._take()
        if mean is not None:
            self._stepped = mean.suffices
            if mean.suffices:
                self._current.exchange.step(mean.average.contributors)
            elif self._restarts:
                self._give_back()
        elif self._restarts or (self._overlap, self._alpha, len(self._fragments)) == (0, 0.0, 1):
            return
        if self._stepped:
            for fragment in self._fragments:
                fragment.view.reset()
                fragment.exchange.adopt()

    # ---- its state ----

    def entries(self) -> list[TensorInfo]:
        """The shared-state entries, besides theta, v and k, that a newcomer needs."""
        own = [
            TensorInfo.from_torch(self._reached, "diloco.reached"),
            TensorInfo.from_torch(self._turn, "diloco.turn"),
            *self._pace.entries(),
        ]
        if self._restarts:
            means = enumerate(self._current.exchange.means)
            own += [
                TensorInfo.from_torch(self._contributors, "diloco.delayed.contributors"),
                *(TensorInfo.from_torch(mean, f"diloco.delayed.mean.{i}") for i, mean in means),
            ]
        return own

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; in modes that restart, waits for the mean in progress."""
        state: dict[str, Any] = {"turn": int(self._turn)}
        if self._restarts:
            self._wait()
            mean = self._mean
            contributors = int(self._contributors[0])
            if mean is not None:
                contributors = mean.average.contributors if mean.suffices else 0
            means = self._current.exchange.means if contributors else []
            state |= {"contributors": contributors, "means": means}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        self._turn[0] = state.get("turn", 0)
        if self._restarts:
            self._contributors[0] = state.get("contributors", 0)
            # the saved run may have had another `buffers`, and so more or fewer means
            own = self._current.exchange.means
            for tensor, saved in zip(own, state.get("means", []), strict=False):
                tensor.copy_(saved)
