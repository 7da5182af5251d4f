"""A few descriptors that a server reserves for when the system provides no more.

If a waiting connection cannot be accepted, libzmq retries in a busy loop, and it has no way to stop
listening without closing the existing connections. So the reserve is used: waiting connections are
accepted and closed at once, until there is room again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os

from pccl.runtime import descriptors, limits

log = logging.getLogger("pccl")

KEPT = 8
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Reserve:
    """The descriptors, held from construction on.

    Attributes:
        spent: whether the reserve is in use: new connections must be closed at once.

    Raises:
        OSError: the system provides no descriptors even now.
    """

    def __init__(self) -> None:
        self.spent = False
        self._kept: list[int] = []
        self._said_s: float | None = None
        self._failed_s = 0.0
        try:
            self._restock()
        except OSError:
            self.close()
            raise

    def failed(self, number: int, now_s: float) -> None:
        """A connection could not be accepted; `number` is the errno."""
        if number not in EXHAUSTED:
            return
        self.spent = True
        self._failed_s = now_s
        self.close()
        if self._said_s is None or now_s - self._said_s >= limits.LOG_REPEAT_S:
            self._said_s = now_s
            log.error(
                "master: new connections are closed, for the system lends no more descriptors "
                "(%s); those that stand are served on. This process may have %d: see ulimit -n",
                os.strerror(number),
                descriptors.limit(),
            )

    def tick(self, now_s: float) -> None:
        """Restores the reserve if possible, some time after the last failure."""
        if self.spent and now_s - self._failed_s >= limits.DESCRIPTORS_REST_S:
            with contextlib.suppress(OSError):
                self._restock()

    def _restock(self) -> None:
        while len(self._kept) < KEPT:
            self._kept.append(os.open(os.devnull, os.O_RDONLY))
        self.spent = False

    def close(self) -> None:
        """Closes the reserved descriptors."""
        while self._kept:
            os.close(self._kept.pop())
