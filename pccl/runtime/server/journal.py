"""The master's journal: an SQLite file with the run's number and its accepted peers.

A commit survives the death of the process, but not a power failure at that moment (synchronous is
NORMAL): the journal may then lack the last newcomers, which are refused and join again.

The master holds a lock on a second file as long as it lives. That file also says whether the
journal is complete: a single word that is overwritten in place, which works on a full disk too.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pccl.runtime.filelock import FileLock, Taken

APPLICATION = 0x7063636C  # "pccl"
VERSION = 1
HEADER = b"SQLite format 3\0"
# earlier versions of pccl do without this table
REFUSED = "CREATE TABLE IF NOT EXISTS refused (number INTEGER PRIMARY KEY, why BLOB NOT NULL);"
SCHEMA = f"""
    PRAGMA journal_mode = WAL;
    BEGIN;
    CREATE TABLE run (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        run INTEGER NOT NULL,
        incarnation INTEGER NOT NULL,
        next_peer INTEGER NOT NULL
    );
    CREATE TABLE peers (number INTEGER PRIMARY KEY, info BLOB NOT NULL);
    {REFUSED}
    PRAGMA application_id = {APPLICATION};
    PRAGMA user_version = {VERSION};
    COMMIT;
"""


class JournalError(Exception):
    """A journal cannot be used; the text says which one and why."""


@dataclass
class State:
    """The content of a journal.

    Attributes:
        run: the run's number.
        incarnation: how often its master was restarted.
        next_peer: the number of the next peer.
        peers: the accepted peers: their numbers, and their encoded m.PeerInfo.
        refused: peers that were dropped: their numbers, and their encoded Refusal.
    """

    run: int
    incarnation: int = -1
    next_peer: int = 1
    peers: dict[int, bytes] = field(default_factory=dict)
    refused: dict[int, bytes] = field(default_factory=dict)


class JournalFile:
    """An open journal, and its lock; to be used by one thread at a time.

    Args:
        path: of the file; created if it does not exist.
        patience_s: how long to wait if another program, such as a backup, has locked the file.

    Raises:
        JournalError: another master uses it, it cannot be opened, or it has another version.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path = path
        self._patience_s = patience_s
        self._db: sqlite3.Connection | None = None
        self._file = (0, 0)
        try:
            if path.is_dir():
                raise IsADirectoryError("it is a directory")
            self._lock = FileLock(path.with_name(path.name + ".lock"))
        except Taken as error:
            holder = "".join(f" ({word.strip()})" for word in str(error).split(",")[1:])
            why = f"another master{holder} uses it: stop that one, or give each a file of its own"
            raise JournalError(f"the journal {path}: {why}") from None
        except OSError as error:
            raise self._error(error) from None
        self._marked = self._lock.text.startswith("behind")
        with contextlib.suppress(OSError):  # informs people only
            self._mark(self._marked)
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise self._error(error) from None
        except JournalError:
            self._lock.close()
            raise

    @property
    def complete(self) -> bool:
        """Whether it holds everything that its last master knew."""
        return not self._marked

    def read(self) -> State | None:
        """Its content; None if it is new. Raises JournalError if it is damaged."""
        assert self._db is not None
        try:
            row = self._db.execute("SELECT run, incarnation, next_peer FROM run").fetchone()
            peers = self._db.execute("SELECT number, info FROM peers").fetchall()
            refused = self._db.execute("SELECT number, why FROM refused").fetchall()
        except sqlite3.Error as error:
            raise self._error(error) from None
        if row is None and not peers:
            return None
        numbers = [value for value in row or () if isinstance(value, int) and value >= 0]
        if len(numbers) != 3:
            raise self._error(ValueError("it does not say which run it is of"))
        run, incarnation, next_peer = numbers
        return State(run, incarnation, next_peer, dict(peers), dict(refused))

    def write(self, state: State, changed: Mapping[int, bytes | None] | None) -> None:
        """Writes the changed peers, or everything if `changed` is None.

        After an exception the next call must write everything, because the file is opened again.

        Raises:
            OSError, sqlite3.Error, JournalError: it could not be written.
        """
        try:
            if self._db is None:
                self._open()
            elif self._identity() != self._file:
                raise OSError("the file was removed or replaced while it was in use")
            assert self._db is not None
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._fill(self._db, state, changed)
        except BaseException:
            self._shut()
            raise

    def mark(self, behind: bool) -> None:
        """Records in the lock's file whether the journal is behind. Raises OSError."""
        if behind != self._marked:
            self._mark(behind)

    def close(self) -> None:
        """Closes the file, and releases the lock."""
        self._shut()
        self._lock.close()

    def forked(self) -> None:
        """Called in a forked child: the lock belongs to the parent."""
        self._lock.close()

    def _mark(self, behind: bool) -> None:
        self._lock.leave(f"{'behind' if behind else 'complete'}, process {os.getpid()}")
        self._marked = behind

    @staticmethod
    def _fill(
        db: sqlite3.Connection, state: State, changed: Mapping[int, bytes | None] | None
    ) -> None:
        if changed is None:
            db.execute("DELETE FROM peers")
            changed = state.peers
        if None in changed.values() or changed is state.peers:  # only who is gone is refused
            db.execute("DELETE FROM refused")
            db.executemany("INSERT INTO refused VALUES (?, ?)", state.refused.items())
        row = (state.run, state.incarnation, state.next_peer)
        db.execute("INSERT OR REPLACE INTO run VALUES (1, ?, ?, ?)", row)
        gone = [(number,) for number, info in changed.items() if info is None]
        there = [(number, info) for number, info in changed.items() if info is not None]
        db.executemany("DELETE FROM peers WHERE number = ?", gone)
        db.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?)", there)

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        with open(descriptor, "rb") as file:
            header = file.read(len(HEADER))
        if header and header != HEADER:
            raise JournalError(f"{self.path} is no journal of a master, but some other file")
        self._db = sqlite3.connect(
            self.path, timeout=self._patience_s, isolation_level=None, check_same_thread=False
        )
        try:
            self._check(self._db)
            self._file = self._identity()
        except BaseException:
            self._shut()
            raise

    def _check(self, db: sqlite3.Connection) -> None:
        """Creates the tables in an empty file; else checks that it is a journal."""
        damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if tables == application == version == 0:
            db.executescript(SCHEMA)
        elif application != APPLICATION:
            raise JournalError(f"{self.path} is an SQLite database, but no journal of a master")
        elif version != VERSION:
            raise JournalError(
                f"{self.path} is a journal of version {version}, and this pccl writes version "
                f"{VERSION}: start the pccl that it is of, or take another file for a new run"
            )
        db.execute(REFUSED)
        db.execute("PRAGMA synchronous = NORMAL")

    def _identity(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return (0, 0)
        return found.st_dev, found.st_ino

    def _shut(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _error(self, error: Exception) -> JournalError:
        text = getattr(error, "strerror", None) or str(error)
        return JournalError(f"the journal {self.path} cannot be used: {text}")
