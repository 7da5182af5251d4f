"""`MasterNode`: the master of a run, inside your own program."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from pccl.errors import PCCLError, PCCLTimeoutError, error_for, not_picklable
from pccl.protocol.master import Status
from pccl.runtime.config import Config
from pccl.runtime.resources import OutOfResourcesError, out_of_resources, require_resources
from pccl.runtime.server.eventlog import EventLogError
from pccl.runtime.server.journal import JournalError, OnError
from pccl.runtime.server.server import Server
from pccl.runtime.signals import ENDING, Stopping, ended_by
from pccl.security import Security
from pccl.support import address_text, parse_address, parse_listening
from pccl.types import Result

_running: set[MasterNode] = set()  # a running master outlives every other reference to it


class MasterNode:
    """The master of a run, which moves no bulk data and needs hardly any memory.

        master = MasterNode("0.0.0.0:48148")
        master.run()
        ...
        master.interrupt()

    or `with MasterNode("127.0.0.1:0") as master: ... master.address`. After the program's main
    thread has ended, a running master keeps the process alive until it is interrupted, unless the
    program ended with an exception. Ctrl-C and SIGTERM stop it cleanly.

    Args:
        listen_address: `host:port`; without a port, 48148; port 0 takes a free one (see `address`).
        security: the directory of keys (see `pccl keys`), which turns encryption on and admits
            only the peers whose keys it allows. None: PCCL_CURVE_DIR; if that is unset, nothing is
            encrypted.
        state: file of a journal. A master that is killed and restarted with the same journal, at
            the same address, continues the run: its peers reconnect by themselves. None: a
            restarted master relies on what the peers tell it.
        on_journal_error: "continue" without the journal, or "stop", when it cannot be written.
        event_log: file in which everything that happens to the master is recorded, without payloads
            and keys, for `pccl replay`. None: nowhere.
        http: `host:port` at which the run can be watched over HTTP (see `http_address`), or a port
            alone, which listens on this machine only; port 0 takes a free port. It is read-only and
            not encrypted. None: nowhere.
        dial_back: whether to dial newcomers, and peers that others cannot reach, to find out who
            can be reached. False: where the master's network is not that of the peers.

    Raises:
        ValueError: `listen_address` or `http` is malformed, or `on_journal_error` is neither.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        security: Security | str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | None = None,
        on_journal_error: str = "continue",
        event_log: str | os.PathLike[str] | None = None,
        http: str | int | None = None,
        dial_back: bool = True,
    ) -> None:
        self._host, self._port = parse_address(listen_address)
        self._security, self._dial_back = security, dial_back
        self._make_server = partial(
            Server,
            self._host,
            self._port,
            state=None if state is None else Path(state),
            on_journal_error=OnError(on_journal_error),
            event_log=None if event_log is None else Path(event_log),
            http=None if http is None else parse_listening(str(http)),
        )
        self._server: Server | None = None

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "it serves in this process; pass its address instead")

    @property
    def address(self) -> str:
        """`host:port` as peers on this machine reach it; the real port once it runs."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}.get(self._host, self._host)
        port = self._server.port if self._server is not None else self._port
        return address_text(host, port)

    @property
    def http_address(self) -> str | None:
        """`host:port` of its HTTP server while the master runs; None: it has none."""
        web = None if self._server is None else self._server.web
        return None if web is None else web.address

    def status(self, timeout: float = 10.0) -> Status:
        """The current state of the run: its peers, groups and open rounds.

        Args:
            timeout: seconds within which the master must answer.

        Raises:
            PCCLError: INVALID_USAGE: it does not run.
            PCCLTimeoutError: it has not answered in time.
        """
        server = self._server
        if server is None or self not in _running:
            why = "this master does not run: call run() first"
            raise error_for(Result.INVALID_USAGE, "MasterNode.status", why)
        try:
            return server.ask().result(timeout)
        except (TimeoutError, CancelledError):
            why = f"the master has not answered within {timeout:g} s, or has ended"
            raise PCCLTimeoutError(Result.TIMEOUT, "MasterNode.status", why) from None

    def run(self) -> None:
        """Starts to serve in the background, and returns. May be called again after `interrupt`.

        Raises:
            PCCLError: INVALID_USAGE: it runs already, the address is not available, the journal
                or the event log cannot be used, or keys are missing or unsafe. INTERNAL_ERROR: the
                system lacks descriptors or threads.
            ValueError: a PCCL_ environment variable is malformed or out of range.
        """
        if self._server is not None and not self._server.over:
            raise error_for(Result.INVALID_USAGE, "MasterNode.run", "this master runs already")
        security = Security.of(self._security)
        try:
            require_resources()
            config = replace(Config.from_env(), dial_back=self._dial_back)
            server = self._make_server(config=config, security=security)
        except OutOfResourcesError as error:
            raise error_for(Result.INTERNAL_ERROR, "MasterNode.run", str(error)) from None
        except (JournalError, EventLogError) as error:
            raise error_for(Result.INVALID_USAGE, "MasterNode.run", str(error)) from None
        except OSError as error:
            if lacking := out_of_resources(error):  # descriptors ran out after the check
                why = str(lacking)
                raise error_for(Result.INTERNAL_ERROR, "MasterNode.run", why) from None
            why = error.strerror or str(error)
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why += ": does another master run there? Try another port, or 0"
            raise error_for(Result.INVALID_USAGE, "MasterNode.run", why) from None
        self._server = server
        _running.add(self)
        _handle_sigterm(True)
        try:
            server.start()
        except RuntimeError as error:
            self._end("MasterNode.run")
            why = f"no thread could be started: {error}"
            raise error_for(Result.INTERNAL_ERROR, "MasterNode.run", why) from None

    def interrupt(self) -> None:
        """Stops the master; all peers lose it. Idempotent.

        The port is free again when this returns.

        Raises:
            PCCLError: INVALID_USAGE: `run` was never called. INTERNAL_ERROR: the master had failed
                before.
        """
        if self._server is None:
            why = "this master does not run: call run() first"
            raise error_for(Result.INVALID_USAGE, "MasterNode.interrupt", why)
        self._server.stop()
        self._end("MasterNode.interrupt")

    def wait(self) -> None:
        """Returns when the master has stopped. Ctrl-C raises KeyboardInterrupt.

        Raises:
            PCCLError: INTERNAL_ERROR: the master has failed.
        """
        self._end("MasterNode.wait")

    def _stop(self) -> None:
        """Asks the master to stop; for signal handlers."""
        if self._server is not None:
            self._server.stop()

    def _end(self, func_name: str) -> None:
        """Waits for the end, and raises the error if the master has failed."""
        server = self._server
        if server is None:
            return
        failure = server.wait()
        _running.discard(self)
        if not _running:
            _handle_sigterm(False)
        if failure is not None:
            kind = "" if isinstance(failure, JournalError) else f"{type(failure).__name__}: "
            why = f"the master at {self.address} has failed: {kind}{failure}"
            raise error_for(Result.INTERNAL_ERROR, func_name, why) from failure

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.interrupt()
        except PCCLError:
            if error is None:  # otherwise `error` is raised, and this one is logged
                raise


class _Terminated(SystemExit):
    """Ends the program, without output if it is ending already."""


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM if the program does not: stops all masters, then the program."""
    _stop_all()
    if _is_shutting_down(frame):
        say = sys.unraisablehook
        sys.unraisablehook = lambda it: None if it.exc_type is _Terminated else say(it)
    raise _Terminated(0)


def _is_shutting_down(frame: FrameType | None) -> bool:
    """True if the main thread, which is in `frame`, has left the program's own code."""
    while frame is not None and frame.f_code is not threading._shutdown.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    return frame is not None or not threading.main_thread().is_alive()


def _stop_all() -> None:
    for master in list(_running):
        master._stop()


def _handle_sigterm(wanted: bool) -> None:
    """Installs or removes the handler, only in the main thread and only over the default one."""
    if threading.current_thread() is not threading.main_thread():
        return
    before, after = (signal.SIG_DFL, _terminate) if wanted else (_terminate, signal.SIG_DFL)
    if signal.getsignal(signal.SIGTERM) == before:
        signal.signal(signal.SIGTERM, after)


def serve_until_signal(master: MasterNode) -> None:
    """Runs a master until Ctrl-C or SIGTERM; a second signal ends the process at once.

    Raises:
        PCCLError: it could not start, or has failed.
        ValueError: a PCCL_ environment variable is malformed or out of range.
    """
    stopping = Stopping(master._stop)
    with ended_by(stopping):
        master.run()
        print(f"pccl master listening on {master.address}", flush=True)
        if master.http_address is not None:
            print(f"its run can be watched at http://{master.http_address}/", flush=True)
        if stopping.number:  # the signal arrived before the master ran
            master._stop()
        master.wait()


@atexit.register
def _serve_on() -> None:
    """Keeps serving after the end of a script that only calls run(); Ctrl-C ends both.

    An exception in the script also ends both, because the parent process must see the failure.
    """
    if not _running:
        return
    stopping = Stopping(_stop_all)
    for number in ENDING:
        if signal.getsignal(number) in (signal.default_int_handler, _terminate):
            signal.signal(number, stopping)  # at exit, no caller catches an exception of a handler
    if getattr(sys, "last_type", None) is not None:
        _stop_all()
    well = [_served(master) for master in list(_running)]
    if not all(well):  # the only way to still change the exit status
        try:
            logging.shutdown()
            sys.stdout.flush()
        finally:  # a stream may be closed
            os._exit(1)


def _served(master: MasterNode) -> bool:
    """Waits for a master, despite any exception. Returns whether it ended without an error."""
    while True:
        try:
            master.wait()
        except PCCLError as error:
            logging.getLogger("pccl").error("%s", error)
            return False
        except BaseException:  # raised by one of the program's signal handlers
            _stop_all()
        else:
            return True


def _forget_all() -> None:
    """In a forked child: forgets the masters, which belong to the parent."""
    _running.clear()
    _handle_sigterm(False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
