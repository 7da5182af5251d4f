"""Resolves host names in separate threads.

Resolving a name may take half a minute if a name server is silent, and libzmq would do it in the
thread that moves all data. So sockets connect only to numeric addresses.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pccl.runtime import limits

log = logging.getLogger("pccl")


class Found(NamedTuple):
    """The result of a look-up: an address, or the reason why there is none."""

    address: str
    why: str = ""


Then = Callable[[Found], None]


def is_address(host: str) -> bool:
    """Whether a host is a numeric address (IPv6 may have a zone), and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def everywhere(address: str) -> str:
    """The wildcard address to listen on: of IPv6 if the master is reached by IPv6.

    Args:
        address: the master's address.
    """
    return "::" if ":" in address else "0.0.0.0"


def asked(host: str) -> queue.SimpleQueue[list[str] | OSError]:
    """Looks a host up in a thread. The queue receives its addresses, or why there are none.

    Raises:
        OSError: there is no thread to be had.
    """
    found: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()
    _in_thread(lambda: found.put(_look_up(host)))
    return found


def addresses(host: str, limit_s: float) -> list[str]:
    """The addresses of a host, IPv4 first, because every peer listens there.

    Raises:
        OSError: there are none, or the look-up took longer than the limit.
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
    """The first address of a host that accepts a connection to a port.

    All are tried in turn, each for an equal share of the time that is left: one that swallows what
    is sent to it leaves enough for the others.

    Raises:
        OSError: there is none, or it was not found in about that time; the text says why.
    """
    until_s = time.monotonic() + limit_s
    problem = OSError(f"the name {host} has no address")
    found = addresses(host, limit_s)
    for untried, address in zip(range(len(found), 0, -1), found, strict=True):
        share_s = max(0.001, (until_s - time.monotonic()) / untried)
        try:
            with socket.create_connection((address, port), share_s):
                return address
        except OSError as error:
            problem = error
    raise problem


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


class _Known(NamedTuple):
    addresses: list[str]
    until_s: float


class Resolver:
    """Resolves names for one thread, in which the callbacks run.

    Args:
        post: queues a function to be run by that thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._known: dict[str, _Known] = {}
        self._asked: dict[str, list[Then]] = {}  # look-ups in progress, and their callbacks

    def find(self, host: str, then: Then) -> None:
        """Calls `then` with the address of a host: at once if it is known."""
        known = self._known.get(host)
        if is_address(host):
            then(Found(host))
        elif known is not None and time.monotonic() < known.until_s:
            then(Found(known.addresses[0]))
        elif host in self._asked:
            self._asked[host].append(then)
        else:
            self._asked[host] = [then]
            try:
                _in_thread(lambda: self._work(host))
            except OSError as error:
                self._tell(host, error)

    def failed(self, host: str) -> None:
        """Nobody answers at the latest address: the next look-up returns another, if any."""
        known = self._known.get(host)
        if known is not None:
            known.addresses.append(known.addresses.pop(0))

    def forget(self) -> None:
        """Drops all callbacks."""
        self._asked.clear()

    def _work(self, host: str) -> None:
        result = _look_up(host)
        self._post(lambda: self._tell(host, result))

    def _tell(self, host: str, result: list[str] | OSError) -> None:
        if isinstance(result, OSError):
            found = Found("", str(result))
        else:  # kept even if nobody waits any more: it may be needed again
            self._known[host] = _Known(result, time.monotonic() + limits.NAME_KEPT_S)
            found = Found(result[0])
        for then in self._asked.pop(host, []):
            then(found)
