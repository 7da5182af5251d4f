"""Learners on their own clocks (Decoupled DiLoCo, arXiv 2604.21428).

Each peer has a learner, which is the thread of the script, and a syncer, a thread that meets those
of the other peers. A learner never waits for a peer. When a fragment is due, it measures its
progress between two of its inner steps, and goes on; it takes over the mean between two later ones.
All syncers hold theta, and votes decide which of them are in a mean.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pccl.diloco.exchange import Exchange
from pccl.diloco.membership import Group
from pccl.diloco.pace import Forecast
from pccl.diloco.schedule import Fragment, Schedule
from pccl.extension import Deadline

Action = Callable[[], object]


class Learner:
    """What a learner and its syncer tell each other.

    Only the learner's thread touches the model. So the syncer leaves actions here, which the
    learner carries out, in their order, at the end of an inner step.

    Attributes:
        lock: of everything that both threads use.
        steps: inner steps since the last meeting.
        ends: whether the learner takes no more steps.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.steps = 0
        self.ends = False
        self._actions: list[Action] = []
        self._measure: Action | None = None
        self._due = 1  # inner steps until that
        self._step_s, self._stepped_s = 0.0, time.monotonic()  # of the last inner step
        self._paused = self._meeting = self._stopped = False
        self._error: BaseException | None = None

    # ---- for the learner's thread ----

    def stepped(self) -> None:
        """An inner step has ended.

        Raises:
            Exception: the syncer has failed.
        """
        with self.lock:
            self.steps += 1
            now_s = time.monotonic()
            self._step_s, self._stepped_s = now_s - self._stepped_s, now_s
            self._serve()

    def _serve(self) -> None:
        if self._error is not None:
            raise self._error
        actions, self._actions = self._actions, []
        if self._measure is not None and (self.ends or self.steps >= self._due):
            actions.append(self._measure)
            self._measure, self.steps = None, 0
        for action in actions:
            action()
        self.lock.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No meeting takes place in the block; waits for the end of one."""
        with self.lock:
            self._paused = True
            try:
                while self._meeting and self._error is None:
                    self._serve()
                    self.lock.wait()
                yield
            finally:
                self._paused = False
                self.lock.notify_all()

    def finish(self) -> None:
        """Takes part in meetings until all learners have ended, or have left.

        Raises:
            Exception: the syncer has failed.
        """
        with self.lock:
            self.ends = True
            while not self._stopped:
                self._serve()
                self.lock.wait()
            self._serve()

    # ---- for the syncer's thread ----

    def leave(self, action: Action) -> None:
        """The learner is to carry out an action after its present inner step."""
        with self.lock:
            self._actions.append(action)
            self.lock.notify_all()

    def expect(self, steps: int, measure: Action) -> None:
        """The learner is to measure its progress after that many inner steps."""
        with self.lock:
            self._due, self._measure = steps, measure
            self.lock.notify_all()

    def wait_until_due(self, pace: Forecast) -> bool:
        """Waits until the learner has measured, or the forecast is over.

        Returns False if there is no learner any more.
        """
        patience: Deadline | None = None
        with self.lock:
            while (self._measure is not None or self._paused) and not self._stopped:
                left_s = None if self._paused or self.ends else pace.left_s()
                if left_s is not None and left_s <= 0:
                    self._due = 0  # at the end of its present step
                    patience = patience or Deadline(pace.patience_s(self._step_s))
                    left_s = patience.left_s
                    if not left_s:
                        break
                self.lock.wait(left_s)
            self._meeting = not self._stopped
            return self._meeting

    def take(self) -> bool:
        """Ends the time to measure. Returns whether the learner has measured."""
        with self.lock:
            missing, self._measure = self._measure, None
            return missing is None

    def met(self) -> None:
        """A meeting has ended."""
        with self.lock:
            self._meeting = False
            self.lock.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """There is no syncer any more, because of an error or since all have ended."""
        with self.lock:
            self._meeting, self._stopped, self._error = False, True, error
            self.lock.notify_all()


class Decoupled(Schedule):
    """The schedule of a syncer: each mean is applied at once, while the learner trains.

    A learner whose model is at w when theta takes an outer step goes on from w + (theta - base), or
    if the mean has its progress d, from w + (theta - base) + d. Then the base is theta. So all
    progress is either in one mean or in w.
    """

    def __init__(self, fragments: Sequence[Fragment], pace: Forecast, learner: Learner) -> None:
        super().__init__(fragments, pace, overlap=0, alpha=0.0, late_decay=1.0)
        self._forecast = pace
        self._learner = learner
        for fragment in fragments:
            fragment.exchange.separate(learner.lock)

    def expect(self, inner_steps: int) -> None:
        """A round begins."""
        self._learner.expect(inner_steps, self._fragments[self.next_fragment].exchange.measure)

    def _enter(self, group: Group, patient: bool) -> None:
        self._forecast.patient = self._learner.ends
        super()._enter(group, patient)
        self._forecast.mark()

    def _measure(self, exchange: Exchange) -> None:
        measured = self._learner.take() and exchange.weight.measured
        self._pace.late = exchange.weight.late = not measured

    def _on_time(self) -> None:
        """What was not measured cannot be in a mean."""

    def _adopt(self, fragment: Fragment) -> None:
        exchange, weight = fragment.exchange, fragment.exchange.weight
        exchange.measured = exchange.sent = False
        if weight.excluded:
            self._learner.leave(lambda: self._give_theta(fragment))
        else:
            counted = not weight.late
            self._learner.leave(lambda: exchange.rebase(counted))

    def _give_theta(self, fragment: Fragment) -> None:
        fragment.view.reset()
        fragment.exchange.adopt()

    def rescue(self) -> list[Exchange]:
        """Returns the exchanges whose last progress may be in a mean."""
        self._learner.take()
        lost = [each.exchange for each in self._fragments if each.exchange.gave_away()]
        for exchange in lost:
            exchange.discard()
        return lost

    def finish(self, group: Group) -> None:
        """The model becomes theta, except fragments that still have progress of their own."""
        for fragment in self._fragments:
            if not fragment.exchange.weight.trained:
                self._give_theta(fragment)

    def resume(self, rescued: Sequence[Exchange], keep: bool) -> None:
        for fragment in self._fragments:
            counted = fragment.exchange in rescued
            self._learner.leave(lambda f=fragment, c=counted: f.exchange.rebase(c))  # type: ignore[misc]


def start(
    learner: Learner, pace: Forecast, meet: weakref.WeakMethod[Callable[[], bool]]
) -> threading.Thread:
    """Starts a syncer. It ends when `meet` is gone, or has returned False, or failed."""

    def run() -> None:
        try:
            while learner.wait_until_due(pace):
                meeting = meet()
                if meeting is None or not meeting():
                    break
                del meeting
                learner.met()
        except BaseException as error:
            learner.stop(error)
        else:
            learner.stop()

    thread = threading.Thread(target=run, name="pccl-syncer", daemon=True)
    thread.start()
    return thread
