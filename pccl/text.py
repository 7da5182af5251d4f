"""Text at the edge: addresses as users write them, and the logger that PCCL_LOG_LEVEL sets."""

from __future__ import annotations

import logging
import os

TRACE = 5
LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "NONE": logging.CRITICAL + 10,
}


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`; host is a name, an IPv4 address, or an IPv6 one in brackets.

    Raises:
        AssertionError: there is no colon.
        ValueError: it is malformed otherwise.
    """
    if ":" not in address:
        raise AssertionError(f"{address!r} is not host:port, for example 127.0.0.1:48148")
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: an IPv6 address must stand in brackets, as in [::1]:48148")
    if not host:
        raise ValueError(
            f"{address!r} names no host; use 127.0.0.1, or 0.0.0.0 to listen everywhere"
        )
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r}: {port!r} is not a port number (0 to 65535)")
    return host, int(port)


def configure_logging() -> None:
    """Sets the level of the `pccl` logger from PCCL_LOG_LEVEL and sends it to stderr, once.

    An unknown level is reported and otherwise ignored: nothing is fatal because of a log level.
    """
    logger = logging.getLogger("pccl")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s pccl %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    name = os.environ.get("PCCL_LOG_LEVEL", "WARN")
    logger.setLevel(LEVELS.get(name.upper(), logging.WARNING))
    if name.upper() not in LEVELS:
        logger.warning("PCCL_LOG_LEVEL is %r: it may be %s", name, ", ".join(LEVELS))
