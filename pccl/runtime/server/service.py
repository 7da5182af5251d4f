"""A server in its own thread, and how that thread has ended.

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

    In a child process that was forked meanwhile there is no such thread: nothing is stopped there,
    nor waited for.

    Args:
        server: that serves.
        web: shows the run over HTTP meanwhile; None: nobody does.

    Attributes:
        server: that serves.
        failure: what has ended it, where that was not `stop`.
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
        """Begins. Raises RuntimeError where no thread can be had; all is closed then."""
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
        """Whether it serves no longer, here."""
        return self._over or os.getpid() != self._pid

    def stop(self) -> None:
        """Asks it to end: from any thread, and from a signal handler."""
        if os.getpid() == self._pid:
            self.server.stop()

    def forked(self) -> None:
        """In a forked child: what the system would keep for the parent's sake is let go of."""
        self.server.forked()
        if self._web is not None:
            self._web.forked()

    def wait(self) -> None:
        """Returns when it has ended."""
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
