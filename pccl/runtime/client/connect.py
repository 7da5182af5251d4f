"""Reaches a master: joins its run, or only asks what the master sees, for `pccl doctor`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import zmq

from pccl.errors import MasterLostError, PCCLError, PCCLTimeoutError, RunFinishedError, error_for
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Caller, Deadline, Note, Quiet, error_of
from pccl.runtime.client.connection import Dealer, DealerEvent, Identity
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.config import Config
from pccl.runtime.resolve import AnotherServiceError, everywhere, further_hosts, reachable
from pccl.runtime.resources import OutOfResourcesError, out_of_resources, require_resources
from pccl.runtime.signals import aside
from pccl.security import Security
from pccl.support import address_text
from pccl.types import Result
from pccl.version import __version__

log = logging.getLogger("pccl")


class RetryPolicy:
    """The time limits of connecting, and the log lines while the master does not answer.

    Time counts from construction. Raises TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        host: str,  # of the master
        port: int,  # of the master
        n_attempts: int,  # number of attempts, if `connect_timeout` is None
        connect_timeout: float | None,  # seconds for any number of attempts
        # seconds for the whole call, including the admission; this limit always applies
        timeout: float | None,
        *,
        name: str = "connect",  # name of the call, for messages
        # whether to wait, for `connect_timeout`, while another service answers: it may be the proxy
        # of a master that is down
        waits_for_others: bool = True,
    ) -> None:
        if n_attempts < 1:
            raise ValueError(f"n_attempts is {n_attempts}: it must be at least 1")
        self.host, self.port, self._master = host, port, address_text(host, port)
        self._n_attempts = n_attempts
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self.name, self._waits_for_others = name, waits_for_others
        self._trying = Deadline(connect_timeout, "connect_timeout")
        self._call = Deadline(timeout)
        self._attempts = 0
        self._quiet = Quiet()

    def of(self, seconds: float) -> float:
        """The smallest of `seconds` and the remaining time limits."""
        left = (each.left_s for each in (self._trying, self._call))
        return min([seconds, *(each for each in left if each is not None)])

    def failed(self, why: str, another: bool = False) -> None:
        """An attempt has failed; returns when it is time for the next one.

        `another`: it has failed because another service answers.

        Raises:
            PCCLTimeoutError: the time limit of the whole call has passed.
            PCCLError: MASTER_CONNECTION_FAILED: another limit is reached.
        """
        self._attempts += 1
        log.info("attempt %d to reach the master at %s: %s", self._attempts, self._master, why)
        self._end_if_over(why, another)
        if self._quiet.is_over:
            log.warning(
                "%s has waited %.0f s for a master at %s (%s, %s): it tries %s",
                self.name,
                self._quiet.seconds,
                self._master,
                why,
                self._made,
                self._rest,
            )
        time.sleep(self.of(limits.ATTEMPT_INTERVAL_S))
        self._end_if_over(why, another)

    def _end_if_over(self, why: str, another: bool) -> None:
        seconds = self._quiet.seconds
        if self._call.left_s == 0:
            text = (
                f"no pccl master has answered at {self._master} within {self._timeout:g} s "
                f"({why}, {self._made})"
            )
            raise PCCLTimeoutError(Result.TIMEOUT, self.name, text)
        if self._connect_timeout is None:
            enough = another or self._attempts >= self._n_attempts
        else:
            enough = another and not self._waits_for_others
        if enough or self._trying.left_s == 0:
            text = (
                f"no pccl master answers at {self._master} ({why}), {self._made} in {seconds:.1f} s"
            )
            raise error_for(Result.MASTER_CONNECTION_FAILED, self.name, text)

    @property
    def _made(self) -> str:
        return "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"

    @property
    def _rest(self) -> str:
        seconds = self.of(math.inf)
        if seconds < math.inf:
            return f"for {seconds:.0f} s more"
        return f"{self._n_attempts - self._attempts} times more (connect_timeout= gives it longer)"

    def admission(self, client: Connecting, call: Call) -> Note:
        """Waits for the peers of the run to admit this one, after the master has registered it.

        Raises PCCLTimeoutError: the time limit of the whole call has passed.
        """
        while self._call.left_s != 0:
            left_s = math.inf if self._call.left_s is None else self._call.left_s
            note = Deadline(None).next(client, call, left_s)
            if not isinstance(note, m.Welcome | None):  # a restarted master sends a second Welcome
                return note
        raise PCCLTimeoutError(
            Result.TIMEOUT,
            "connect",
            f"the peers of the run at {self._master} did not admit this one within "
            f"{self._timeout:g} s: each of them must call update_topology()",
        )


class Connecting(Caller, Protocol):
    """A client that is about to join."""

    def call(self) -> Call:
        """A new call, which has not been made yet."""

    def join(self, call: Call) -> None:
        """Asks to join."""

    def close(self, why: str) -> None:
        """Leaves."""


C = TypeVar("C", bound=Connecting)


def connect(
    policy: RetryPolicy,  # the master, and the time limits of the attempts
    config: Config,  # timings and limits
    make: Callable[[str], C],  # makes a client of the master at an address
    joined: Callable[[C], None],  # receives the client that has joined. All others are closed.
) -> None:
    """Makes a client that joins a run; returns when it has joined.

    Raises PCCLError: the master does not answer within the time limits (MASTER_CONNECTION_FAILED),
    or refuses the client; the system has no descriptors or threads for it (INTERNAL_ERROR); no port
    is free for it (INVALID_USAGE).
    """
    name = policy.name
    try:
        aside(require_resources)  # it must end the threads and descriptors that it opens
    except OutOfResourcesError as error:
        raise error_for(Result.INTERNAL_ERROR, name, str(error)) from None

    def made(address: str) -> C:
        try:
            return make(address)
        except OSError as error:
            if lacking := out_of_resources(error):  # they ran out after the check
                raise error_for(Result.INTERNAL_ERROR, name, str(lacking)) from None
            cure = ": choose a wider PCCL_PORT_RANGE (port_range=)" if config.ports else ""
            why = f"for bulk data this peer {error.strerror or error}{cure}"
            raise error_for(Result.INVALID_USAGE, name, why) from None

    while True:
        another = False
        try:  # a plain connection first, because ZeroMQ does not report why one fails
            address = reachable(policy.host, policy.port, policy.of(config.handshake_timeout_s))
        except OSError as error:
            why, another = error.strerror or str(error), isinstance(error, AnotherServiceError)
        else:
            why = _attempt(address, made, joined, policy)
            if not why:
                return
        policy.failed(why, another)


def _attempt(
    address: str, make: Callable[[str], C], joined: Callable[[C], None], policy: RetryPolicy
) -> str:
    """Returns why the master does not answer, if another attempt may succeed; else empty."""
    made: list[C] = []
    has_joined = False
    try:
        aside(lambda: made.append(make(address)))
        client = made[0]
        call = client.call()
        client.join(call)
        limit_s = policy.of(limits.WELCOME_S)
        note = call.next(limit_s)
        if isinstance(note, m.Welcome):
            log.info("registered as peer %d; waiting to be admitted", note.peer)
            note = policy.admission(client, call)
        if note is None:
            return f"no answer within {limit_s:.3g} s"
        if isinstance(note, effects.Fail):
            if note.result is Result.MASTER_CONNECTION_FAILED:
                return note.why
            error = error_of(policy.name, note, call.began_s)
            if isinstance(error, RunFinishedError):
                log.warning("%s", error)  # a program that does not catch it may end silently
            raise error
        joined(client)
        has_joined = True
        return ""
    finally:
        for client in [] if has_joined else made:
            client.close("connect failed")


# ---- without joining ----


@dataclass(frozen=True, slots=True)
class Examination:
    report: m.Report  # the master's report
    address: str  # each `host:port` at which the master tried to reach this machine
    round_trip_s: float  # round trip to the master, from TCP's handshake
    # how far this machine's clock is ahead of the master's, within half a round trip
    clock_s: float


def examine(host: str, port: int, config: Config, security: Security | None) -> Examination:
    """Has the master at this address dial this machine back.

    Raises:
        MasterLostError: no master answers there.
        OSError: no port of PCCL_PORT_RANGE is free.
        PCCLError: INVALID_USAGE: keys are missing or unsafe, or the master does not allow ours.
    """
    where = address_text(host, port)
    began_s = time.monotonic()
    try:
        address = reachable(host, port, config.handshake_timeout_s)
    except OSError as error:
        why = f"nothing answers at {where} ({error.strerror or error})"
        raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why) from None
    round_trip_s = time.monotonic() - began_s
    identity = Identity.of(security)
    options = identity.guard(EngineOptions())
    first, others = config.first_host, further_hosts(config, address)
    engine = Engine(options, host=everywhere(address), ports=config.ports)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = Dealer(context, address, port, config, identity.secure)
        try:
            ask = m.Examine(
                m.PROTOCOL_VERSION,
                __version__,
                first,
                engine.port,
                identity.curve,
                identity.token,
                others,
            )
            dealer.send(ask)
            dealer.flush()
            report = _answer(dealer, where)
        finally:
            dealer.close()
    finally:
        context.term()
        engine.close()
    tried = dict.fromkeys((first or report.host, *others))
    address = " or ".join(address_text(each, engine.port) for each in tried)
    clock_s = time.time() - report.unix_s - round_trip_s / 2
    return Examination(report, address, round_trip_s, clock_s)


def _answer(dealer: Dealer, where: str) -> m.Report:
    poller = zmq.Poller()
    poller.register(dealer.socket, zmq.POLLIN)
    poller.register(dealer.monitor, zmq.POLLIN)
    until_s = time.monotonic() + limits.EXAMINATION_S
    while poller.poll(max(0, int((until_s - time.monotonic()) * 1000))):
        if dealer.socket.poll(0):
            for answer in dealer.receive():
                if isinstance(answer, m.Report):
                    return answer
        for event in dealer.events():
            if event is DealerEvent.NOT_ALLOWED:
                why = f"the master at {where} does not have this machine's key in `allowed`"
                raise PCCLError(Result.INVALID_USAGE, "doctor", why)
            if event is not DealerEvent.UP:
                why = (
                    f"what answers at {where} is not a pccl master of this version, or has other "
                    "keys (PCCL_CURVE_DIR)"
                )
                raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why)
    why = f"the master at {where} did not answer within {limits.EXAMINATION_S:g} s"
    raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why)
