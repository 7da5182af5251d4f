"""Streams to peers to which nobody can connect: where this peer meets them, and they it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine
from pccl.runtime.client.meeting import TAKES, MeetingPoint
from pccl.runtime.config import Config
from pccl.runtime.resolve import Found, Resolver, Ways
from pccl.support.text import address_text

log = logging.getLogger("pccl")


def destination(token: str, side: int) -> str:
    """The endpoint by which a meeting point knows who belongs together.

    It has the form of an address, so that libzmq does not look up a name when a connection ends.
    """
    groups = ":".join(token[i : i + 4] for i in range(0, len(token), 4))
    return f"tcp://[{groups}]:{side}"


class Meetings:
    """This peer's meeting point, if it has one, and its way to those of others.

    A relay has one from the beginning, because its port is in its first message; another peer, as
    soon as it has something to send to a peer that only dials out.

    Args:
        engine: connects to meeting points.
        resolver: resolves the names of those.
        config: whether this peer relays, whether it can be reached, and its ports.
        host: the address to listen on.
        say: sends a message to the master.

    Raises:
        OSError: it is to relay, and cannot listen.
    """

    def __init__(
        self,
        engine: Engine,
        resolver: Resolver,
        config: Config,
        host: str,
        say: Callable[[m.Meet], None],
    ) -> None:
        self._engine, self._resolver, self._config = engine, resolver, config
        self._host, self._say = host, say
        self._point: MeetingPoint | None = None
        self._visited: set[tuple[str, int]] = set()
        self._relayed: set[tuple[int, int]] = set()
        if config.relay:
            log.warning("this peer relays streams of peers that cannot connect to each other")
            self._open()

    @property
    def port(self) -> int:
        """Of the meeting point; 0: there is none."""
        return 0 if self._point is None else self._point.port

    @property
    def visited(self) -> set[tuple[str, int]]:
        """The addresses of all meeting points to which this peer has connected."""
        return {*self._visited, ("127.0.0.1", self.port)} if self.port else {*self._visited}

    def ask(self, to: m.PeerInfo, lanes: int) -> tuple[str, str]:
        """Asks that a peer connects to a stream from this one.

        Returns the token of their meeting, and the `address:port` of the meeting point; that is
        empty if the master must say where.

        Raises:
            OSError: this peer cannot listen for it.
        """
        token = secrets.token_hex(16)
        if self._config.outgoing:
            self._say(m.Meet(to.peer, token, 0, lanes))
            return token, ""
        point = self._open()
        point.expect(token)
        self._say(m.Meet(to.peer, token, point.port, lanes))
        return token, f"127.0.0.1:{point.port}"

    def come(self, come: m.Come) -> None:
        """The master says where a sender waits for this peer."""

        def found(it: Found) -> None:
            if not it.address:
                log.warning(
                    "%s cannot be met at %s: %s", come.sender, " or ".join(come.hosts), it.why
                )
                return
            self._visited.add((it.address, come.port))
            via = address_text(it.address, come.port)
            self._engine.meet(destination(come.token, TAKES), via, come.lanes)

        ways = Ways(come.hosts, come.port, greets=False)
        self._resolver.reach(ways, self._config.handshake_timeout_s, found)

    def relay(self, relay: m.Relay) -> None:
        """The master says that two others meet here."""
        if self._point is None:
            return  # it was never offered
        pair = relay.sender.peer, relay.receiver.peer
        if pair not in self._relayed:
            self._relayed.add(pair)
            log.warning("this peer relays from %s to %s", relay.sender, relay.receiver)
        self._point.expect(relay.token)

    def close(self) -> None:
        """Ends all that meet here."""
        if self._point is not None:
            self._point.close()

    def _open(self) -> MeetingPoint:
        if self._point is None:
            ports = [port for port in self._config.ports if port != self._engine.port]
            limit_s = self._config.handshake_timeout_s + limits.STREAM_LATE_S
            self._point = MeetingPoint(self._host, ports, limit_s)
            log.info("peers that only dial out meet this one at port %d", self._point.port)
        return self._point
