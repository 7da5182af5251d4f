"""A peer's streams to other peers: their addresses, and the time limits of their connections.

The engine opens a stream at once, so that ops can start on it, and connects it when the address is
known. This module abandons streams that do not connect in time, whatever the reason: libzmq does
not report that it got no socket for a lane, and resolving a name may take arbitrarily long.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.tuning import Settings, high_water_mark, lanes
from pccl.runtime import limits
from pccl.runtime.client.engine import ANOTHER, REFUSED, UNREACHABLE, Engine, Event
from pccl.runtime.client.rendezvous import SENDS, Rendezvous, destination
from pccl.runtime.config import Config
from pccl.runtime.forks import Address
from pccl.runtime.resolve import Found, Resolver, Ways, is_address
from pccl.support import address_text

log = logging.getLogger("pccl")


@dataclass(slots=True)
class _Stream:
    to: m.PeerInfo
    nonce: int
    opened_s: float
    due_s: float
    endpoint: str = ""  # once it is known
    retry_s: float = 0.0  # when to resolve the name again
    why: str = ""  # why the name could not be resolved
    refused: bool = False  # whether the system provides no socket for it
    token: str = ""  # the rendezvous's token, if the peer is met
    via: str = ""  # where the peer is met, once it is known
    ways: Ways | None = None  # the ways among which the resolver chooses
    why_lost: str = ""  # why it was lost, if the reason is too long for the engine
    shares: int = 1  # streams that send at the same time as this one
    up: bool = False  # whether it was ever connected


class Refused(Exception):
    """The system has repeatedly refused this process the sockets for its streams."""


class Streams:
    def __init__(
        self,
        engine: Engine,  # the engine of these streams
        resolver: Resolver,  # resolves host names
        config: Config,  # timings and limits
        pool_size: int,  # lanes to each neighbor; 0: chosen by the engine
        local: Callable[[m.PeerInfo], bool],  # whether a peer is on this machine
        rendezvous: Rendezvous,  # for peers that accept no connections
        now: Callable[[], float],  # the clock
        shortage: Callable[[], str],  # why this process gets no socket; empty if it does
        here: str,  # this machine, as `machine_id` identifies it
    ) -> None:
        self._engine, self._resolver, self._config = engine, resolver, config
        self._settings = Settings(pool_size=pool_size, lanes=config.lanes)
        self._local, self._rendezvous, self._now = local, rendezvous, now
        self._shortage = shortage
        self._limit_s, self._machine = config.handshake_timeout_s, here
        self._open: dict[int, _Stream] = {}
        self._waiting: dict[int, _Stream] = {}  # those that are not connected yet
        self._without_ipc: set[int] = set()  # neighbors on this machine, reached by TCP instead
        # peers to which the latest stream failed at once, and when
        self._doubted: dict[int, float] = {}
        self._refused = 0  # streams in a row for which there was no socket

    @property
    def ends(self) -> list[Address]:
        """The remote addresses, as the sockets report them."""
        direct = [one.endpoint for one in self._open.values() if one.endpoint and not one.via]
        endpoints = [endpoint.partition("://") for endpoint in direct]
        ends = [rest if scheme == "ipc" else _host_and_port(rest) for scheme, _, rest in endpoints]
        met = {_host_and_port(one.via) for one in self._open.values() if one.via}
        return [*ends, *met, *self._rendezvous.visited]

    @property
    def neighbors(self) -> list[tuple[m.PeerInfo, tuple[str, int]]]:
        """The peers that streams reach by TCP, and their addresses; from any thread."""
        direct = [one for one in [*self._open.values()] if not one.via]
        open_ = [(one.to, one.endpoint.partition("tcp://")[2]) for one in direct]
        return [(to, _host_and_port(rest)) for to, rest in open_ if rest]

    @property
    def due_s(self) -> float:
        if not self._waiting:
            return math.inf
        return min(t for each in self._waiting.values() for t in (each.due_s, each.retry_s) if t)

    def open(self, number: int, to: m.PeerInfo, nonce: int, shares: int = 1) -> None:
        """Opens a stream to a peer, and connects it when the address is known (`OpenStream`)."""
        now = self._now()
        one = _Stream(to, nonce, now, now + self._limit_s, shares=shares)
        self._open[number] = self._waiting[number] = one
        self._engine.open_stream(number)
        if self._uses_ipc(to):
            self._connect(number, one, f"ipc://{to.ipc}")
        elif to.outgoing:
            self._request_rendezvous(number, one)
        else:
            self._find(number, one)

    def close(self, number: int) -> None:
        """Closes a stream, which may have been lost."""
        self._open.pop(number, None)
        self._waiting.pop(number, None)
        self._engine.close_stream(number)

    def up(self, number: int) -> None:
        self._refused = 0
        self._waiting.pop(number, None)
        one = self._open.get(number)
        if one is not None:
            one.up = True
            self._doubted.pop(one.to.peer, None)

    def was_up(self, number: int) -> bool:
        one = self._open.get(number)
        return one is not None and one.up

    def lost(self, event: Event) -> tuple[m.PeerInfo | None, bool]:
        """The peer of a lost stream (None if it was closed), and whether it is unreachable.

        A peer does not count as unreachable if this process gets no socket. Neither does a peer
        whose stream fails at once for the first time, with others that are open by then: it may
        have lacked memory for a moment, or be dying.
        Raises Refused: this process got no socket for the third time in a row.
        """
        self._waiting.pop(event.stream, None)
        one = self._open.get(event.stream)
        if one is None:
            return None, False
        if event.status == REFUSED or one.refused:
            self._refused += one.shares == 1  # the rings can replace all other streams
            if self._refused == limits.STREAMS_REFUSED_MAX:
                times = f"{limits.STREAMS_REFUSED_MAX} times in a row"
                why = f"this process gets no sockets, {times}: {event.text}"
                raise Refused(f"{why} (raise `ulimit -n`, or close files)")
            return one.to, False
        if event.status not in (UNREACHABLE, ANOTHER):
            return one.to, False
        if one.endpoint.startswith("ipc:"):
            self._do_without_ipc(one.to, event.text)
            return one.to, False  # the next stream shows whether it can be reached
        if one.ways is not None:
            one.why_lost = self._resolver.useless(one.ways, self.text(event))
        now = self._now()
        if now < one.due_s and one.opened_s <= self._doubted.setdefault(one.to.peer, now):
            return one.to, False
        return one.to, True

    def text(self, event: Event) -> str:
        one = self._open.get(event.stream)
        return (one and one.why_lost) or event.text

    def why(self, event: Event) -> str:
        """Why an op has failed. If a stream is the reason, this names the peer at its other end."""
        if not event.stream:
            return event.text
        one = self._open.get(event.stream)
        whom = "a neighbor" if one is None else one.to
        return f"its connection to {whom}: {self.text(event)}"

    def tick(self) -> None:
        if not self._waiting:
            return
        now = self._now()
        for number, one in list(self._waiting.items()):
            if one.due_s <= now:
                del self._waiting[number]
                self._engine.lose_stream(number, self._problem(one))
            elif one.retry_s and one.retry_s <= now:
                one.retry_s = 0.0
                self._find(number, one)

    def clear(self) -> None:
        self._open.clear()
        self._waiting.clear()

    def _find(self, number: int, one: _Stream, relay: m.PeerInfo | None = None) -> None:
        """Connects a stream when an address of its peer, or of a relay, is known."""
        if relay is not None:
            one.ways = Ways(reach.ways(relay, self._machine), relay.relay, greets=False)
        elif one.ways is None:
            one.ways = Ways(reach.ways(one.to, self._machine), one.to.port)
            one.due_s += limits.STREAM_LATE_S if len(one.ways.hosts) > 1 else 0.0
        found = partial(self._found, number, relay)
        self._resolver.reach(one.ways, self._limit_s, found)

    def _found(self, number: int, relay: m.PeerInfo | None, found: Found) -> None:
        one = self._waiting.get(number)
        if one is None:
            return  # the stream was closed or abandoned meanwhile
        one.why = found.why
        if found.address and relay is not None:
            log.warning("the stream to %s goes by way of %s, which relays", one.to, relay)
            via = address_text(found.address, relay.relay)
            self._connect(number, one, destination(one.token, SENDS), via)
        elif found.address:
            self._connect(number, one, f"tcp://{address_text(found.address, one.to.port)}")
        elif relay is not None:
            return  # `tick` abandons it
        elif not all(map(is_address, one.ways.hosts if one.ways else ())):  # it may resolve soon
            one.retry_s = self._now() + limits.NAME_RETRY_S
        else:
            del self._waiting[number]
            one.why_lost = f"no address of it answers at port {one.to.port} ({found.why})"
            self._engine.lose_stream(number, one.why_lost)

    # ---- peers that accept no connections ----

    def arranged(self, message: m.Rendezvous) -> None:
        if isinstance(message, m.RendezvousJoin):
            self._rendezvous.join(message)
        elif isinstance(message, m.RendezvousRelay):
            self._rendezvous.relay(message)
        else:
            self._answered(message)

    def _request_rendezvous(self, number: int, one: _Stream) -> None:
        try:
            one.token, via = self._rendezvous.ask(one.to, self._lanes_met(one))
        except OSError as error:
            one.why, one.refused = f"cannot listen for {one.to}: {error}", True
            return  # `tick` abandons it
        if via:
            self._connect(number, one, destination(one.token, SENDS), via)

    def _answered(self, answer: m.RendezvousResult) -> None:
        """The answer to a peer that cannot be reached itself."""
        found = [number for number, one in self._waiting.items() if one.token == answer.token]
        for number in found:
            if answer.relay is None:
                del self._waiting[number]
                self._engine.lose_stream(number, answer.why)
            else:
                self._find(number, self._waiting[number], answer.relay)

    def _lanes_met(self, one: _Stream) -> int:
        return -(-(lanes(False, self._settings) or limits.RENDEZVOUS_LANES) // one.shares)

    def _connect(self, number: int, one: _Stream, endpoint: str, via: str = "") -> None:
        one.via = via
        one.endpoint, one.due_s = endpoint, self._now() + self._limit_s + limits.STREAM_LATE_S
        local = self._local(one.to)
        self._engine.connect_stream(
            number,
            endpoint,
            lanes=self._lanes_met(one) if via else -(-lanes(local, self._settings) // one.shares),
            shares=one.shares,
            hwm=high_water_mark(local),
            peer=one.to.peer,
            nonce=one.nonce,
            curve_server=one.to.curve,
            via=via,
        )

    def _problem(self, one: _Stream) -> str:
        limit_s = self._limit_s + limits.STREAM_LATE_S
        if one.via:
            port = one.via.rpartition(":")[2]
            where = f"at port {port} of this one" if self._rendezvous.port == int(port) else "there"
            return (
                f"{one.to} only dials out, and it did not come to {one.via} within {limit_s:.3g} s:"
                f" it must be able to connect {where} (PCCL_PORT_RANGE sets which port that is)"
            )
        if one.token and not one.why:
            return f"the master did not say within {limit_s:.3g} s where to meet {one.to}"
        if one.endpoint:
            why = self._shortage()
            one.refused = bool(why)
            return f"no lane to {one.endpoint} stood within {limit_s:.3g} s{why}"
        if one.why:
            return f"{one.why} (tried for {self._limit_s:.3g} s)"
        hosts = " or ".join(one.to.hosts)
        return f"the name {hosts} did not resolve within {self._limit_s:.3g} s"

    # ---- the same machine ----

    def _uses_ipc(self, to: m.PeerInfo) -> bool:
        """True if a stream uses ipc: the peer's socket file must still exist."""
        if not self._local(to) or to.peer in self._without_ipc:
            return False
        try:
            if stat.S_ISSOCK(os.stat(to.ipc).st_mode):
                return True
            why = "it is not a socket"
        except OSError as error:
            why = error.strerror or str(error)
        self._do_without_ipc(to, why)
        return False

    def _do_without_ipc(self, to: m.PeerInfo, why: str) -> None:
        log.warning("%s is not reached at %s (%s): it uses TCP from now on", to, to.ipc, why)
        self._without_ipc.add(to.peer)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def shortage() -> str:
    """Why the system refuses this process a socket, if it does; libzmq does not report this."""
    try:
        socket.socket().close()
    except OSError as error:
        return f": this process gets no socket ({error.strerror})"
    return ""
