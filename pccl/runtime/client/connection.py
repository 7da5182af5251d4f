"""The connection to the master: this peer's credentials, the socket, and reconnecting.

A broken connection is replaced: new connections are opened, one after another, until the master
answers or the time limit expires. Each attempt resolves the master's name again, and takes an
address that answers if there are several.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq

from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client.engine import EngineOptions
from pccl.runtime.config import Config
from pccl.runtime.encryption import new_keys, require_curve, secure_client
from pccl.runtime.resolve import Found, Resolver
from pccl.runtime.sockets import Mail, Waiter
from pccl.security import KeyPair, Security
from pccl.support import address_text
from pccl.types import Result

if TYPE_CHECKING:
    from pccl.protocol.peer import Peer
    from pccl.protocol.weights import WeightsMachine

# The first frame of a monitor's message. zmq.utils.monitor would read it, but imports asyncio.
_EVENT = struct.Struct("=hi")


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's credentials, which do not change during its life."""

    token: str  # the password with which the master may dial it
    # the key pair that the master allows, if encrypted; several peers may share it
    keys: KeyPair | None = None
    master_key: str = ""  # the master's public key, if encrypted
    # the key pair of this peer's streams, if encrypted. It is unique to this peer, so others that
    # open a stream with it know that they have reached this peer.
    lanes: KeyPair | None = None

    @classmethod
    def of(cls, security: Security | None) -> Identity:
        """New credentials. Raises PCCLError: INVALID_USAGE: keys are missing or unsafe."""
        token = os.urandom(16).hex()
        if security is None:
            return cls(token)
        require_curve()
        return cls(token, security.peer_keys(), security.master_key(), new_keys())

    @property
    def curve(self) -> str:
        """The public key of its streams; empty without keys."""
        return "" if self.lanes is None else self.lanes.public

    def guard(self, options: EngineOptions) -> EngineOptions:
        """The options of an engine that accepts only expected peers and the master."""
        if self.lanes is None:
            return replace(options, dialler=self.token.encode())
        return replace(
            options,
            curve_public=self.lanes.public.encode(),
            curve_secret=self.lanes.secret.encode(),
            dialler=self.master_key.encode(),
        )

    def secure(self, dealer: zmq.Socket[Any]) -> None:
        if self.keys is not None:
            secure_client(dealer, self.keys, self.master_key)


BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


# Not -1, which makes libzmq discard the unread messages of a broken connection, such as a master's
# last words.
_NEVER_MS = 1 << 30


class DealerEvent(Enum):
    UP = auto()
    BROKEN = auto()
    HANDSHAKE_FAILED = auto()
    NOT_ALLOWED = auto()


class Dealer:
    """A connection to the master, from the first attempt to its end.

    Raises OSError: the system provides no socket.
    """

    def __init__(
        self,
        context: zmq.Context[Any],  # of the sockets
        host: str,  # numeric address of the master; libzmq would resolve a name in its own thread
        port: int,  # port of the master
        config: Config,  # timings and limits
        secure: Callable[[zmq.Socket[bytes]], None],  # sets a socket's keys
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
        self.unsent: list[bytes] = []  # the encoded messages that `flush` will send
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

    def send(self, message: m.PeerMessage) -> None:
        """Keeps a message until `flush`, which sends all kept messages together."""
        self.unsent.append(m.encode(message))

    def flush(self) -> bool:
        """Sends the kept messages. Returns whether there may be messages to receive."""
        unsent, self.unsent = self.unsent, []
        waiting = False
        try:
            for frame in m.frames(unsent):
                waiting = self._mail.send(frame)
        except zmq.Again:
            return True  # the connection broke; its monitor knows why, and is read next
        return waiting

    def send_now(self, vote: bytes, sent: ctypes.Array[ctypes.c_int32]) -> bool:
        """Sends the encoded vote of a small collective from its caller's thread.

        Returns False if the control thread must be woken: the vote was not sent, or the socket has
        messages to read that would otherwise go unnoticed.
        """
        return self._mail.send_now(vote, sent)

    def receive(self) -> Iterator[m.MasterMessage]:
        """All messages so far. Raises ProtocolError: the master has sent other bytes."""
        messages = chain.from_iterable(map(m.opened, self._mail.take()))
        return map(m.decode_from_master, messages)

    def events(self) -> Iterator[DealerEvent]:
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            number, _ = _EVENT.unpack(frames[0])
            event = self._event(number)
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
        """Closes the connection; if it is established, unsent messages are still sent."""
        self.flush()
        for _ in self.events():  # updates `_up`
            pass
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=None if self._up else 0)


log = logging.getLogger("pccl")


# The state machine of a client; its effects are performed by a `Driver`.
Machine: TypeAlias = "Peer | WeightsMachine"


class MasterConnection:
    """The current connection to the master; its user must hold the client's lock."""

    dealer: Dealer  # the connection that was opened last

    def __init__(
        self,
        host: str,  # of the master
        port: int,  # of the master
        config: Config,  # timings and limits
        identity: Identity,  # the keys of this peer
        # the state machine; it learns when the connection is lost, restored or given up
        peer: Machine,
        waiter: Waiter,  # waits for messages and events
        resolver: Resolver,  # looks up the master's name again
        dial: Callable[..., Dealer],  # begins a connection, as System.dealer does
        now: Callable[[], float],  # the clock
    ) -> None:
        self.host, self.port = host, port
        self._dial, self._now = dial, now
        self._config, self._identity, self._peer = config, identity, peer
        self._waiter, self._resolver = waiter, resolver
        self.address = ""  # the master's address for that connection
        self._resolving = False  # whether the master's name is being resolved again
        self._trouble = ""  # what was wrong with the last connection
        self._retry_at: float | None = None
        self._give_up_at = 0.0

    @property
    def name(self) -> str:
        return address_text(self.host, self.port)

    def begin(
        self,
        address: str,  # the first address of the master to try
        read: Callable[[], None],  # reads the messages that have arrived
        perform: Callable[[list[Any]], None],  # performs the effects of what was read
    ) -> None:
        """Opens the first connection. Raises OSError: the system provides no socket."""
        self.read, self._perform = read, perform
        self.dealer = self._open(address)

    def close(self) -> None:
        """Closes the connection; queued messages are still sent."""
        self._waiter.remove(self.dealer.socket)
        self._waiter.remove(self.dealer.monitor)
        self.dealer.close()

    def answered(self) -> None:
        self._give_up_at = 0.0

    @property
    def due_s(self) -> float:
        """When `tick` has something to do."""
        if not self._give_up_at:
            return math.inf
        return min(self._give_up_at, self._retry_at or self._give_up_at)

    def tick(self) -> None:
        if not self._give_up_at:
            return
        now = self._now()
        if self._give_up_at <= now:
            self._give_up(f"it did not come back within {self._config.master_patience_s:g} s")
        elif self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            self._resolving = True
            # Short at first: a silent address must not hide the master's return.
            lasted_s = now - self._give_up_at + self._config.master_patience_s
            limit_s = min(self._config.handshake_timeout_s, max(4 * limits.STAGGER_S, lasted_s))
            self._resolver.answering(self.host, self.port, limit_s, self._retry)

    def _open(self, address: str) -> Dealer:
        self.address = address
        dealer = self._dial(address, self.port, self._config, self._identity.secure)
        self._waiter.add(dealer.socket, self.read)
        self._waiter.add(dealer.monitor, self._read_monitor)
        return dealer

    def _read_monitor(self) -> None:
        for event in self.dealer.events():
            self._happened(event)

    def _happened(self, event: DealerEvent) -> None:
        match event:
            case DealerEvent.UP:
                if self._give_up_at:  # this replaces a broken connection
                    self._perform(self._peer.reconnected())
            case DealerEvent.BROKEN:
                self.read()  # a stopped master's last message gives the reason
                self._break(
                    f"the connection to the master at {self.name} broke"
                    if self._peer.number
                    else "it closed the connection without an answer: it is not a pccl master"
                )
            case DealerEvent.NOT_ALLOWED if (keys := self._identity.keys) is not None:
                why = f"its list `allowed` does not have this peer's key, {keys.public}"
                refused = m.Refused(Result.INVALID_USAGE.value, why)
                self._perform(self._peer.received(refused))
            case _ if self._give_up_at:  # a proxy may answer for a master that is down
                self._break(self._handshake_problem())
            case _:
                self._perform(self._peer.lost_master(self._handshake_problem()))

    def _handshake_problem(self) -> str:
        if self._identity.keys is not None:
            return "the handshake failed: the master does not encrypt, or master.key is not its key"
        return (
            "the handshake failed: the master wants encryption (pass security=, or set "
            "PCCL_CURVE_DIR), or it is not a pccl master"
        )

    def _break(self, why: str) -> None:
        """The connection is lost: tries to reconnect, as long as `master_patience_s` allows."""
        if self._retry_at is not None or self._resolving or self._peer.over is not None:
            return
        self._trouble = why
        now = self._now()
        patience_s = self._config.master_patience_s
        if not self._give_up_at:
            self._give_up_at = now + patience_s
            if self._peer.number:
                log.warning("peer %d: %s; trying for %g s", self._peer.number, why, patience_s)
            self._perform(self._peer.disconnected(why))
        elif not self._config.master_returns:
            self._give_up("it has ended")
            return
        self._retry_at = now + limits.MASTER_RETRY_S
        self.tick()

    def _give_up(self, why: str) -> None:
        self._resolving, self._retry_at, self._give_up_at = False, None, 0.0
        self._perform(self._peer.lost_master(f"{self._trouble}, and {why}"))

    def _retry(self, found: Found) -> None:
        """Tries to connect again, if the master's name could be resolved."""
        if not self._resolving:
            return
        self._resolving = False
        if not found.address:
            self._break(found.why)
            return
        self._resolver.failed(self.host)  # the next attempt takes another address, if there is one
        try:
            dealer = self._open(found.address)
        except OSError as error:
            self._break(f"no connection to the master can be opened: {error.strerror or error}")
            return
        self.close()
        self.dealer = dealer
