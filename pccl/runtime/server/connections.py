"""The connections to a master: their limits, their identities, and their loss.

libzmq limits the size of a frame. It limits neither the number of frames in a message nor the time
until a connection's first message. Incomplete messages take libzmq's memory, which is not visible
here. But Linux counts the bytes that a connection has received. If this count grows without a
complete message, that is an attack, and the connection is cut. Other systems do not count, so they
only have limits of time and number.

An empty frame takes 2 bytes on the wire and 64 in memory. So strangers (connections that have not
sent a message) can take at most 32 times STRANGERS_BYTES of a master's memory, plus the data that
arrives between two checks.

If the system has no descriptor for a new connection, libzmq retries in a busy loop, and it cannot
stop listening without closing the existing connections. So `Reserve` keeps a few descriptors for
this case. When it gives them up, new connections are accepted and closed at once until there is
room again.

A connection is identified by the routing id that the ROUTER gives it, which is never reused. The
socket's monitor reports lost connections, but only by file descriptor. A connection's first message
reveals its descriptor. Messages and monitor events are two queues without a common order, and
descriptors are reused. So:

- The monitor is read before a connection's first message. A connection is accepted before it can
  send, so by then all events of earlier users of its descriptor have been read.
- If a first message arrives on the descriptor of another connection, the other connection is lost.
- If a first message arrives after the monitor has reported the loss of its connection, the
  connection counts as lost at once, because the monitor will not report it again.
- If another connection uses the descriptor by then, the loss goes unnoticed at first. But sending
  to a lost connection fails, and this shows the loss, too.
- A lost connection is *buried* (its loss is handled) after all its messages were read. So if a peer
  leaves and closes its connection, its Leave is still read.
- Messages of a buried connection are ignored, so that they do not look like a new connection.

Messages of a dropped connection are ignored. The connection is closed a moment later, so that the
peer can read the reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from pccl.runtime import limits, tcp
from pccl.runtime.resources import EXHAUSTED, descriptor_limit
from pccl.runtime.tcp import Shutter, received

log = logging.getLogger("pccl")

PATIENCE = 3  # factor of the time limit while the master has unread messages
SHARE = 50  # a pause between looks is at least this many times as long as a look


@dataclass(slots=True, eq=False)
class Connection:
    descriptor: int
    since_s: float  # when it was accepted, or its latest message was read
    counted: int = 0  # bytes received until then
    stranger: bool = True  # none of its messages has been read
    active: bool = False  # a message was read since the last look
    cut: bool = False
    conn: bytes = b""  # its name, known from its first message on
    host: str = ""  # at its other end

    def hear(self) -> None:
        """Notes that a complete message was read."""
        self.active, self.stranger = True, False


class Guard:
    """The connections of a server, as its monitor reports them."""

    def __init__(
        self,
        # returns the number of bytes that a descriptor has received; None: unknown
        received: Callable[[int], int | None],
        # the most connections; further ones are cut. At most half of these may be strangers; if
        # there are more, the oldest strangers are cut.
        connections_max: int,
        clock: Callable[[], float] = time.monotonic,  # measures how long a look takes
    ) -> None:
        self._clock = clock
        self._received = received
        self._connections_max = connections_max
        self._open: dict[int, Connection] = {}  # by descriptor, in the order of their acceptance
        self._next_s = 0.0
        self._rested_s = 0.0  # the earliest time of the next look, by SHARE
        self._pause_s = limits.STRANGERS_LOOK_S

    def accepted(self, descriptor: int, now_s: float) -> Connection:
        self._open.pop(descriptor, None)  # so that the latest connections are the last ones
        connection = self._open[descriptor] = Connection(descriptor, now_s)
        self._pause_s = limits.STRANGERS_LOOK_S
        self._next_s = max(self._rested_s, min(self._next_s, now_s + limits.STRANGERS_LOOK_S))
        return connection

    @property
    def full(self) -> bool:
        return len(self._open) > self._connections_max

    def gone(self, descriptor: int) -> Connection | None:
        return self._open.pop(descriptor, None)

    def at(self, descriptor: int) -> Connection | None:
        return self._open.get(descriptor)

    def holds(self, connection: Connection) -> bool:
        """True if the descriptor still belongs to this connection."""
        return self._open.get(connection.descriptor) is connection

    @property
    def patience_s(self) -> float | None:
        """The longest time until the next look; None: until a connection is accepted."""
        return self._pause_s if self._open else None

    def look(self, now_s: float, drained: bool) -> list[tuple[Connection, str]]:
        """The connections to cut, and why. Checks them only if a check is due.

        Args:
            now_s: the time by the monotonic clock.
            drained: whether all messages that have arrived have been read.
        """
        if now_s < self._next_s or not self._open:
            return []
        began_s = self._clock()
        limit_s = limits.HELLO_S if drained else PATIENCE * limits.HELLO_S
        cuts = []
        for connection in self._open.values():
            if not connection.cut and (why := self._see(connection, now_s, limit_s)):
                cuts.append((connection, why))
                connection.cut = True
        for connection, why in self._crowd():
            cuts.append((connection, why))
            connection.cut = True
        ended_s = now_s + self._clock() - began_s
        strangers = any(connection.stranger for connection in self._open.values())
        self._pause_s = limits.STRANGERS_LOOK_S if strangers else limits.KNOWN_LOOK_S
        self._rested_s = ended_s + SHARE * (ended_s - now_s)
        self._next_s = max(self._rested_s, ended_s + self._pause_s)
        return cuts

    def _see(self, connection: Connection, now_s: float, limit_s: float) -> str:
        if connection.active:
            connection.active, connection.since_s = False, now_s
            connection.counted = self._received(connection.descriptor) or connection.counted
            return ""
        waited_s = now_s - connection.since_s
        if connection.stranger and waited_s > limit_s:
            return f"it has said nothing for {limit_s:g} s"
        most = limits.STRANGER_BYTES if connection.stranger else limits.KNOWN_BYTES
        unread = self._unread(connection)
        if unread > most + limits.HEARTBEAT_BYTES_S * waited_s:
            return f"it has sent {unread} bytes of a message without an end"
        return ""

    def _unread(self, connection: Connection) -> int:
        total = self._received(connection.descriptor)
        return 0 if total is None else total - connection.counted

    def _crowd(self) -> list[tuple[Connection, str]]:
        """The strangers to cut because they are too many, or take too much memory together."""
        strangers = [one for one in self._open.values() if one.stranger and not one.cut]
        surplus = strangers[: max(0, len(strangers) - self._connections_max // 2)]
        cuts = [(connection, "too many connections say nothing") for connection in surplus]
        sizes = [(self._unread(connection), connection) for connection in strangers[len(surplus) :]]
        total = sum(size for size, _ in sizes)
        for size, connection in sorted(sizes, key=lambda pair: -pair[0]):
            if total <= limits.STRANGERS_BYTES:
                break
            total -= size
            cuts.append((connection, "too much arrives that is no message yet"))
        return cuts


KEPT = 8  # descriptors in reserve


class Reserve:
    """Descriptors in reserve, held from construction on.

    Raises OSError: the system provides no descriptors even at construction.
    """

    def __init__(self) -> None:
        # whether the reserve is used up, so that new connections must be closed at once
        self.spent = False
        self._kept: list[int] = []
        self._said_s: float | None = None
        self._failed_s = 0.0
        try:
            self._restock()
        except OSError:
            self.close()
            raise

    def failed(self, number: int, now_s: float) -> None:
        """Handles a connection that could not be accepted; `number` is the errno."""
        if number not in EXHAUSTED:
            return
        self.spent = True
        self._failed_s = now_s
        self.close()
        if self._said_s is None or now_s - self._said_s >= limits.LOG_REPEAT_S:
            self._said_s = now_s
            log.error(
                "master: new connections are closed, because the system provides no more "
                "descriptors (%s); existing ones are served. This process may have %d: see "
                "ulimit -n",
                os.strerror(number),
                descriptor_limit(),
            )

    def tick(self, now_s: float) -> None:
        """Restores the reserve if possible, some time after the last failure."""
        if self.spent and now_s - self._failed_s >= limits.DESCRIPTORS_REST_S:
            with contextlib.suppress(OSError):
                self._restock()

    def _restock(self) -> None:
        while len(self._kept) < KEPT:
            self._kept.append(os.open(os.devnull, os.O_RDONLY))
        self.spent = False

    def close(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


class Connections:
    """The connections that the monitor has reported, and those that have sent a message.

    Raises OSError: the system provides no descriptors.
    """

    monitor: zmq.Socket[bytes]

    def __init__(self, opened: contextlib.ExitStack) -> None:
        # connections that have sent a message and are not buried; read only
        self.senders: dict[bytes, Connection] = {}
        self.flooded = False  # whether the monitor may have more events and must be read again
        self._lost: list[bytes] = []  # lost connections, to be buried
        self._unreachable: set[bytes] = set()  # sending to them failed, so they are lost too
        self._dead: dict[bytes, float] = {}  # by connection, when; late messages are ignored
        self._dropped: dict[bytes, float] = {}  # by connection, when; open, but ignored
        self._surplus: list[Connection] = []  # connections beyond the limit
        self._stuck = False  # whether a connection could not be closed
        connections_max = max(limits.CONNECTIONS_MIN, descriptor_limit() - limits.DESCRIPTORS_SPARE)
        self._guard = Guard(received, connections_max)
        self._shutter = Shutter()
        opened.callback(self._shutter.close)
        self._reserve = Reserve()
        opened.callback(self._reserve.close)

    def watch(self, router: zmq.Socket[bytes], opened: contextlib.ExitStack) -> None:
        """Starts to monitor the connections of this socket.

        Raises:
            zmq.ZMQError: the monitor cannot be created.
        """
        self.monitor = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
        )
        opened.callback(self.monitor.close, linger=0)
        opened.callback(router.disable_monitor)

    # ---- events ----

    def read_monitor(self) -> None:
        """Reads the monitor: accepted, failed and lost connections. Stops early in a flood."""
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
                self._shed()  # at once: libzmq reports failures faster than they can be read
                failures += 1
                continue
            earlier = self._guard.gone(value)
            if earlier is not None and earlier.conn:
                self._lost.append(earlier.conn)
            if kind == zmq.EVENT_ACCEPTED:
                connection = self._guard.accepted(value, time.monotonic())
                if self._reserve.spent or self._guard.full:
                    self._surplus.append(connection)
        self.flooded = True

    def learn(self, conn: bytes, origin: tuple[int, str] | None) -> bool:
        """Identifies a connection by its first message; `origin` is its descriptor and address.

        Returns False if that is impossible.
        """
        self.read_monitor()
        if origin is None:
            log.debug("master: connection %s is of no known kind", conn.hex())
            return False
        descriptor, host = origin
        connection = self._guard.at(descriptor)
        if connection is None:
            connection = Connection(descriptor, time.monotonic())
            self._lost.append(conn)
        elif connection.conn:
            self._lost.append(connection.conn)
            connection = self._guard.accepted(descriptor, time.monotonic())
        connection.conn, connection.host = conn, host.removeprefix("::ffff:")  # IPv4 seen by IPv6
        self.senders[conn] = connection
        return True

    def unreachable(self, conn: bytes) -> None:
        self._unreachable.add(conn)

    def has_lost(self, conn: bytes) -> bool:
        return conn in self._lost or conn in self._unreachable

    def take_lost(self, now_s: float, drained: bool) -> list[bytes]:
        """The connections whose loss must be handled now. Their later messages are ignored.

        Args:
            now_s: the time by the monotonic clock.
            drained: whether all messages that have arrived have been read.
        """
        lost, self._lost = self._lost, []
        if drained:
            lost += self._unreachable & self.senders.keys() - set(lost)
            self._unreachable.clear()
            # connections that ended long ago have no messages left
            recent = {c: at for c, at in self._dead.items() if now_s - at < limits.GRACE_S}
            self._dead = recent
        for conn in lost:
            self.senders.pop(conn, None)
            self._dropped.pop(conn, None)
            self._dead[conn] = now_s
        return lost

    def silent_s(self, conn: bytes) -> float | None:
        """How long a connection has been silent, even without heartbeats; None: unknown."""
        connection = self.senders.get(conn)
        info = None if connection is None else tcp.of_descriptor(connection.descriptor)
        return None if info is None else info.silent_s

    # ---- ignored connections ----

    def has_ended(self, conn: bytes) -> bool:
        return conn in self._dead

    def is_heard(self, conn: bytes) -> bool:
        """True if the messages of a connection count."""
        return conn not in self._dead and conn not in self._dropped

    def drop(self, conn: bytes) -> None:
        """Ignores messages of a connection, and closes it after the peer had time to read the
        reason."""
        if conn in self.senders:
            self._dropped[conn] = time.monotonic()

    def drop_at_once(self, conn: bytes) -> None:
        """Ignores messages of a connection, and closes it without delay."""
        self._dropped[conn] = -math.inf

    # ---- connections to close ----

    def cut(self, now_s: float, drained: bool) -> None:
        """Closes connections by their descriptors, because libzmq has no call for that.

        Args:
            now_s: the time by the monotonic clock.
            drained: whether all messages that have arrived have been read.
        """
        self._shed()
        self._reserve.tick(now_s)
        for connection, why in self._guard.look(now_s, drained):
            connection.cut = self._shut(connection)
            if connection.cut:
                log.info("master: a connection is closed: %s", why)
        self._stuck = False
        for conn in [conn for conn, at in self._dropped.items() if now_s - at >= limits.GRACE_S]:
            if self._shut(self.senders[conn]):
                self._dropped[conn] = math.inf  # until the monitor reports the loss
            else:
                self._stuck = True

    @property
    def impaired(self) -> bool:
        """True while connections cannot be accepted or closed: there are no descriptors."""
        return self._reserve.spent or self._stuck

    @property
    def crowded(self) -> bool:
        return bool(self._surplus)

    @property
    def busy(self) -> bool:
        """True if there are lost connections to handle, or a time limit ends soon."""
        waiting = self._lost or self._unreachable or self._dropped or self._dead
        return bool(waiting or self._reserve.spent)

    @property
    def patience_s(self) -> float | None:
        """The longest time until the next `cut`; None: until a connection is accepted."""
        return self._guard.patience_s

    def _shed(self) -> None:
        """Closes surplus connections.

        If such a connection is already lost, a newer one may have its descriptor; there is no room
        for the newer one either.
        """
        while self._surplus:
            connection = self._surplus.pop()
            with contextlib.suppress(OSError):
                self._shutter.shut(connection.descriptor, partial(self._guard.holds, connection))

    def _shut(self, connection: Connection) -> bool:
        """Shuts a connection down. Returns False if it may still be open: try again."""

        def is_that_one() -> bool:
            self.read_monitor()
            return self._guard.holds(connection) and not self.flooded

        try:
            if self._shutter.shut(connection.descriptor, is_that_one):
                return True
        except OSError as error:  # it has just been closed, or there are no descriptors
            log.debug("master: descriptor %d: %s", connection.descriptor, error)
        return not self._guard.holds(connection)
