"""A file lock that one process holds until it ends, however it ends.

The lock is on a separate file beside the protected one. The lock file is never removed: otherwise
two processes could hold two locks of the same name. The system releases the lock when the process
ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from pccl.runtime import forks

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
WIDTH = 64  # bytes of the text: fixed, so that it is overwritten in place even on a full disk


def identity(path: Path) -> tuple[int, int]:
    """Device and inode of a file, which differ after it is removed or replaced; zeros: no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return found.st_dev, found.st_ino


class Taken(Exception):
    """Another holder has the lock; `args[0]` is the holder's text."""


class FileLock:
    """A lock, held from construction on.

    Args:
        path: of the lock's own file; created if it does not exist.

    Raises:
        Taken: this process or another already holds the lock.
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
        forks.watch(self)
        self.text = self._read()  # the text of the previous holder; "" if it cannot be read

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # Windows lets no other process read a locked byte
            os.lseek(self._descriptor, 1, os.SEEK_SET)
            return os.read(self._descriptor, WIDTH).decode("ascii", "replace").strip()
        return ""

    def leave(self, text: str) -> None:
        """Writes a text of less than WIDTH bytes for the next holder. Raises OSError."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, (" " + text.ljust(WIDTH - 1) + "\n").encode())

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    forked = close  # in a forked child this closes the child's copy: the parent keeps the lock
