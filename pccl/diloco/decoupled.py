"""Learners with their own clocks, and a syncer beside each (Decoupled DiLoCo, arXiv 2604.21428)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pccl.diloco.exchange import Exchange
from pccl.diloco.pace import Forecast
from pccl.diloco.schedule import Fragment, Schedule
from pccl.diloco.settings import Settings
from pccl.extension import Deadline

Action = Callable[[], object]


class Learner:
    """Connects a learner and its syncer; a syncer that fails ends the learner, too.

    Only the learner's thread touches the model. So the syncer queues actions here, which the
    learner executes in order at the end of an inner step.
    """

    def __init__(self) -> None:
        # guards everything that both threads use; a Condition is not safe to enter: see Latch
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.steps = 0  # since the last meeting
        self.ends = False  # whether the learner takes no more steps
        self.idle, self.idle_s = False, 0.0  # whether it has no samples, and for how long
        self.torn = False  # whether an exception has left the model when it was moved in part
        self._actions: list[Action] = []
        self._measure: Action | None = None
        self._due = 1  # inner steps until the measurement
        self._is_late = False  # whether it has not measured for the last meeting
        self._step_s, self._stepped_s = 0.0, time.monotonic()  # duration and end of the last step
        self._paused = self._meeting = self._stopped = False
        self._error: BaseException | None = None

    # ---- for the learner's thread ----

    def stepped(self) -> None:
        """Records the end of an inner step."""
        with self.lock:
            self.steps += 1
            now_s = time.monotonic()
            self._step_s, self._stepped_s = now_s - self._stepped_s, now_s
            self._serve()

    def _serve(self) -> None:
        if self._error is not None:
            raise self._error
        while self._actions:
            self._actions[0]()
            del self._actions[0]  # after an exception such as Ctrl-C, the next call goes on here
        if self._measure is not None and not self.torn and (self.ends or self.steps >= self._due):
            self._measure()
            self._measure, self.steps = None, 0
        self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes meetings during the block; waits for the end of one in progress."""
        with self.lock:
            self._paused = True
            try:
                while self._meeting and self._error is None:
                    self._serve()
                    self._changed.wait()
                yield
            finally:
                self._paused = False
                self._changed.notify_all()

    def wait_while(self, idle: Callable[[], bool]) -> None:
        """Takes part in meetings while the learner has no samples."""
        with self.lock:
            began_s = time.monotonic()
            while idle() and not self._stopped:
                self.idle = True
                self._serve()
                if idle():
                    self._changed.wait()
            self.idle = False
            self.idle_s += time.monotonic() - began_s
            self._serve()

    def finish(self) -> None:
        """Takes part in meetings until all learners have ended, or have left."""
        self.ends = True
        self.wait_while(lambda: True)

    # ---- for the syncer's thread ----

    def enqueue(self, action: Action) -> None:
        with self.lock:
            self._actions.append(action)
            self._changed.notify_all()

    def expect(self, steps: int, measure: Action) -> None:
        """Asks the learner to measure its progress after `steps` inner steps.

        If it was late for the last meeting, it measures after its current step.
        """
        with self.lock:
            self._due, self._measure = 0 if self._is_late else steps, measure
            self._changed.notify_all()

    def wait_until_due(self, pace: Forecast) -> bool:
        """Waits until the learner has measured, or the forecast is over.

        After the forecast it waits a little for the end of a step, unless the learner was late
        before: it may be stopped. Returns False if there is no learner any more.
        """
        patience: Deadline | None = None
        with self.lock:
            while not self._stopped and (self._paused or (self._measure and not self.torn)):
                left_s = None if self._paused or self.ends else pace.left_s()
                if left_s is None and self.idle and not self.ends:
                    left_s = 0.0  # without a forecast, it need not wait
                if left_s is not None and left_s <= 0:
                    self._due = 0  # at the end of its current step
                    self._changed.notify_all()
                    patience_s = 0.0 if self._is_late else pace.patience_s(self._step_s)
                    patience = patience or Deadline(patience_s)
                    left_s = patience.left_s
                    if not left_s:
                        break
                self._changed.wait(left_s)
            self._meeting = not self._stopped
            return self._meeting

    def take(self) -> bool:
        """Ends the measurement. Returns whether the learner has measured."""
        with self.lock:
            self._is_late, self._measure = self._measure is not None, None
            return not self._is_late

    def met(self) -> None:
        with self.lock:
            self._meeting = False
            self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Records the end of the syncer: an error, or all peers have finished."""
        with self.lock:
            self._meeting, self._stopped, self._error = False, True, error
            self._changed.notify_all()


class Decoupled(Schedule):
    """The schedule of a syncer: each mean is applied at once, while the learner trains."""

    _pace: Forecast

    def __init__(
        self,
        fragments: Sequence[Fragment],
        pace: Forecast,
        settings: Settings,
        learner: Learner,
    ) -> None:
        super().__init__(fragments, pace, settings)
        self._learner = learner
        self._anew = False  # whether the model must take theta, because it is torn

    def expect(self, inner_steps: int) -> None:
        self._learner.expect(inner_steps, self._fragments[self.next_fragment].exchange.measure)

    def _enter(self, patient: bool) -> None:
        self._pace.patient = self._learner.ends
        super()._enter(patient)
        self._pace.mark()

    def _measure(self, exchange: Exchange) -> None:
        measured = self._learner.take() and exchange.weight.measured
        self._pace.late = exchange.weight.late = not measured

    def _on_time(self) -> None:
        """Does nothing: without a measurement, this peer cannot contribute to a mean."""

    def _adopt(self, fragment: Fragment) -> None:
        exchange, weight = fragment.exchange, fragment.exchange.weight
        exchange.measured = exchange.sent = False
        if weight.excluded:
            self._learner.enqueue(lambda: self._give_theta(fragment))
        else:
            counted = not weight.late
            self._learner.enqueue(lambda: self._rebase(exchange, counted))

    def _rebase(self, exchange: Exchange, counted: bool) -> None:
        """Moves the model; if an exception such as Ctrl-C comes between, this peer rejoins."""
        torn, self._learner.torn = self._learner.torn, True
        exchange.rebase(counted)
        self._learner.torn = torn

    def _begin_anew(self) -> None:
        for fragment in self._fragments:
            self._give_theta(fragment)
            fragment.exchange.weight.drop()
            fragment.exchange.ledger.renewed()

    def _give_theta(self, fragment: Fragment) -> None:
        fragment.view.reset()
        fragment.exchange.adopt()

    def rescue(self) -> list[Exchange]:
        """The exchanges whose last progress may be in a mean."""
        with self._learner.lock:
            self._anew, self._learner.torn = self._learner.torn, False
        lost = [each.exchange for each in self._fragments if each.exchange.gave_away()]
        for exchange in lost:
            exchange.discard()
        return lost

    def finish(self) -> None:
        """Sets the model to theta, except fragments that still have their own progress."""
        for fragment in self._fragments:
            if not fragment.exchange.weight.trained:
                self._give_theta(fragment)

    def resume(self, rescued: Sequence[Exchange], keep: bool) -> None:
        if not keep or self._anew:
            self._learner.enqueue(self._begin_anew)
            return
        for fragment in self._fragments:
            counted = fragment.exchange in rescued
            self._learner.enqueue(lambda f=fragment, c=counted: self._rebase(f.exchange, c))  # type: ignore[misc]


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
