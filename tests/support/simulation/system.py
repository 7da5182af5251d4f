"""A simulated peer's System: a clock, connections and an engine, and no threads.

The peer's client (pccl/runtime/client) is the real one. The simulation calls `turn` for its control
thread, and moves its clock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.runtime.client.connection import DealerEvent
from pccl.runtime.client.control import System
from simulation.engine import SimEngine

if TYPE_CHECKING:
    from simulation.peer import SimPeer

RELAY_PORT = 7


class SimWaiter:
    """A `Waiter` that never waits."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self._reads: dict[object, Callable[[], object]] = {}
        self._ready: list[Callable[[], object]] = []
        self._woken = False

    @property
    def pending(self) -> bool:
        """Whether `wait` would return at once."""
        return (self._woken or bool(self._ready)) and not self._peer.closed

    def add(self, source: object, read: Callable[[], object]) -> None:
        self._reads[source] = read
        self._ready.append(read)

    def remove(self, source: object) -> None:
        del self._reads[source]

    def notify(self, source: object) -> None:
        """There is something to read."""
        read = self._reads.get(source)
        if read is not None and read not in self._ready:
            self._ready.append(read)

    def wake(self) -> None:
        self._woken = True

    def wait(self, timeout_s: float | None) -> list[Callable[[], object]]:
        ready, self._ready, self._woken = self._ready, [], False
        return ready

    def close(self) -> None:
        self._reads.clear()


class SimDealer:
    """A `Dealer`: its messages go into the queues of the peer's connection."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer, self.socket, self.monitor = peer, object(), object()
        self.unsent: list[m.PeerMessage] = []
        self._events: list[DealerEvent] = []
        self.broken = False
        peer.dealer = self

    def send(self, message: m.PeerMessage) -> None:
        self._peer.conversation.said(message)  # others may be heard before it is sent
        self.unsent.append(message)

    def send_now(self, vote: bytes, sent: ctypes.Array[ctypes.c_int32]) -> bool:
        sent[0] = 1
        message = m.decode_from_peer(vote)
        self._peer.conversation.said(message)
        self._peer.send(message)
        return not self._peer.arrived

    def flush(self) -> bool:
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self._peer.send(message)
        return bool(self._peer.arrived)

    def receive(self) -> Iterator[m.MasterMessage]:
        while self._peer.arrived:
            message = m.decode_from_master(self._peer.arrived.popleft())
            self._peer.hear(message)
            yield message

    def events(self) -> list[DealerEvent]:
        events, self._events = self._events, []
        return events

    def happens(self, event: DealerEvent) -> None:
        """The monitor has something to say."""
        self._events.append(event)
        self.broken = event is DealerEvent.BROKEN
        self._peer.waiter.notify(self.monitor)

    def close(self) -> None:
        self.flush()
        if self._peer.dealer is self:
            self._peer.hang_up()


class SimPoint:
    """A `RendezvousPoint`."""

    port = RELAY_PORT

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer

    def expect(self, token: str) -> None:
        self._peer.run.meetings.expect(token)

    def close(self) -> None:
        pass


class SimSystem(System):
    """The system of one peer."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer

    def now(self) -> float:  # type: ignore[override]
        return self._peer.now_s

    def token(self) -> str:  # type: ignore[override]
        return self._peer.run.meetings.token()

    def shortage(self) -> str:  # type: ignore[override]
        return ""

    def aside(self, work: Callable[[], None]) -> None:  # type: ignore[override]
        work()

    def waiter(self) -> SimWaiter:  # type: ignore[override]
        return self._peer.waiter

    def engine(self, *_: object, **__: object) -> SimEngine:  # type: ignore[override]
        return self._peer.engine

    def point(self, *_: object) -> SimPoint:  # type: ignore[override]
        return SimPoint(self._peer)

    def dealer(self, *_: object) -> SimDealer:  # type: ignore[override]
        return SimDealer(self._peer)

    def start(self, thread: object) -> None:
        """The simulation does what the thread would."""

    def close(self) -> None:
        pass
