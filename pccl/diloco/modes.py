"""When a round averages, and when what it has averaged is applied: one class for each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pccl import PCCLError, Result, SharedState, TensorInfo
from pccl.diloco.exchange import AsyncAverage, Average, Exchange
from pccl.diloco.group import Group
from pccl.diloco.outer import View
from pccl.diloco.pace import Pace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round reports: the contributors of the mean that it has applied, retries, admission.

    Attributes:
        contributors: peers in the mean that was applied; 0 if there was none.
        retries: failed attempts to average it.
        admitted: whether newcomers were admitted.
        fragment: which part of the model the mean is of.
        rejoined: whether the run has gone on without this peer, which has joined it once more.
    """

    contributors: int
    retries: int
    admitted: bool
    fragment: int = 0
    rejoined: bool = False


class Schedule(Protocol):
    """What a trainer asks of a mode."""

    def begin(self) -> int:
        """The shared state has been received. Returns at which inner step this peer goes on."""

    def due(self, inner_step: int) -> bool:
        """Whether `round` is to be called after this inner step, the first of which is 1."""

    def poll(self) -> None:
        """Cares for what runs in the background; called after each other inner step."""

    def round(self, group: Group, inner_step: int) -> Outcome | None:
        """An outer round, or a part of it: None before the last one."""

    def rescue(self) -> bool:
        """The run has gone on without this peer, and nothing is under way any more.

        Whether the exchange has the progress since the last round, for the next one.
        """

    def finish(self, group: Group) -> None:
        """Applies what is still under way, at the end of the training."""

    def entries(self) -> list[TensorInfo]:
        """What a newcomer must receive to be in phase, beside theta, v and k."""

    def state_dict(self, group: Group) -> dict[str, Any]:
        """The same, for a checkpoint."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state."""


class Synchronous:
    """Averages the progress of a round and applies the mean at its end. A newcomer needs no more
    than theta, v and k.

    The progress of a peer that comes late to a deadline round weighs nothing; the peer keeps it,
    beside theta, for the next round. If so many are late that too few would be in the mean, it is
    made once more of all, as far as they have come.
    """

    def __init__(self, exchange: Exchange, pace: Pace, late_decay: float) -> None:
        self._exchange = exchange
        self._pace = pace
        self._late_decay = late_decay

    def begin(self) -> int:
        """It goes on with the first one."""
        return 0

    def due(self, inner_step: int) -> bool:
        """As its pace has it."""
        return self._pace.due(inner_step)

    def poll(self) -> None:
        """Nothing runs in the background."""

    def round(self, group: Group, inner_step: int) -> Outcome:
        """Averages, and takes the outer step."""
        exchange = self._exchange
        exchange.share.late = self._pace.late
        exchange.measure()
        group.arrive(self._pace)
        retries = 0
        while True:
            average = exchange.run()
            retries += average.retries
            if group.lacks_the_late(average):  # all have found the same
                self._pace.late = exchange.share.late = False
                average = exchange.run()
                retries += average.retries
            stepped = group.suffices(average, exchange.outer_step)
            if stepped or not group.waits(average.peers):
                break
            group.wait_for_others(exchange.outer_step, average.peers)
        if average.info is None:
            self._pace.late = exchange.share.late = False  # for nobody
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
            if exchange.share.late:
                exchange.reclaim(self._late_decay)
        return Outcome(average.contributors, retries, admitted)

    def rescue(self) -> bool:
        """That of the round which has failed, unless others may have had it."""
        return self._exchange.rescue()

    def finish(self, group: Group) -> None:
        """Nothing is under way."""

    def entries(self) -> list[TensorInfo]:
        """How long rounds have taken."""
        return self._pace.entries()

    def state_dict(self, group: Group) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class _Landed:
    """A mean that waits to be applied, or why there is none."""

    contributors: int
    retries: int
    suffices: bool
    waits: bool = False  # the group, for others
    peers: int = 0


class Delayed:
    """Averages the progress of a round while the next one trains, and applies the mean after that.

    This is mode "delayed", and with the view `Eager` mode "eager".

        d(k) = theta(k) - w                       measured before theta moves
        D(k-1)                                    awaited: it was launched a round ago
        v(k+1), theta(k+1) = OuterOptimizer(v(k), theta(k), D(k-1))
        w <- theta(k+1);  launch the mean of d(k), which is D(k)

    The first round has no D and moves nothing. (The one-step-delayed form of DiLoCo, as PCCL's
    example of asynchronous DiLoCo has it.)

    A newcomer has no d(k), so it cannot be a contributor of D(k), and would be out of phase without
    it. Therefore a round in which peers are pending does not launch: its members average d(k) at
    once, then admit, and the newcomer receives D(k) with theta(k+1), v(k+1) and k + 1. All of them
    train the next round from theta(k+1) and have D(k) at its end; from there on the newcomer
    contributes in full.

    When a peer is lost, the survivors launch once more at their next inner steps. If no mean comes
    of it, because too few are left, d goes back into w: no progress is lost, and it is in the next
    pseudo-gradient. All peers have one sequence of calls in every round, and what decides about it
    is the outcome of one of them: are peers pending? did a mean commit, of how many?

    The d of a peer that comes late to a deadline round weighs nothing; the peer keeps it, beside
    theta, for the next round. A mean of too few, because others were late, is not applied: all keep
    their d.
    """

    def __init__(self, exchange: Exchange, pace: Pace, view: View, late_decay: float) -> None:
        self._exchange = exchange
        self._pace = pace
        self._view = view
        self._late_decay = late_decay
        self._flight: AsyncAverage | None = None
        self._landed: _Landed | None = None
        self._alone = False  # when there was something to launch
        # Contributors of the mean that newcomers receive; 0: there is none.
        self._contributors = torch.zeros(1, dtype=torch.int64)

    def begin(self) -> int:
        """This peer trains from theta."""
        self._view.reset()
        return 0

    def due(self, inner_step: int) -> bool:
        """As its pace has it."""
        return self._pace.due(inner_step)

    def poll(self) -> None:
        """Launches once more if a peer was lost."""
        if self._flight is not None:
            self._flight.poll()

    def round(self, group: Group, inner_step: int) -> Outcome:
        """Applies the mean of the round before, and launches that of this one."""
        group.arrive(self._pace)
        landed = self._take(group)
        if landed is not None and not landed.suffices:
            self._give_back()
        late = self._exchange.share.late = self._pace.late
        self._exchange.measure()
        stepped = landed is not None and landed.suffices
        contributors = landed.contributors if landed is not None and stepped else 0
        if stepped:
            self._exchange.step(contributors)
        self._view.look_ahead(stepped, contributors or group.size, late)
        if (self._alone and group.waits(1)) or (landed is not None and landed.waits):
            self._announce(None)
            here = landed.peers if landed is not None else 1
            group.wait_for_others(self._exchange.outer_step, here)
        self._alone = False
        admitted = self._depart(group, stepped)
        return Outcome(
            contributors=contributors,
            retries=landed.retries if landed is not None else 0,
            admitted=admitted,
        )

    def rescue(self) -> bool:
        """That since the last launch, and what was launched if it has failed for all."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.abandon():
            self._exchange.forgo()
        elif flight is not None:
            self._give_back()
        self._landed = None
        return self._exchange.rescue()

    def finish(self, group: Group) -> None:
        """Applies the mean of the last round; or keeps this peer's progress, if there is none."""
        landed = self._take(group)
        if landed is not None and landed.suffices:
            self._exchange.step(landed.contributors)
            self._view.reset()
            self._exchange.adopt()
        elif landed is not None:
            self._give_back()

    def _take(self, group: Group) -> _Landed | None:
        """What there is to apply; None if nothing was launched in the round before."""
        self._land(group)
        landed, self._landed = self._landed, None
        if landed is None and self._contributors[0]:  # this is a newcomer's first round
            landed = _Landed(int(self._contributors[0]), 0, suffices=True)
        self._contributors[0] = 0
        return landed

    def _land(self, group: Group) -> None:
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._landed = self._judge(group, self._exchange.land(flight))

    def _judge(self, group: Group, average: Average) -> _Landed:
        of_nobody = average.info is None and self._exchange.share.late
        suffices = group.suffices(average, self._exchange.outer_step) and not of_nobody
        if suffices:
            self._exchange.accept(average)
        waits = group.waits(average.peers)
        return _Landed(average.contributors, average.retries, suffices, waits, average.peers)

    def _depart(self, group: Group, stepped: bool) -> bool:
        """Launches the mean of this round, or admits newcomers; whether any were admitted."""
        if not group.are_pending():
            if stepped:
                group.agree(admitted=False)
            self._launch(group)
            return False
        landed = self._judge(group, self._exchange.run())
        self._landed = landed if landed.suffices else None
        group.admit()
        self._announce(self._landed)
        group.agree(admitted=True)
        if self._landed is not None:
            self._adopt()
        else:
            self._keep_progress()
        return True

    def _launch(self, group: Group) -> None:
        """Launches, unless this peer is alone."""
        try:
            self._flight = self._exchange.launch()
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            self._pace.late = self._exchange.share.late = False  # for nobody
            self._landed = self._judge(group, Average(None, 0))
            if not self._landed.suffices:
                self._alone = True
                self._landed = None
                self._keep_progress()
                return
        self._adopt()

    def _adopt(self) -> None:
        """The model begins from theta, and who is late has its progress beside it."""
        self._exchange.adopt()
        if self._exchange.share.late:
            self._exchange.reclaim(self._late_decay)

    def _give_back(self) -> None:
        """The model gets the progress that was under way, beside that which it has made since."""
        if not self._exchange.share.late:  # it has it
            self._exchange.reclaim()
        self._view.rebase()

    def _keep_progress(self) -> None:
        """The model is theta and this peer's own progress."""
        self._view.reset()
        self._exchange.adopt()
        self._exchange.reclaim()

    def _announce(self, landed: _Landed | None) -> None:
        """Writes what newcomers receive."""
        self._contributors[0] = landed.contributors if landed is not None else 0
        if landed is None:
            for mean in self._exchange.means:
                mean.zero_()

    def entries(self) -> list[TensorInfo]:
        """The mean at hand, and of how many it is."""
        means = enumerate(self._exchange.means)
        return [
            *self._pace.entries(),
            TensorInfo.from_torch(self._contributors, "diloco.delayed.contributors"),
            *(TensorInfo.from_torch(mean, f"diloco.delayed.mean.{i}") for i, mean in means),
        ]

    def state_dict(self, group: Group) -> dict[str, Any]:
        """The same; waits for the mean that is being averaged."""
        self._land(group)
        landed = self._landed
        contributors = int(self._contributors[0])
        if landed is not None:
            contributors = landed.contributors if landed.suffices else 0
        means = self._exchange.means if contributors else []
        return {"contributors": contributors, "means": [mean.clone() for mean in means]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state; without one, there is no mean at hand."""
        self._contributors[0] = state.get("contributors", 0)
        # That run may have shared its buffers in another way, and so have had more or fewer means.
        for mean, saved in zip(self._exchange.means, state.get("means", []), strict=False):
            mean.copy_(saved)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model.

    Attributes:
        exchange: of its parameters.
        shared: what all peers hold alike of it.
    """

    exchange: Exchange
    shared: SharedState


class Streaming:
    """Averages each fragment once in H inner steps, and applies its mean tau inner steps later.

    Fragment p of P, at inner step o_p = floor((p + 1) H / P) of each H, and tau steps after it:

        d_p = theta_p - w_p                            launched at o_p
        v_p, theta_p = OuterOptimizer(v_p, theta_p, D_p)     at o_p + tau
        w_p <- alpha w_p + (1 - alpha) theta_p

    (Streaming DiLoCo, arXiv 2501.18512.) One mean at most is under way, because tau < floor(H / P).

    A newcomer must have no part in a mean under way, and must know where in the H inner steps the
    others are. So it is admitted only where a fragment is about to be launched: that one is not
    launched, but averaged and applied at once by those who have trained it. Then the newcomer
    receives theta, v and k of all fragments, and the position. It is in phase: nothing is under
    way, and all come to the next fragment together.

    w does not change when a fragment is launched. So if no mean comes of it, nothing is lost: the
    progress is in the next pseudo-gradient of that fragment.
    """

    def __init__(
        self, fragments: Sequence[Fragment], inner_steps: int, overlap: int, alpha: float
    ) -> None:
        self._fragments = fragments
        self._overlap = overlap
        self._alpha = alpha
        count = len(fragments)
        self._launches = {(p + 1) * inner_steps // count: p for p in range(count)}
        self._arrivals = {(at - 1 + overlap) % inner_steps + 1 for at in self._launches}
        self._position = torch.zeros(1, dtype=torch.int64)
        self._inner_steps = inner_steps
        self._current = fragments[-1]  # of the last launch
        self._flight: AsyncAverage | None = None
        self._landed: Average | None = None
        self._stepped = True  # in the last round

    def begin(self) -> int:
        """This peer trains on from where the others are."""
        return int(self._position)

    def due(self, inner_step: int) -> bool:
        """Whether a fragment is to be launched, or its mean to be applied."""
        under_way = self._flight is not None or self._landed is not None
        return inner_step in (self._arrivals if under_way else self._launches)

    def poll(self) -> None:
        """Launches once more if a peer was lost."""
        if self._flight is not None:
            self._flight.poll()

    def round(self, group: Group, inner_step: int) -> Outcome | None:
        """Launches a fragment, or applies its mean; None as long as that is under way."""
        self._position[0] = inner_step % self._inner_steps
        average = self._land()
        if average is not None:
            self._landed = None
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
            self._flight = self._current.exchange.launch()
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            self._landed = Average(None, 0)

    def _land(self) -> Average | None:
        """What there is to apply; None if nothing was launched."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._landed = self._current.exchange.land(flight)
        return self._landed

    def _settle(self, group: Group, average: Average, pending: bool) -> Outcome:
        """Takes the outer step, and admits newcomers."""
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

    def rescue(self) -> bool:
        """No: a round of streaming has no deadline, so nobody comes back to it."""
        return False

    def finish(self, group: Group) -> None:
        """Applies what is under way. The model is theta then, unless this peer had no mean."""
        average = self._land()
        if average is not None:
            self._landed = None
            self._stepped = self._apply(group, average)
        if self._stepped:
            for fragment in self._fragments:
                fragment.exchange.adopt()

    def entries(self) -> list[TensorInfo]:
        """Where in the H inner steps the peers are."""
        return [TensorInfo.from_torch(self._position, "diloco.streaming.position")]

    def state_dict(self, group: Group) -> dict[str, Any]:
        """The same. What is under way is not in it, like other progress since the last step."""
        return {"position": int(self._position), "inner_steps": self._inner_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over the position, if the run had as many inner steps."""
        same = state.get("inner_steps") == self._inner_steps
        self._position[0] = state["position"] if same else 0
