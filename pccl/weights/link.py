"""An associate's way to the master: it is tried until it answers, or the time is up."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from typing import Any

from pccl.errors import (
    KickedError,
    MasterLostError,
    PCCLError,
    PCCLTimeoutError,
    error_for,
)
from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail, Fault
from pccl.runtime import limits
from pccl.runtime.client.associate import Associate, BlobStore
from pccl.runtime.config import Config, machine_id
from pccl.runtime.resolve import AnotherServiceError, reachable
from pccl.security import Security
from pccl.support.text import address_text, parse_address, parse_advertised, parse_ports
from pccl.types import Result
from pccl.version import __version__


class Options:
    """How an associate reaches the master and others, as of the arguments of its maker."""

    def __init__(
        self,
        master: str,
        security: Any,
        advertise: str | None,
        port_range: str | None,
        connect_timeout: float | None,
    ) -> None:
        self.host, self.port = parse_address(master)
        self.security = Security.of(security)
        config = Config.from_env()
        if advertise is not None:
            config = replace(config, advertise=parse_advertised(advertise, "advertise"))
        if port_range is not None:
            config = replace(config, ports=parse_ports(port_range, "port_range"))
        self.config = config
        if connect_timeout is not None and not connect_timeout > 0:
            raise ValueError(f"connect_timeout is {connect_timeout!r}: it must be positive")
        self.timeout_s = limits.WEIGHTS_JOIN_S if connect_timeout is None else connect_timeout

    @property
    def master(self) -> str:
        """`host:port` of the master."""
        return address_text(self.host, self.port)


def associate(
    options: Options, keeper: BlobStore, what: str, *, follows: bool, relays: bool
) -> Associate:
    """A registered associate.

    Raises:
        MasterLostError: no master answers within the time limit.
        PCCLError: the master refuses it, or the keys cannot be used.
    """
    until_s = time.monotonic() + options.timeout_s
    while True:
        try:
            return _attempt(options, keeper, until_s, follows, relays)
        except _Unreachable as error:
            if time.monotonic() + limits.ATTEMPT_INTERVAL_S >= until_s:
                text = f"no pccl master answers at {options.master} ({error})"
                limit = f"within {options.timeout_s:g} s"
                result = Result.MASTER_CONNECTION_FAILED
                raise MasterLostError(result, what, f"{text} {limit}") from None
        except _Refused as error:
            raise error_of(what, error.fail) from None
        time.sleep(limits.ATTEMPT_INTERVAL_S)


class _Unreachable(Exception):
    """The master does not answer; another attempt may succeed."""


class _Refused(Exception):
    """The master has answered, and said no."""

    def __init__(self, fail: Fail) -> None:
        super().__init__(fail.why)
        self.fail = fail


def _attempt(
    options: Options, keeper: BlobStore, until_s: float, follows: bool, relays: bool
) -> Associate:
    config = options.config

    def hello(port: int, ipc: str) -> m.Hello:
        words = m.PROTOCOL_VERSION, __version__, 0, config.first_host, port, ipc, machine_id(), b""
        return m.Hello(*words)

    left_s = max(0.01, min(until_s - time.monotonic(), config.handshake_timeout_s))
    try:
        address = reachable(options.host, options.port, left_s)
    except AnotherServiceError as error:
        why = f"no pccl master answers at {options.master} ({error})"
        raise _Refused(Fail(0, Result.MASTER_CONNECTION_FAILED, why, Fault.MASTER_LOST)) from None
    except OSError as error:
        raise _Unreachable(error.strerror or str(error)) from None
    place = options.host, options.port, address
    one = Associate(*place, hello, config, options.security, keeper, follows=follows, relays=relays)
    try:
        fail = one.welcome.get(timeout=limits.WELCOME_S)
    except queue.Empty:
        one.close("it was not welcome")
        raise _Unreachable(f"no answer within {limits.WELCOME_S:g} s") from None
    except BaseException:
        one.close("it was not welcome")
        raise
    if fail is None:
        return one
    one.close(fail.why)
    if fail.result is Result.MASTER_CONNECTION_FAILED:
        raise _Unreachable(fail.why)
    raise _Refused(fail)


def error_of(what: str, fail: Fail) -> PCCLError:
    """The exception for the end of an associate."""
    if fail.fault is Fault.KICKED:
        return KickedError(fail.result, what, fail.why)
    return error_for(fail.result, what, fail.why)


def timed_out(what: str, timeout: float, why: str) -> PCCLTimeoutError:
    """The exception for a wait that was too long."""
    text = f"{why} within {timeout:g} s"
    return PCCLTimeoutError(Result.INVALID_USAGE, what, text)
