"""The connections of the master's ROUTER socket: who they are, which are gone, which have to go.

A connection is named by the routing id that the ROUTER gives it, which is never reused. That a
connection is gone is told by the socket's monitor, which knows file descriptors only. A
connection's descriptor is learnt from its first message. The two queues, messages and monitor
events, are not ordered against each other, and descriptors are reused, so:

- the monitor is read before a connection's first message is. A connection was accepted before it
  could send, hence by then all events of earlier users of its descriptor have been seen;
- when a first message arrives on a descriptor that another connection is known by, that other one
  is gone;
- when a first message arrives of a connection that the monitor has said is gone, it is lost at once
  (it will not be said again);
- if the descriptor has another user by then, that is not seen. But nothing can be sent to who is
  gone, which is evidence too;
- what a lost connection had sent before is read before it is buried, so that a peer that leaves and
  closes is seen to leave;
- what is read of it even later is ignored: it must not be taken for a new connection.

Of a connection that was dropped nothing more is heard. It has a moment to read why, then it is cut.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from pccl.runtime import descriptors, limits
from pccl.runtime.descriptors import Shutter, received
from pccl.runtime.server.guard import Guard, Line
from pccl.runtime.server.reserve import Reserve

log = logging.getLogger("pccl")


class Sender(NamedTuple):
    """What libzmq knows of a connection: its descriptor, and the host at its other end."""

    fd: int
    host: str


class Connections:
    """The connections that the monitor tells of, and those that have said something.

    Args:
        opened: closes what is opened here.

    Attributes:
        senders: who has said something and is not buried; to be read only.
        flooded: whether the monitor may have more to tell, so that it has to be read again.

    Raises:
        OSError: the system lends no descriptors.
    """

    monitor: zmq.Socket[bytes]

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self.senders: dict[bytes, Sender] = {}
        self.flooded = False
        self._conn_of: dict[int, bytes] = {}
        self._lost: list[bytes] = []  # connections that are gone, to be buried
        self._unreachable: set[bytes] = set()  # nothing can be sent to them: they are gone, too
        self._buried: dict[bytes, float] = {}  # when; what is read of them now is ignored
        self._dropped: dict[bytes, float] = {}  # when; they are open, but not listened to
        self._surplus: list[Line] = []  # connections for which there is no room
        lines_max = max(limits.CONNECTIONS_MIN, descriptors.limit() - limits.DESCRIPTORS_SPARE)
        self._guard = Guard(received, lines_max)
        self._shutter = Shutter()
        opened.callback(self._shutter.close)
        self._reserve = Reserve()
        opened.callback(self._reserve.close)

    def watch(self, router: zmq.Socket[bytes], opened: contextlib.ExitStack) -> None:
        """Has the monitor of this socket tell of its connections.

        Raises:
            zmq.ZMQError: there can be none.
        """
        self.monitor = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
        )
        opened.callback(self.monitor.close, linger=0)
        opened.callback(router.disable_monitor)

    # ---- what happens to them ----

    def read_monitor(self) -> None:
        """Reads who was accepted, who could not be, and who is gone; of a flood only a part."""
        failures = 0
        while failures < limits.ACCEPT_FAILURES:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                self.flooded = False
                return
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPT_FAILED:
                self._reserve.failed(value, time.monotonic())
                self._shed()  # now: libzmq tries on, and tells of it faster than can be read
                failures += 1
                continue
            conn = self._conn_of.pop(value, None)  # who has had this descriptor is gone
            if conn is not None:
                self._lost.append(conn)
            if kind == zmq.EVENT_ACCEPTED:
                line = self._guard.accepted(value, time.monotonic())
                if self._reserve.spent or self._guard.full:
                    self._surplus.append(line)
            else:
                self._guard.gone(value)
        self.flooded = True

    def learn(self, conn: bytes, frame: zmq.Frame) -> bool:
        """From a connection's first message: who it is. False where that cannot be known."""
        self.read_monitor()
        try:
            fd = int(frame.get(zmq.SRCFD))
            host = str(frame.get("Peer-Address")).removeprefix("::ffff:")  # IPv4 seen by IPv6
        except zmq.ZMQError:  # it speaks ZMTP 1 or 2, as random bytes seem to
            log.debug("master: connection %s is of no known kind", conn.hex())
            return False
        earlier = self._conn_of.get(fd)
        if earlier is not None:
            self._lost.append(earlier)
        self.senders[conn] = Sender(fd, host)
        if self._guard.is_open(fd):
            self._conn_of[fd] = conn
        else:
            self._conn_of.pop(fd, None)
            self._lost.append(conn)
        return True

    def heard(self, conn: bytes) -> None:
        """A whole message of it was read."""
        if (sender := self.senders.get(conn)) is not None:
            self._guard.heard(sender.fd)

    def unreachable(self, conn: bytes) -> None:
        """Nothing can be sent to it."""
        self._unreachable.add(conn)

    def take_lost(self, drained: bool) -> list[bytes]:
        """The connections that are gone, and are to be buried now.

        Args:
            drained: whether everything that has been said has been read.
        """
        lost, self._lost = self._lost, []
        if drained:
            lost += self._unreachable & self.senders.keys() - set(lost)
            self._unreachable.clear()
        return lost

    def bury(self, lost: list[bytes], now_s: float) -> None:
        """What is read of these from now on is ignored."""
        for conn in lost:
            self.senders.pop(conn, None)
            self._dropped.pop(conn, None)
            self._buried[conn] = now_s

    def forget_buried(self, now_s: float) -> None:
        """Nothing more can come of those that were buried long ago."""
        self._buried = {c: at for c, at in self._buried.items() if now_s - at < limits.GRACE_S}

    # ---- whom to hear ----

    def is_buried(self, conn: bytes) -> bool:
        """Whether it is gone, and its disappearance dealt with."""
        return conn in self._buried

    def is_heard(self, conn: bytes) -> bool:
        """Whether what it says counts."""
        return conn not in self._buried and conn not in self._dropped

    def drop(self, conn: bytes) -> None:
        """Hears nothing more of it, and cuts it when it has had time to read why."""
        if conn in self.senders:
            self._dropped[conn] = time.monotonic()

    def drop_at_once(self, conn: bytes) -> None:
        """Hears nothing more of it, and cuts it without delay."""
        self._dropped[conn] = -math.inf

    # ---- those that have to go ----

    def cut(self, now_s: float, drained: bool) -> None:
        """Closes connections that libzmq would keep: it has no call for that.

        Args:
            now_s: of the monotonic clock.
            drained: whether everything that has been said has been read.
        """
        self._shed()
        self._reserve.tick(now_s)
        for line, why in self._guard.look(now_s, drained):
            log.info("master: a connection is closed: %s", why)
            self._shut(line.descriptor, partial(self._guard.holds, line))
        for conn in [conn for conn, at in self._dropped.items() if now_s - at >= limits.GRACE_S]:
            self._dropped[conn] = math.inf  # until the monitor says that it is gone
            fd = self.senders[conn].fd
            self._shut(fd, partial(self._is_of, fd, conn))

    @property
    def crowded(self) -> bool:
        """Whether there are connections to be closed at once."""
        return bool(self._surplus)

    @property
    def busy(self) -> bool:
        """Whether something has a time limit that ends soon."""
        return bool(self._dropped or self._buried or self._reserve.spent)

    @property
    def patience_s(self) -> float | None:
        """After how long at the latest to `cut`; None: not before something happens."""
        return self._guard.patience_s

    def _shed(self) -> None:
        """Closes connections for which there is no room.

        If one is gone already, and another one has its descriptor, that came later: no room either.
        """
        while self._surplus:
            line = self._surplus.pop()
            with contextlib.suppress(OSError):
                self._shutter.shut(line.descriptor, partial(self._guard.holds, line))

    def _is_of(self, descriptor: int, conn: bytes) -> bool:
        return self._conn_of.get(descriptor) == conn

    def _shut(self, descriptor: int, still: Callable[[], bool]) -> None:
        def is_that_one() -> bool:
            self.read_monitor()
            return still() and not self.flooded

        try:
            self._shutter.shut(descriptor, is_that_one)
        except OSError as error:  # it is closed just now
            log.debug("master: descriptor %d: %s", descriptor, error)
