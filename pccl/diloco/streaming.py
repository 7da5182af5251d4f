"""mode="streaming": one fragment of the model after the other, while all of it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pccl import PCCLError, Result, SharedState, TensorInfo
from pccl.diloco.exchange import Exchange
from pccl.diloco.flight import Average, Flight
from pccl.diloco.group import Group
from pccl.diloco.schedules import Outcome


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
        self._flight: Flight | None = None
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
