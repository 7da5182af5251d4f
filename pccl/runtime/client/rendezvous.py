"""Streams to peers that cannot be reached: both ends connect to a rendezvous point.

A peer behind NAT can connect to others, but they cannot connect to it. So the sender of a stream,
or a third peer that relays, listens, and both ends of each lane connect there. They use SOCKS 5
(RFC 1928), as libzmq does, up to the answer. The requested destination is a token, which the master
has passed on, and a side. From then on, the C core's pump moves their bytes, without the
interpreter. The ends authenticate each other as on any other stream, and encrypt if they have keys.
Connections that name no expected token are closed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from pccl.ext import lib
from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine
from pccl.runtime.config import Config
from pccl.runtime.resolve import Found, Resolver, Ways
from pccl.runtime.resources import EXHAUSTED
from pccl.runtime.sockets import Waiter
from pccl.support import address_text

log = logging.getLogger("pccl")

SENDS, TAKES = 1, 2  # the sides, as ports of a destination
VERSION, CONNECT, IPV6 = 5, 1, 4  # of SOCKS
REQUEST_BYTES = 22  # with an IPv6 address, which holds the token, and a port
WELCOME = bytes((VERSION, 0))  # no further proof is required
JOINED = bytes((VERSION, 0, 0, 1, 0, 0, 0, 0, 0, 0))
UNSENT_BYTES = 1 << 17  # as in c/engine/tcp.h; tcp.c has the reasons
UNSENT_OPTION, PACING_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", 25), 47
_JOINT = struct.Struct("@qq")  # a pccl_joint


class _Invalid(Exception):
    """A connection does not follow the protocol."""


class _Guest:
    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self.received = b""
        self.greeted = False
        self.place: tuple[str, int] | None = None  # the token and the side

    def receive(self) -> bool:
        """Reads the bytes that have arrived. Returns whether its place has just become known.

        Raises OSError, _Invalid: the connection must be closed.
        """
        try:
            data = self.connection.recv(limits.GUEST_BYTES)
        except BlockingIOError:
            return False
        self.received += data
        if not data or self.place is not None or len(self.received) > limits.GUEST_BYTES:
            raise _Invalid
        if not self.greeted:
            if self.received[0] != VERSION:
                raise _Invalid
            end = 2 + self.received[1] if len(self.received) > 1 else 2
            if len(self.received) < end:
                return False
            self.greeted, self.received = True, self.received[end:]
            self.connection.sendall(WELCOME)
        received = self.received
        if len(received) < REQUEST_BYTES:
            return False
        side = int.from_bytes(received[-2:], "big")
        valid = received[:4] == bytes((VERSION, CONNECT, 0, IPV6)) and side in (SENDS, TAKES)
        if not valid or len(received) > REQUEST_BYTES:
            raise _Invalid
        self.place = received[4:-2].hex(), side
        return True


class RendezvousPoint:
    """A rendezvous point and its two threads.

    It listens at `host` ("::": IPv6 and IPv4) on the first free port of `ports`, or on any port if
    `ports` is empty. A connection waits `limit_s` for the other side. Raises OSError: it cannot
    listen, or the system provides no thread.
    """

    def __init__(self, host: str, ports: Sequence[int], limit_s: float) -> None:
        self._limit_s = limit_s
        self._awaited: queue.SimpleQueue[str] = queue.SimpleQueue()  # tokens, by other threads
        self._expected: dict[str, float] = {}  # until when
        self._guests: dict[socket.socket, _Guest] = {}
        self._waiting: dict[tuple[str, int], list[_Guest]] = {}
        self._closed = False
        self._resumes_s: float | None = None  # when it accepts connections again; None: it does
        self._said_s = -limits.LOG_REPEAT_S  # when it last logged why it does not
        with contextlib.ExitStack() as made:
            self._listener = made.enter_context(_listen(host, ports))
            self.port = int(self._listener.getsockname()[1])  # where it listens
            self._control, self._pump_end = map(made.enter_context, socket.socketpair())
            self._waiter = Waiter()
            made.callback(self._waiter.close)
            self._threads = [
                threading.Thread(target=self._pump, name="pccl-pump", daemon=True),
                threading.Thread(target=self._serve, name="pccl-rendezvous", daemon=True),
            ]
            self._pump_end.setblocking(False)
            self._waiter.add(self._listener, self._accept)
            try:
                for thread in self._threads:
                    thread.start()
            except RuntimeError as error:
                self._control.close()
                raise OSError(errno.EAGAIN, f"no thread for a rendezvous point: {error}") from None
            self._opened = made.pop_all()

    def expect(self, token: str) -> None:
        """Joins, for a while from now on, connections that name this token; from any thread."""
        self._awaited.put(token)
        self._waiter.wake()

    def close(self) -> None:
        """Closes all connections, and returns when its threads have ended."""
        self._closed = True
        self._waiter.wake()
        for thread in reversed(self._threads):
            thread.join()
        self._opened.close()

    def _pump(self) -> None:
        status = lib.pccl_pump_run(self._pump_end.fileno())
        if status < 0:
            log.error("the rendezvous point cannot join connections any more (status %d)", status)

    # ---- the thread that joins them ----

    def _serve(self) -> None:
        try:
            while not self._closed:
                dues_s = [guest.until_s for guest in self._guests.values()]
                due_s = min([*dues_s, *filter(None, [self._resumes_s])], default=None)
                now_s = time.monotonic()
                wait_s = None if due_s is None else max(0.0, due_s - now_s)
                for read in self._waiter.wait(wait_s):
                    read()
                self._expect_awaited()
                self._expire(time.monotonic())
        except Exception:
            log.exception("the rendezvous point at port %d failed", self.port)
        finally:
            for guest in list(self._guests.values()):
                self._send_away(guest)
            self._control.close()  # which ends the pump

    def _expect_awaited(self) -> None:
        while not self._awaited.empty():
            token = self._awaited.get()
            self._expected[token] = time.monotonic() + self._limit_s + limits.STREAM_LATE_S
            self._join(token)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # the connection waits; an immediate retry would spin
                now_s = time.monotonic()
                self._waiter.remove(self._listener)
                self._resumes_s = now_s + limits.DESCRIPTORS_REST_S
                if now_s - self._said_s >= limits.LOG_REPEAT_S:
                    self._said_s = now_s
                    why = error.strerror
                    log.warning("peers cannot meet this one at port %d: %s", self.port, why)
            return  # else it has gone already
        connection.setblocking(False)
        if len(self._guests) >= limits.GUESTS_MAX:
            self._send_away(min(self._guests.values(), key=lambda guest: guest.until_s))
        guest = _Guest(connection, time.monotonic() + self._limit_s)
        self._guests[connection] = guest
        self._waiter.add(connection, lambda: self._receive(guest))

    def _receive(self, guest: _Guest) -> None:
        if guest.connection not in self._guests:
            return  # joined or sent away in the same round
        try:
            placed = guest.receive()
        except (OSError, _Invalid):
            self._send_away(guest)
            return
        if placed:
            assert guest.place is not None
            self._waiting.setdefault(guest.place, []).append(guest)
            self._join(guest.place[0])

    def _join(self, token: str) -> None:
        senders, takers = (self._waiting.get((token, side), []) for side in (SENDS, TAKES))
        while token in self._expected and senders and takers:
            pair = senders[0], takers[0]
            for guest in pair:
                self._forget(guest)
            try:
                for guest in pair:
                    _prepare(guest.connection)
                    guest.connection.sendall(JOINED)
            except OSError:  # one of them has gone; the other one will notice
                for guest in pair:
                    guest.connection.close()
                continue
            self._control.sendall(_JOINT.pack(*(guest.connection.detach() for guest in pair)))

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.connection]
        self._waiter.remove(guest.connection)
        if guest.place is not None:
            self._waiting[guest.place].remove(guest)
            if not self._waiting[guest.place]:
                del self._waiting[guest.place]

    def _send_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.connection.close()

    def _expire(self, now_s: float) -> None:
        if self._resumes_s is not None and self._resumes_s <= now_s:
            self._resumes_s = None
            self._waiter.add(self._listener, self._accept)
        for guest in [guest for guest in self._guests.values() if guest.until_s <= now_s]:
            self._send_away(guest)
        while self._expected and self._expected[next(iter(self._expected))] <= now_s:
            del self._expected[next(iter(self._expected))]


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or (0,):
        try:
            listener = socket.create_server(
                (host, port), family=family, backlog=128, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            if not ports or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            listener.setblocking(False)
            return listener
    why = f"none of the ports {ports[0]} to {ports[-1]} is free for a rendezvous point"
    raise OSError(errno.EADDRINUSE, f"{why}: it takes one more than the peer itself")


def _prepare(connection: socket.socket) -> None:
    """Makes the kernel send at once and keep little unsent; pacing is not available everywhere."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, PACING_OPTION, struct.pack("@I", 0xFFFFFFFE))


def destination(token: str, side: int) -> str:
    """The endpoint that tells a rendezvous point which connections belong together.

    It looks like an address, so that libzmq does not look up a name when a connection ends.
    """
    groups = ":".join(token[i : i + 4] for i in range(0, len(token), 4))
    return f"tcp://[{groups}]:{side}"


class Rendezvous:
    """This peer's rendezvous point, if it has one, and its connections to other peers' points.

    A relay has a point from the beginning, because the port is in its first message. Any other peer
    opens a point when it first must send to a peer that only dials out. Raises OSError: this peer
    should relay, and cannot listen.
    """

    def __init__(
        self,
        engine: Engine,  # connects to rendezvous points
        resolver: Resolver,  # resolves their names
        config: Config,  # whether this peer relays, whether it can be reached, and its ports
        # makes a rendezvous point that listens on one of these ports, with a time limit
        point: Callable[[Sequence[int], float], RendezvousPoint],
        token: Callable[[], str],  # makes a secret
        send: Callable[[m.RendezvousRequest], None],  # sends a message to the master
    ) -> None:
        self._engine, self._resolver, self._config = engine, resolver, config
        self._make_point, self._token, self._send = point, token, send
        self._point: RendezvousPoint | None = None
        self._visited: set[tuple[str, int]] = set()
        self._relayed: set[tuple[int, int]] = set()
        if config.relay:
            log.warning("this peer relays streams of peers that cannot connect to each other")
            self._open()

    @property
    def port(self) -> int:
        """The port of the rendezvous point; 0: there is none."""
        return 0 if self._point is None else self._point.port

    @property
    def visited(self) -> set[tuple[str, int]]:
        return {*self._visited, ("127.0.0.1", self.port)} if self.port else {*self._visited}

    def ask(self, to: m.PeerInfo, lanes: int) -> tuple[str, str]:
        """Asks a peer to connect to a stream from this one.

        Returns the token of their rendezvous, and the `address:port` of its point, which is empty
        if the master must choose the place. Raises OSError: this peer cannot listen.
        """
        token = self._token()
        if self._config.outgoing:
            self._send(m.RendezvousRequest(to.peer, token, 0, lanes))
            return token, ""
        point = self._open()
        point.expect(token)
        self._send(m.RendezvousRequest(to.peer, token, point.port, lanes))
        return token, f"127.0.0.1:{point.port}"

    def join(self, join: m.RendezvousJoin) -> None:
        """The master says where a sender waits for this peer."""

        def found(it: Found) -> None:
            if not it.address:
                log.warning(
                    "%s cannot be met at %s: %s", join.sender, " or ".join(join.hosts), it.why
                )
                return
            self._visited.add((it.address, join.port))
            via = address_text(it.address, join.port)
            self._engine.meet(destination(join.token, TAKES), via, join.lanes)

        ways = Ways(join.hosts, join.port, greets=False)
        self._resolver.reach(ways, self._config.handshake_timeout_s, found)

    def relay(self, relay: m.RendezvousRelay) -> None:
        if self._point is None:
            return  # it was never offered
        pair = relay.sender.peer, relay.receiver.peer
        if pair not in self._relayed:
            self._relayed.add(pair)
            log.warning("this peer relays from %s to %s", relay.sender, relay.receiver)
        self._point.expect(relay.token)

    def close(self) -> None:
        if self._point is not None:
            self._point.close()

    def _open(self) -> RendezvousPoint:
        if self._point is None:
            ports = [port for port in self._config.ports if port != self._engine.port]
            limit_s = self._config.handshake_timeout_s + limits.STREAM_LATE_S
            self._point = self._make_point(ports, limit_s)
            log.info("peers that only dial out meet this one at port %d", self._point.port)
        return self._point
