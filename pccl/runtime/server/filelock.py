"""A file lock that one process holds until it ends, in whatever way.

The lock is on a separate file beside the protected one. That file is never removed: otherwise two
processes could hold two locks of the same name. The system releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
WIDTH = 64  # bytes of the text, always: it is overwritten in place, on a full disk too


class Taken(Exception):
    """Somebody else holds the lock; `args[0]` is the text that he has left."""


class FileLock:
    """A lock, held from construction on.

    Args:
        path: of the lock's own file; made if it is not there.

    Attributes:
        text: what the last holder has left; "" if that cannot be read.

    Raises:
        Taken: somebody else holds it, in this process or another.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            _take(self._descriptor)
        except OSError as error:
            text = self._read()
            os.close(self._descriptor)
            if error.errno in HELD:
                raise Taken(text) from None
            raise
        self.text = self._read()

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # Windows lets nobody else read a byte that is locked
            os.lseek(self._descriptor, 1, os.SEEK_SET)
            return os.read(self._descriptor, WIDTH).decode("ascii", "replace").strip()
        return ""

    def leave(self, text: str) -> None:
        """Leaves a text, of less than WIDTH bytes, for whoever comes. Raises OSError."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, (" " + text.ljust(WIDTH - 1) + "\n").encode())

    def close(self) -> None:
        """Lets go of it. In a forked child that is for the child alone: the parent holds it on."""
        os.close(self._descriptor)
