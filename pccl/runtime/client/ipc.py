"""Where an engine listens for peers of its own machine: a directory that only its user can enter.

A process that is killed leaves its directory behind. Each is locked while its process lives, so
that the next engine of the same user removes those that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from pccl.runtime.filelock import FileLock, Taken

PREFIX = "pccl-ipc-"
LOCK, SOCKET = "lock", "e"  # short names: a path longer than sun_path is none
_PATH_MAX = 100  # bytes; sun_path holds 104 on macOS


class Directory:
    """A new directory, held until `remove`.

    Attributes:
        path: of the socket to bind; empty if it would be too long.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        while (made := _make()) is None:
            pass
        self._directory, self._lock = made
        path = str(self._directory / SOCKET)
        self.path = path if len(os.fsencode(path)) <= _PATH_MAX else ""

    def remove(self) -> None:
        """Removes it, with the socket in it. To be called once."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()


def _make() -> tuple[Path, FileLock] | None:
    """A new directory and its lock; None if somebody took it for an abandoned one, and removes it:
    between the making of a file and its locking another process may lock it.
    """
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        lock = FileLock(directory / LOCK)
    except Taken:
        return None
    except FileNotFoundError:
        if directory.exists():
            raise
        return None
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if not (directory / LOCK).exists():
        lock.close()
        return None
    return directory, lock


def _remove_abandoned() -> None:
    """Removes the directories of this user's processes that were killed, as far as that works."""
    with contextlib.suppress(OSError):
        with os.scandir(tempfile.gettempdir()) as entries:
            for entry in entries:
                if not entry.name.startswith(PREFIX):
                    continue
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(directory: Path) -> None:
    if not (directory / LOCK).exists():
        return  # it is being made
    with contextlib.suppress(OSError, Taken):
        lock = FileLock(directory / LOCK)
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
