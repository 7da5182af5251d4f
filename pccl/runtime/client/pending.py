"""Calls without an answer yet, and the memory that the engine refers to for them.

Only the control thread uses it, until that has ended.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call, End
from pccl.runtime.client.figures import Figures
from pccl.runtime.client.memory import Operands, Pool
from pccl.types import Result

log = logging.getLogger("pccl")


class PendingCalls:
    """Calls by number, and memory by op.

    Args:
        figures: count the calls.

    Attributes:
        memory: op -> what the engine refers to, or is about to.
        closed: whether the control thread has ended; then calls are answered in their own threads.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self.memory: dict[int, Operands | Pool] = {}
        self.closed = False
        self._calls: dict[int, Call] = {}
        self._told: list[tuple[Call, End]] = []  # calls that have ended, and not heard of it yet

    def __contains__(self, number: int) -> bool:
        """Whether a call waits for its answer."""
        return number in self._calls

    def add(self, call: Call) -> None:
        """Adds a call."""
        self._calls[call.number] = call

    def welcomed(self, message: m.Welcome) -> None:
        """Tells all calls that the master has registered this peer."""
        for call in self._calls.values():
            call.put(message)

    def note(self, effect: effects.Follow | effects.Measure | effects.Fetched) -> None:
        """Tells a call something that is not its answer."""
        self._calls[effect.call].put(effect)

    def warn(self, peer: int, effect: effects.Waits) -> None:
        """Logs which peers a call waits for."""
        call = self._calls.get(effect.call)
        if call is not None:
            waited_s = time.monotonic() - call.began_s
            log.warning("peer %d has waited %.0f s %s", peer, waited_s, effect.why)

    def answer(self, effect: effects.Answer | effects.Fail) -> None:
        """Ends a call; `tell` then delivers the answer."""
        self.memory.pop(effect.call, None)  # no op of the engine needs it any more
        call = self._calls.pop(effect.call, None)
        if call is not None:
            self._figures.ended(effect, call.began_s)
        if call is not None and self.closed:  # made after the end, in the caller's own thread
            call.put(effect)
        elif call is not None:
            self._told.append((call, effect))

    def tell(self) -> None:
        """Delivers the answers; last, because waking callers contends for the global lock."""
        told, self._told = self._told, []
        for call, end in told:
            call.put(end)

    def fail_all(self, over: effects.Fail | None) -> None:
        """Fails every call that no one will answer any more, for the reason given."""
        ended = effects.Fail(0, Result.INTERNAL_ERROR, "the communicator has ended")
        for number in list(self._calls):
            self.answer(replace(over or ended, call=number))
        self.tell()
