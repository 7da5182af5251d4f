"""The connection to the master, and the attempts to reconnect when it breaks.

A broken connection is replaced: new ones are opened, one after another, until the master answers or
the time limit expires. The master's name is resolved again for each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.dealer import Dealer, DealerEvent
from pccl.runtime.client.identity import Identity
from pccl.runtime.config import Config
from pccl.runtime.resolve import Found, Resolver
from pccl.runtime.waiter import Waiter
from pccl.support.text import address_text
from pccl.types import Result

log = logging.getLogger("pccl")


class Member(Protocol):
    """A state machine at this end of the connection; its effects are performed by the caller's."""

    @property
    def number(self) -> int:
        """That the master has given it, or 0."""

    @property
    def over(self) -> effects.Fail | None:
        """Why it needs no connection any more."""

    def received(self, message: m.MasterMessage) -> list[Any]:
        """Handles a message of the master."""

    def disconnected(self, why: str) -> list[Any]:
        """The connection broke."""

    def reconnected(self) -> list[Any]:
        """There is another one."""

    def lost_master(self, why: str) -> list[Any]:
        """There will be no other one."""


class MasterConnection:
    """The current connection to the master; its user must hold the client's lock.

    Args:
        host: of the master.
        port: of the master.
        config: timings and limits.
        identity: the keys of this peer.
        peer: the state machine; it is told when the connection is lost, restored or given up.
        waiter: waits for messages and events.
        resolver: looks up the master's name again.

    Attributes:
        dealer: the connection that was opened last.
        address: the master's address for that connection.
    """

    dealer: Dealer

    def __init__(
        self,
        host: str,
        port: int,
        config: Config,
        identity: Identity,
        peer: Member,
        waiter: Waiter,
        resolver: Resolver,
    ) -> None:
        self.host, self.port = host, port
        self._config, self._identity, self._peer = config, identity, peer
        self._waiter, self._resolver = waiter, resolver
        self.address = ""
        self._resolving = False  # the master's name, on the way back to it
        self._trouble = ""  # what was wrong with the last connection
        self._retry_at: float | None = None
        self._give_up_at = 0.0

    @property
    def name(self) -> str:
        """`host:port` of the master."""
        return address_text(self.host, self.port)

    def begin(
        self,
        context: zmq.Context[Any],
        address: str,
        read: Callable[[], None],
        perform: Callable[[list[Any]], None],
    ) -> None:
        """Opens the first connection.

        Args:
            context: of its sockets.
            address: the first address of the master to try.
            read: reads the messages that have arrived.
            perform: performs the effects of what was read.

        Raises:
            OSError: the system provides no socket.
        """
        self._context, self._read, self._perform = context, read, perform
        self.dealer = self._open(address)

    def close(self) -> None:
        """Closes the connection; queued messages are still sent."""
        self._waiter.remove(self.dealer.socket)
        self._waiter.remove(self.dealer.monitor)
        self.dealer.close()

    def answered(self) -> None:
        """The master has answered on this connection."""
        self._give_up_at = 0.0

    @property
    def due_s(self) -> float | None:
        """When `tick` has something to do."""
        if not self._give_up_at:
            return None
        return min(self._give_up_at, self._retry_at or self._give_up_at)

    def tick(self) -> None:
        """Does whatever is due."""
        if not self._give_up_at:
            return
        now = time.monotonic()
        if self._give_up_at <= now:
            self._give_up()
        elif self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            self._resolving = True
            self._resolver.find(self.host, self._retry)

    def _open(self, address: str) -> Dealer:
        self.address = address
        dealer = Dealer(self._context, address, self.port, self._config, self._identity.secure)
        self._waiter.add(dealer.socket, self._read)
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
                self._read()  # the last message of a master that was stopped is the reason
                self._break(
                    f"the connection to the master at {self.name} broke"
                    if self._peer.number
                    else "it closed the connection without an answer: it is no pccl master"
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
            "PCCL_CURVE_DIR), or it is no pccl master"
        )

    def _break(self, why: str) -> None:
        """The connection is lost: tries to reconnect, as long as `master_patience_s` allows."""
        if self._retry_at is not None or self._resolving or self._peer.over is not None:
            return
        self._trouble = why
        now = time.monotonic()
        patience_s = self._config.master_patience_s
        if not self._give_up_at:
            self._give_up_at = now + patience_s
            if self._peer.number:
                log.warning("peer %d: %s; trying for %g s", self._peer.number, why, patience_s)
            self._perform(self._peer.disconnected(why))
        self._retry_at = now + limits.MASTER_RETRY_S
        self.tick()

    def _give_up(self) -> None:
        patience_s = self._config.master_patience_s
        why = f"{self._trouble}, and it did not come back within {patience_s:g} s"
        self._resolving, self._retry_at, self._give_up_at = False, None, 0.0
        self._perform(self._peer.lost_master(why))

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
