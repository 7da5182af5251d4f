"""One call of the API in progress, between the thread that waits for it and the one that works."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pccl.protocol import messages as m
from pccl.protocol import peer as core

SLICE_S = 0.5  # of a wait without an end
INTERRUPTED_S = 1.0  # at most, for the master to hear of a Ctrl-C


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a piece that is fetched by `op` has arrived, and waits for its verdict."""

    op: int
    piece: int
    leaf: int


Note = core.Answer | core.Fail | core.Plan | core.Fetched | m.Welcome | Leaf


class Call:
    """One API call in progress: notes come in, the last one is an Answer or a Fail."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.began_s = time.monotonic()
        self.serve_op = 0  # of a synchronisation
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def put(self, note: Note) -> None:
        """Called by the control thread."""
        self._notes.put(note)

    def next(self, timeout_s: float | None = None) -> Note:
        """The next note. Raises queue.Empty after the time-out."""
        if timeout_s is not None:
            return self._notes.get(timeout=max(0.0, timeout_s))
        while True:  # in slices: a Ctrl-C that comes just before the wait does not end it
            with contextlib.suppress(queue.Empty):
                return self._notes.get(timeout=SLICE_S)

    def settle(self, timeout_s: float) -> None:
        """Waits until the last note is there, which stays; for no longer than the time-out."""
        give_up_at = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while True:
                note = self.next(give_up_at - time.monotonic())
                if isinstance(note, core.Answer | core.Fail):
                    self.put(note)
                    return

    @property
    def has_notes(self) -> bool:
        """Whether `next` would return at once."""
        return not self._notes.empty()


class Withdrawer(Protocol):
    """Who can give up a call: the client."""

    def withdraw(self, call: Call, why: str) -> None:
        """Waits no longer for a call."""


class Deadline:
    """When the caller of a call gives up. The call is withdrawn then, and answered all the same.

    Args:
        timeout_s: seconds from now; None: never.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def next(self, client: Withdrawer, call: Call) -> Note:
        """The call's next note."""
        with _interruptible(client, call):
            if self._at is not None:
                try:
                    return call.next(self._at - time.monotonic())
                except queue.Empty:
                    self._at = None
                    client.withdraw(call, f"its caller gave up after {self._timeout_s:g} s")
            return call.next()

    def next_within(self, client: Withdrawer, call: Call, seconds: float) -> Note | None:
        """The call's next note, or None when none came for so many seconds."""
        due = time.monotonic() + seconds
        if self._at is not None and self._at <= due:
            return self.next(client, call)
        with _interruptible(client, call), contextlib.suppress(queue.Empty):
            return call.next(seconds)
        return None


@contextlib.contextmanager
def _interruptible(client: Withdrawer, call: Call) -> Iterator[None]:
    """Withdraws the call at a Ctrl-C: others must not wait for us, nor find us there any more."""
    try:
        yield
    except KeyboardInterrupt:
        client.withdraw(call, "its caller was interrupted")
        call.settle(INTERRUPTED_S)
        raise
