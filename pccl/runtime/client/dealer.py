"""One connection to the master: a DEALER and its monitor. It is never repaired, only replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from pccl.ext.mail import Mail
from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.config import Config
from pccl.support.text import address_text

BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


# Not -1: libzmq would then discard the unread messages of a connection that breaks, such as a
# master's last words.
_NEVER_MS = 1 << 30


class DealerEvent(Enum):
    """An event of a connection, from its monitor."""

    UP = auto()
    BROKEN = auto()
    HANDSHAKE_FAILED = auto()
    NOT_ALLOWED = auto()


class Dealer:
    """A connection to the master, from the first attempt to its end.

    Args:
        context: of the sockets.
        host: numeric address of the master; libzmq would resolve a name in its own thread.
        port: port of the master.
        config: timings and limits.
        secure: sets a socket's keys.

    Attributes:
        unsent: what was said since the last `flush`, encoded.

    Raises:
        OSError: the system provides no socket.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        host: str,
        port: int,
        config: Config,
        secure: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        options = {
            zmq.LINGER: limits.LAST_WORDS_MS,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.RECONNECT_IVL: _NEVER_MS,  # MasterConnection replaces broken connections
            zmq.IMMEDIATE: 0,
            zmq.MAXMSGSIZE: m.MESSAGE_BYTES_MAX,
            zmq.CONNECT_TIMEOUT: int(config.handshake_timeout_s * 1000),
            zmq.HANDSHAKE_IVL: int(config.handshake_timeout_s * 1000),
            zmq.HEARTBEAT_IVL: config.heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: config.heartbeat_timeout_ms,
            zmq.IPV6: int(":" in host),
        }
        self._up = False
        self.unsent: list[bytes] = []
        try:
            self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            try:
                for option, value in options.items():
                    self.socket.setsockopt(option, value)
                secure(self.socket)
                self.monitor = self.socket.get_monitor_socket(
                    zmq.EVENT_HANDSHAKE_SUCCEEDED
                    | BROKEN
                    | HANDSHAKE_FAILED
                    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                )
                self._mail = Mail(self.socket)
                self.socket.connect(f"tcp://{address_text(host, port)}")
            except BaseException:
                self.socket.close(linger=0)  # with its monitor
                raise
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"no connection can be opened: {error}") from None

    def say(self, message: m.PeerMessage) -> None:
        """Keeps a message until `flush`, which sends those of one moment together."""
        self.unsent.append(m.encode(message))

    def flush(self) -> bool:
        """Sends what was said. Whether there are messages to be heard now."""
        unsent, self.unsent = self.unsent, []
        waiting = False
        try:
            for frame in m.frames(unsent):
                waiting = self._mail.send(frame)
        except zmq.Again:
            return True  # the connection broke; its monitor knows why, and is read next
        return waiting

    def heard(self) -> Iterator[m.MasterMessage]:
        """All messages so far.

        Raises:
            ProtocolError: the master has sent something else.
        """
        for frame in self._mail.take():
            yield from map(m.decode_from_master, m.opened(frame))

    def events(self) -> Iterator[DealerEvent]:
        """All events so far."""
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event = self._event(parse_monitor_message(frames)["event"])
            self._up = event is DealerEvent.UP
            yield event

    @staticmethod
    def _event(number: int) -> DealerEvent:
        if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return DealerEvent.UP
        if number & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return DealerEvent.NOT_ALLOWED
        return DealerEvent.HANDSHAKE_FAILED if number & HANDSHAKE_FAILED else DealerEvent.BROKEN

    def close(self) -> None:
        """Closes the connection; if it is established, what was said is still sent."""
        self.flush()
        for _ in self.events():  # updates whether it is connected
            pass
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=None if self._up else 0)
