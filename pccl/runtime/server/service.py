"""A server in its own thread, and how that thread ends.

Its end is awaited by a lock that the thread holds, and a flag that is set before the lock is
released. An exception such as KeyboardInterrupt may end a wait at any instruction: the next wait
then relies on the flag. (After that, `Thread.join` of CPython 3.11 considers the thread dead, and
the process would end before the thread has sent its last messages.)
"""

from __future__ import annotations

import os
import threading

from pccl.runtime import limits
from pccl.runtime.server.server import Server
from pccl.runtime.server.web import Web


class Service:
    """Serves from `start` to the end of the server.

    A forked child has no such thread: `stop` and `wait` do nothing there.

    Args:
        server: the server.
        web: shows the run over HTTP; None: nothing does.

    Attributes:
        server: the server.
        failure: the exception that has ended it; None after `stop`.
    """

    def __init__(self, server: Server, web: Web | None = None) -> None:
        self.server = server
        self._web = web
        self.failure: BaseException | None = None
        self._pid = os.getpid()
        self._over = False
        self._serving = threading.Lock()
        self._serving.acquire()
        self._thread = threading.Thread(target=self._serve, name="pccl-master", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError, and closes everything, if that fails."""
        try:
            if self._web is not None:
                self._web.start()
            self._thread.start()
        except RuntimeError:
            self._close_web()
            self.server.close()
            self._over = True
            raise

    @property
    def over(self) -> bool:
        """Whether no server runs in this process any more."""
        return self._over or os.getpid() != self._pid

    def stop(self) -> None:
        """Asks the server to end, from any thread or a signal handler."""
        if os.getpid() == self._pid:
            self.server.stop()

    def forked(self) -> None:
        """Called in a forked child: releases there what belongs to the parent."""
        self.server.forked()
        if self._web is not None:
            self._web.forked()

    def wait(self) -> None:
        """Returns when the server has ended."""
        while not self.over:
            if self._serving.acquire(timeout=limits.SLICE_S):
                self._serving.release()

    def _serve(self) -> None:
        try:
            self.server.serve()
        except BaseException as error:
            self.failure = error
        finally:
            self._close_web()
            self._over = True
            self._serving.release()

    def _close_web(self) -> None:
        if self._web is not None:
            self._web.close()
