"""Helpers for all layers: arguments as users write them, their types, addresses and ports."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self, SupportsIndex

DEFAULT_PORT = 48148  # the port of a master
ADVERTISED_MAX = 8  # hosts that a peer may advertise
KEY = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")  # a CURVE key in Z85


def require(what: str, value: object, kind: type) -> None:
    """Raises TypeError unless an argument is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {value!r}: it must be of type {kind.__name__}")


def whole(
    what: str,
    value: SupportsIndex,
    within: range | None = None,
    error: type[Exception] = ValueError,
    *,
    least: int | None = None,
) -> int:
    """An argument that is a whole number, possibly one of numpy's.

    Raises TypeError: it is none; `error`: it is not within the range, or not at least `least`.
    """
    try:
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(f"{what} is {value!r}: it must be a whole number") from None
    if within is not None and number not in within:
        bits = within.stop.bit_length() - 1
        most = f"2**{bits} - 1" if bits >= 32 and within.stop == 1 << bits else within.stop - 1
        raise error(f"{what} is {number}: it must be in {within.start} to {most}")
    if least is not None and number < least:
        raise error(f"{what}={number} must be at least {least}")
    return number


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`, or of `host`, whose port is DEFAULT_PORT.

    host is a name, an IPv4 address, or an IPv6 one in brackets. Raises ValueError: it is malformed.
    """
    require("the address", address, str)
    scheme, separator, rest = address.partition("://")
    if separator:
        raise ValueError(f"{address!r} begins with {scheme}://: it must be {rest!r} alone")
    bare = ":" not in address or address.endswith("]")
    host, _, port = (f"{address}:{DEFAULT_PORT}" if bare else address).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: an IPv6 address must be in brackets, as in [::1]:48148")
    if not host:
        raise ValueError(
            f"{address!r} names no host; use 127.0.0.1, or 0.0.0.0 to listen everywhere"
        )
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r}: {port!r} is not a port number (0 to 65535)")
    return host, int(port)


def parse_listening(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`, or of a port alone, which listens on this machine only.

    Raises ValueError: it is malformed.
    """
    return parse_address(address if ":" in address else f"127.0.0.1:{address}")


def address_text(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address in `host`, possibly an IPv6 address with a zone; None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def duration_text(seconds: float) -> str:
    """A duration as text, in µs, ms or s."""
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def parse_advertised(text: str, what: str) -> tuple[str, ...]:
    """The hosts in `a,b`; none for "". `what` names the source in errors.

    Raises ValueError: the text has another form, such as a host with a port, or too many hosts.
    """
    require(what, text, str)
    hosts = tuple(text.split(",")) if text else ()
    for host in hosts:
        if numeric(host) is None and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", host):
            raise ValueError(
                f"{what} is {text!r}: it must be an address or a name, without brackets or a "
                "port, or several with commas between them"
            )
    if len(hosts) > ADVERTISED_MAX:
        raise ValueError(f"{what} is {text!r}: it may name {ADVERTISED_MAX} hosts at most")
    return hosts


def parse_ports(text: str, what: str) -> range:
    """The ports in FIRST-LAST; none for "". `what` names the source in errors.

    Raises ValueError: it is malformed.
    """
    require(what, text, str)
    if not text:
        return range(0)
    first, dash, last = text.partition("-")
    numbers = [first, last if dash else first]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ValueError(f"{what} is {text!r}: it must be FIRST-LAST, as in 50000-50100")
    ports = range(int(numbers[0]), int(numbers[1]) + 1)
    if not ports or not 0 < ports[0] <= ports[-1] < 1 << 16:
        raise ValueError(f"{what} is {text!r}: ports are 1 to 65535, the lower one first")
    return ports


class Closing(ABC):
    """A context manager that calls `close` at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Ends it, and returns when all resources are released."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
