"""Joins a run: reaches a master that may not be up yet, and waits for the admission."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from pccl.calls.launch import error_of
from pccl.errors import PCCLTimeoutError, RunFinishedError, error_for
from pccl.kernels import arithmetic_digest
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, Note, Quiet
from pccl.runtime.client.client import Client
from pccl.runtime.config import Config, machine_id
from pccl.runtime.resolve import AnotherServiceError, reachable
from pccl.runtime.uninterrupted import aside
from pccl.types import Result
from pccl.version import __version__

log = logging.getLogger("pccl")


class Patience:
    """The time limits of `connect`, and what it logs while the master does not answer.

    Time counts from the construction.

    Args:
        master: `host:port`, for messages.
        n_attempts: number of attempts, if `connect_timeout` is None.
        connect_timeout: seconds for any number of attempts.
        timeout: seconds for the whole call, including the admission; this limit always applies.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        master: str,
        n_attempts: int,
        connect_timeout: float | None,
        timeout: float | None,
    ) -> None:
        if n_attempts < 1:
            raise ValueError(f"n_attempts is {n_attempts}: it must be at least 1")
        self._master = master
        self._n_attempts = n_attempts
        self._connect_timeout = connect_timeout
        self._timeout = timeout
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

        `another`: because another service answers, which is waited for only if a time limit says
        so: it may be a proxy of a master that is down.

        Raises:
            PCCLTimeoutError: the time limit of the whole call has passed.
            PCCLError: MASTER_CONNECTION_FAILED: another limit is reached.
        """
        self._attempts += 1
        log.info("attempt %d to reach the master at %s: %s", self._attempts, self._master, why)
        self._end_if_over(why, another)
        if self._quiet.is_over:
            log.warning(
                "connect has waited %.0f s for a master at %s (%s, %s): it tries %s",
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
            raise PCCLTimeoutError(Result.MASTER_CONNECTION_FAILED, "connect", text)
        tried = another or self._attempts >= self._n_attempts
        enough = self._connect_timeout is None and tried
        if enough or self._trying.left_s == 0:
            text = (
                f"no pccl master answers at {self._master} ({why}), {self._made} in {seconds:.1f} s"
            )
            raise error_for(Result.MASTER_CONNECTION_FAILED, "connect", text)

    @property
    def _made(self) -> str:
        return "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"

    @property
    def _rest(self) -> str:
        seconds = self.of(math.inf)
        if seconds < math.inf:
            return f"for {seconds:.0f} s more"
        return f"{self._n_attempts - self._attempts} times more (connect_timeout= gives it longer)"

    def admission(self, client: Client, call: Call) -> Note:
        """Waits for the peers of the run to admit this one, after the master has registered it.

        Raises:
            PCCLTimeoutError: the time limit of the whole call has passed.
        """
        while self._call.left_s != 0:
            left_s = math.inf if self._call.left_s is None else self._call.left_s
            note = Deadline(None).next_within(client, call, left_s)
            if not isinstance(note, m.Welcome | None):  # a restarted master sends a second Welcome
                return note
        raise PCCLTimeoutError(
            Result.MASTER_CONNECTION_FAILED,
            "connect",
            f"the peers of the run at {self._master} did not admit this one within "
            f"{self._timeout:g} s: each of them must call update_topology()",
        )


class _Unreachable(Exception):
    """The master does not answer; another attempt may succeed."""


def join(
    host: str,
    port: int,
    handshake_timeout_s: float,
    begin: Callable[[str], Client],
    admitted: Callable[[Client], None],
    patience: Patience,
) -> None:
    """Joins the run; returns when all accepted peers have admitted this one.

    Args:
        host: host of the master.
        port: port of the master.
        handshake_timeout_s: time limit for establishing a connection.
        begin: makes a client of the master at an address.
        admitted: receives the admitted client. All others are closed.
        patience: the time limits of the attempts.

    Raises:
        PCCLError: as `Communicator.connect`, or what `begin` raises.
    """
    while True:
        another = False
        try:
            try:  # a plain connection first, because ZeroMQ does not report why one fails
                address = reachable(host, port, patience.of(handshake_timeout_s))
            except OSError as error:
                another = isinstance(error, AnotherServiceError)
                raise _Unreachable(error.strerror or str(error)) from None
            return _attempt(address, begin, admitted, patience)
        except _Unreachable as error:
            why = str(error)
        patience.failed(why, another)


def _attempt(
    address: str,
    begin: Callable[[str], Client],
    admitted: Callable[[Client], None],
    patience: Patience,
) -> None:
    made: list[Client] = []
    try:
        aside(lambda: made.append(begin(address)))
        client = made[0]
        call = client.call()
        client.join(call)
        limit_s = patience.of(limits.WELCOME_S)
        note = call.next(limit_s)
        if note is None:
            raise _Unreachable(f"no answer within {limit_s:.3g} s")
        if isinstance(note, m.Welcome):
            log.info("registered as peer %d; waiting to be admitted", note.peer)
            note = patience.admission(client, call)
        if isinstance(note, effects.Fail):
            if note.result is Result.MASTER_CONNECTION_FAILED:
                raise _Unreachable(note.why)
            error = error_of("connect", note, call.began_s)
            if isinstance(error, RunFinishedError):
                log.warning("%s", error)  # a program that does not catch it ends without a word
            raise error
        admitted(client)
    except BaseException:
        for client in made:
            client.close("connect failed")
        raise


def introduced(group: int, team: tuple[int, int], config: Config) -> Callable[[int, str], m.Hello]:
    """A function that makes a peer's first message from the port and ipc address of its engine."""

    def hello(port: int, ipc: str) -> m.Hello:
        return m.Hello(
            m.PROTOCOL_VERSION,
            __version__,
            group,
            config.first_host,
            port,
            ipc,
            machine_id(),
            arithmetic_digest(),
            team=team[0],
            team_size=team[1],
        )

    return hello
