"""`MasterNode`: the master of a run, in a program of your own."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType

from pccl.errors import error_for
from pccl.runtime.config import Config
from pccl.runtime.server import Server
from pccl.security import Security
from pccl.text import address_text, parse_address
from pccl.types import Result

_running: set[MasterNode] = set()  # a running master outlives every other reference to it


class MasterNode:
    """The master: peers meet here. It moves no bulk data and needs next to no memory.

        master = MasterNode("0.0.0.0:48148")
        master.run()
        ...
        master.interrupt()

    or `with MasterNode("127.0.0.1:0") as master: ... master.address`. A master that runs keeps the
    process alive until it is interrupted; Ctrl-C and SIGTERM end it cleanly.

    Args:
        listen_address: `host:port`; port 0 takes a free one (see `address`).
        security: encrypts, and lets in only the peers that the directory of keys allows (see
            `pccl keys`); None: the directory PCCL_CURVE_DIR, and without that no encryption.
        state: file of a journal. A master that is killed and started again with the same one, at
            the same address, goes on with the run: peers come back by themselves. None: it depends
            on what the peers tell it.

    Raises:
        AssertionError: `listen_address` has no colon.
        ValueError: `listen_address` is malformed otherwise.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        security: Security | str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        self._state = None if state is None else Path(state)
        self._host, self._port = parse_address(listen_address)
        self._security = security
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """`host:port` as peers on this machine reach it; the real port once it runs."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}.get(self._host, self._host)
        port = self._server.port if self._server is not None else self._port
        return address_text(host, port)

    def run(self) -> None:
        """Starts to serve in the background and returns.

        Raises:
            PCCLError: INVALID_USAGE when it runs already, the address cannot be listened on, or
                keys are missing or unsafe.
        """
        if self._server is not None:
            raise error_for(Result.INVALID_USAGE, "MasterNode.run", "this master runs already")
        security = Security.of(self._security)
        try:
            self._server = Server(self._host, self._port, Config.from_env(), security, self._state)
        except OSError as error:
            why = (
                f"{error.strerror or error}: does another master run there? Try another port, or 0"
            )
            raise error_for(Result.INVALID_USAGE, "MasterNode.run", why) from None
        self._thread = threading.Thread(target=self._server.serve, name="pccl-master", daemon=True)
        _running.add(self)
        _handle_sigterm(True)
        self._thread.start()

    def interrupt(self) -> None:
        """Stops serving; all peers lose their master. Idempotent.

        The port is free again when this returns.

        Raises:
            PCCLError: INVALID_USAGE when `run` was never called.
        """
        if self._server is None or self._thread is None:
            why = "this master does not run: call run() first"
            raise error_for(Result.INVALID_USAGE, "MasterNode.interrupt", why)
        self._server.stop()
        self._thread.join()
        _running.discard(self)
        if not _running:
            _handle_sigterm(False)

    def wait(self) -> None:
        """Returns when the master has stopped; Ctrl-C is raised as KeyboardInterrupt."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.5)  # in slices, for a lock cannot be interrupted on Windows

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.interrupt()


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM, where the program has no handler of its own: stops all masters, then the program."""
    for master in _running:
        if master._server is not None:
            master._server.stop()
    raise SystemExit(0)


def _handle_sigterm(wanted: bool) -> None:
    """Installs or removes the handler; only the main thread may, and only over the default."""
    if threading.current_thread() is not threading.main_thread():
        return
    before, after = (signal.SIG_DFL, _terminate) if wanted else (_terminate, signal.SIG_DFL)
    if signal.getsignal(signal.SIGTERM) == before:
        signal.signal(signal.SIGTERM, after)


def serve_until_signal(master: MasterNode) -> None:
    """Waits for a running master to end; Ctrl-C interrupts it."""
    try:
        master.wait()
    except KeyboardInterrupt:
        master.interrupt()


@atexit.register
def _serve_on() -> None:
    """A script whose main() only calls run() expects the master to serve on; Ctrl-C ends both."""
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    for master in list(_running):
        if interrupted:
            master.interrupt()
        else:
            serve_until_signal(master)
