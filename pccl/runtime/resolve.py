"""Resolves host names in separate threads, and finds which of several addresses answers first.

If a name server is silent, resolving a name may take half a minute. libzmq would resolve names in
the thread that moves all data. So sockets connect only to numeric addresses.

The next address is tried before the previous one has failed, which RFC 8305 recommends: addresses
in an unreachable network are usually silent and rarely refuse connections. A peer's engine greets
every client; only the handshake of a stream shows whether it is the right peer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

from pccl.runtime import limits
from pccl.runtime.config import Config
from pccl.support import numeric

GREETING = b"\xff"  # the first byte of ZMTP
BEGUN = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK)


def destination(address: str, port: int) -> tuple[Any, ...]:
    """The result of `socket.getaddrinfo` for a numeric address. Raises OSError for others."""
    host = address.encode(errors="replace")  # a str would load tables of international names: 4 ms
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]


def first_to_answer(
    addresses: Sequence[str], port: int, limit_s: float, greets: bool
) -> tuple[str, dict[str, str]]:
    """The first address that answers ("": none does), and why others do not, if known.

    Numeric addresses are tried in their order, with one time limit for all of them. `greets`:
    whether the listener must send a greeting; otherwise a connection is enough.
    """
    race = _Race(port, greets, min(limits.STAGGER_S, limit_s / (1 + len(addresses))))
    try:
        return race.run(list(addresses), time.monotonic() + limit_s), race.failed
    finally:
        race.close(f"no answer within {limit_s:.3g} s")


class _Race:
    def __init__(self, port: int, greets: bool, stagger_s: float) -> None:
        self._port, self._greets, self._stagger_s = port, greets, stagger_s
        self._selector = selectors.DefaultSelector()
        self.failed: dict[str, str] = {}

    def run(self, waiting: list[str], until_s: float) -> str:
        """Returns the first address that answers, or "" if none does in time."""
        next_s = now = time.monotonic()
        while now < until_s and (waiting or self._selector.get_map()):
            if waiting and (now >= next_s or not self._selector.get_map()):
                self._begin(waiting.pop(0))
                next_s = now + self._stagger_s
                continue
            due_s = min(next_s, until_s) if waiting else until_s
            for key, _ in self._selector.select(max(0.0, due_s - now)):
                assert isinstance(key.fileobj, socket.socket)
                if self._answers(key.fileobj, key.data):
                    return str(key.data)
            now = time.monotonic()
        self.failed.update(dict.fromkeys(waiting, "there was no time to try it"))
        return ""

    def close(self, why: str) -> None:
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            self._end(key.fileobj, key.data, why)
        self._selector.close()

    def _begin(self, address: str) -> None:
        try:
            family, kind, protocol, _, where = destination(address, self._port)
            attempt = socket.socket(family, kind, protocol)
        except OSError as error:
            self.failed[address] = error.strerror or str(error)
            return
        attempt.setblocking(False)
        number = attempt.connect_ex(where)
        if number in BEGUN:
            self._selector.register(attempt, selectors.EVENT_WRITE, address)
        else:
            attempt.close()
            self.failed[address] = os.strerror(number)

    def _answers(self, attempt: socket.socket, address: str) -> bool:
        """True if an attempt has succeeded. Ends it if it has failed."""
        number = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(attempt, address, os.strerror(number))
            return False
        if not self._greets:
            return True
        self._selector.modify(attempt, selectors.EVENT_READ, address)
        try:
            received = attempt.recv(len(GREETING))
        except OSError as error:
            if error.errno not in NOT_YET:
                self._end(attempt, address, error.strerror or str(error))
            return False
        if received != GREETING:
            self._end(attempt, address, "something else than a pccl peer answers")
        return received == GREETING

    def _end(self, attempt: socket.socket, address: str, why: str) -> None:
        self._selector.unregister(attempt)
        attempt.close()
        self.failed.setdefault(address, why)


log = logging.getLogger("pccl")

R = TypeVar("R")


class Found(NamedTuple):
    """The result of a look-up: an address, or the reason why there is none."""

    address: str
    why: str = ""


_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # the beginning of ZeroMQ's greeting
_SAID_MAX = 40  # bytes of another service's greeting that errors show

Then = Callable[[Found], None]
WORLD = "192.0.2.1", "2001:db8::1"  # addresses for documentation: packets take default routes


def is_address(host: str) -> bool:
    """True if a host is a numeric address (IPv6 may have a zone), not a name."""
    return numeric(host) is not None


def everywhere(address: str) -> str:
    """The wildcard address to listen on; "::" includes IPv4 if the system has both."""
    return "::" if ":" in address or socket.has_dualstack_ipv6() else "0.0.0.0"


def further_hosts(config: Config, address: str) -> tuple[str, ...]:
    """The hosts at which a peer may be reached besides its first host.

    If `config` has none, these are the local addresses of connections to the master, and to the
    internet by IPv4 and by IPv6. The kernel knows them; nothing is sent.
    """
    if config.advertise or config.outgoing:
        return config.advertise[1:]
    return tuple(dict.fromkeys(filter(None, map(_source, (address, *WORLD)))))


def _source(destination: str) -> str:
    """This machine's address in connections to another one; "" if others cannot use it."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            source = str(probe.getsockname()[0])
    except OSError:
        return ""  # there is no route to that network
    known = ip_address(source)
    return "" if known.is_loopback or known.is_link_local or known.is_unspecified else source


def asked(host: str) -> queue.SimpleQueue[list[str] | OSError]:
    """Looks a host up in a thread. The queue receives its addresses, or why there are none.

    Raises OSError: no thread can be started.
    """
    found: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()
    _in_thread(lambda: found.put(_look_up(host)))
    return found


def addresses(host: str, limit_s: float) -> list[str]:
    """The addresses of a host, IPv4 first, because every peer listens there.

    Raises OSError: the host has none, or the look-up took longer than the limit.
    """
    if is_address(host):
        return [host]
    found = asked(host)
    try:
        result = found.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        raise TimeoutError(f"the name {host} did not resolve within {limit_s:.3g} s") from None
    if isinstance(result, OSError):
        raise result
    return result


def reachable(host: str, port: int, limit_s: float) -> str:
    """The first address of a host at which a master answers at a port.

    This is the first address that sends ZeroMQ's greeting. If none does, all addresses are tried in
    turn, each for an equal share of the remaining time, to find out why. Raises OSError: no master
    was found in about `limit_s`; the text says why.
    """
    until_s = time.monotonic() + limit_s
    problem = OSError(f"the name {host} has no address")
    found = addresses(host, limit_s)
    if len(found) > 1:
        address, _ = first_to_answer(found, port, limit_s / 2, greets=True)
        if address:
            return address
    for untried, address in zip(range(len(found), 0, -1), found, strict=True):
        share_s = max(0.001, (until_s - time.monotonic()) / untried)
        try:
            _try_connecting(address, port, share_s)
            return address
        except OSError as error:
            problem = error
    raise problem


class AnotherServiceError(OSError):
    """The service at the master's address is not a master."""


def _try_connecting(address: str, port: int, limit_s: float) -> None:
    """Connects to a numeric address, and checks that a ZeroMQ socket answers.

    Raises OSError: connecting fails or takes longer than the limit, or another service answers.
    """
    began_s = time.monotonic()
    family, kind, _, _, where = destination(address, port)
    with socket.socket(family, kind) as connection:
        connection.settimeout(limit_s)
        connection.connect(where)
        greeting = _greeting(connection, limit_s - (time.monotonic() - began_s))
    if greeting and greeting[0] != _SIGNATURE[0]:
        raise AnotherServiceError(f"another service answers there: it says {greeting!r}")


def _greeting(connection: socket.socket, limit_s: float) -> bytes:
    """The other side's first bytes; empty if it hangs up or takes too long.

    A ZeroMQ socket sends its greeting at once. Other services may wait for the client's first
    bytes, or never answer.
    """
    within_s = max(0.001, min(limit_s, limits.GREETING_S))
    for part in (1 / 8, 7 / 8):
        connection.settimeout(part * within_s)
        try:
            return connection.recv(_SAID_MAX)
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.sendall(_SIGNATURE)
        except ConnectionError:
            return b""
    if limit_s < limits.GREETING_S:
        return b""
    raise AnotherServiceError(
        f"it accepts connections, and said nothing for {within_s:g} s: it is another service, or "
        "a master that is stopped or has no descriptors left (its log says so)"
    )


def _in_thread(work: Callable[[], None]) -> None:
    """Raises OSError if no thread can be started."""
    try:
        threading.Thread(target=work, name="pccl-resolver", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread to resolve a name in: {error}") from None


def _look_up(host: str) -> list[str] | OSError:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, MemoryError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return OSError(f"the name {host} does not resolve: {why}")
    by_family = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in by_family))


def _whys(failed: dict[str, str]) -> str:
    return "; ".join(f"{address}: {why}" for address, why in failed.items())


class Ways(NamedTuple):
    """Hosts of a peer, its port at all of them, and whether it sends a greeting there."""

    hosts: tuple[str, ...]
    port: int
    greets: bool = True

    def first(self, but: dict[str, str], limit_s: float) -> tuple[str, dict[str, str]]:
        """The first address that answers, and why others do not; takes up to `limit_s`.

        Addresses in `but` are left out, unless there are no others.
        """
        until_s, failed = time.monotonic() + limit_s, dict[str, str]()
        found: dict[str, None] = {}
        for host in self.hosts:
            result = [host] if is_address(host) else _look_up(host)
            if isinstance(result, OSError):
                failed[host] = str(result)
            else:
                found.update(dict.fromkeys(result))
        left_s = max(limit_s / 2, until_s - time.monotonic())  # look-ups may have taken long
        tried = [address for address in found if address not in but] or [*found]
        address, whys = first_to_answer(tried, self.port, left_s, self.greets)
        return address, {**but, **failed, **whys}


class Resolver:
    """Resolves names for one thread, in which the callbacks run; `post` queues work for it."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._known: dict[str, tuple[list[str], float]] = {}  # addresses, and until when
        self._asked: dict[object, list[Then]] = {}  # the callbacks of each pending look-up
        self._working: dict[Ways, str] = {}  # the address that has answered
        self._useless: dict[Ways, dict[str, str]] = {}  # addresses that did not work, and why

    def find(self, host: str, then: Then) -> None:
        """Calls `then` with the address of a host: at once if it is known."""
        addresses, until_s = self._known.get(host, ([], 0.0))
        if is_address(host):
            then(Found(host))
        elif time.monotonic() < until_s:
            then(Found(addresses[0]))
        else:
            self._ask(host, lambda: _look_up(host), partial(self._looked_up, host), then)

    def answering(self, host: str, port: int, limit_s: float, then: Then) -> None:
        """Like `find`, but chooses the first of several addresses that answers at a port."""

        def found(first: Found) -> None:
            addresses = [*self._known.get(host, ([], 0.0))[0]]
            if not first.address or len(addresses) < 2:
                then(first)
                return
            self._ask(
                (host, port),
                lambda: first_to_answer(addresses, port, limit_s, greets=True),
                lambda result: Found(result[0], _whys(result[1])),
                then,
            )

        self.find(host, found)

    def reach(self, ways: Ways, limit_s: float, then: Then) -> None:
        """Calls `then` with an address at which a peer answers: at once if it has only one."""
        if len(ways.hosts) == 1:
            self.find(ways.hosts[0], then)
        elif ways in self._working:
            then(Found(self._working[ways]))
        else:
            but = self._useless.get(ways, {})
            self._ask(ways, lambda: ways.first(but, limit_s), partial(self._raced, ways), then)

    def _ask(
        self, key: object, work: Callable[[], R], learn: Callable[[R], Found], then: Then
    ) -> None:
        """Does the work in a thread, unless one already does, and calls `then` with the outcome."""
        waiting = self._asked.setdefault(key, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def notify(found: Found) -> None:
            for each in self._asked.pop(key, []):
                each(found)

        def run() -> None:
            result = work()
            self._post(lambda: notify(learn(result)))

        try:
            _in_thread(run)
        except OSError as error:
            notify(Found("", str(error)))

    def _looked_up(self, host: str, result: list[str] | OSError) -> Found:
        if isinstance(result, OSError):
            return Found("", str(result))
        self._known[host] = result, time.monotonic() + limits.NAME_KEPT_S
        return Found(result[0])

    def _raced(self, ways: Ways, result: tuple[str, dict[str, str]]) -> Found:
        address, whys = result
        self._useless[ways] = whys if address else {}  # next time all have another chance
        if not address:
            return Found("", _whys(whys))
        self._useless[ways].pop(address, None)
        self._working[ways] = address
        log.info("of %s, %s answers first (%s)", ways.hosts, address, whys)
        return Found(address)

    def useless(self, ways: Ways, why: str) -> str:
        """Notes that connecting to the last address failed: other addresses go first next time.

        Returns:
            Why it failed, and why the other addresses did not answer.
        """
        self.failed(ways.hosts[0])
        address = self._working.pop(ways, "")
        if not address:
            return why
        others = {at: said for at, said in self._useless[ways].items() if at != address}
        self._useless[ways][address] = why
        return "; ".join(filter(None, (why, _whys(others))))

    def failed(self, host: str) -> None:
        """The latest address does not answer: the next look-up returns another, if any."""
        addresses, _ = self._known.get(host, ([], 0.0))
        addresses[:] = [*addresses[1:], *addresses[:1]]

    def forget(self) -> None:
        """Drops the callbacks of all pending look-ups."""
        self._asked.clear()
