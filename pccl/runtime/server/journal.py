"""The journal of a master, and the thread that writes it.

SQLite's `synchronous` is NORMAL. So a commit survives the death of the process, but not a power
failure at the same moment. After a power failure, the journal may lack the last newcomers; they are
refused and join again.

A living master holds a lock on a second file. This file also says whether the journal is complete,
by a single word that can be overwritten in place, even on a full disk.

A separate thread writes, so a hanging disk does not stop the service. Changes are written before
the messages that depend on them are sent: the service waits for the thread, but only for
`JOURNAL_PATIENCE_S`. If this time passes, or writing fails, the journal is *behind*: the master
logs this and continues, and the thread retries until it has written the whole current state. If the
master is restarted while the journal is behind, it relies on the returning peers, like a master
without a journal (protocol/master/restart.py). With `OnError.STOP` the master ends instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import msgspec

from pccl.protocol.master import Journal
from pccl.protocol.master.effects import Adopt, Forget, Refusal, Remember
from pccl.protocol.master.history import keep_latest
from pccl.runtime import limits
from pccl.runtime.filelock import FileLock, Taken, identity

log = logging.getLogger("pccl")

APPLICATION = 0x7063636C  # "pccl"
VERSION = 1
HEADER = b"SQLite format 3\0"
# journals of earlier versions lack this table
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
    """A journal cannot be used. The text names it and says why."""


@dataclass
class State:
    run: int  # the run's number
    incarnation: int = -1  # how often its master was restarted
    next_peer: int = 1  # the number of the next peer
    # the accepted peers: their numbers, and their encoded m.PeerInfo
    peers: dict[int, bytes] = field(default_factory=dict)
    # peers that were dropped: their numbers, and their encoded Refusal
    refused: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> State:
        return replace(self, peers=dict(self.peers), refused=dict(self.refused))


class JournalFile:
    """An open journal and its lock, for one thread at a time.

    Args:
        path: the file; created if it does not exist.
        patience_s: how long to wait if another program, such as a backup, has locked the file.

    Raises:
        JournalError: another master uses the file, it cannot be opened, or its version differs.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path = path
        self._patience_s = patience_s
        self._db: sqlite3.Connection | None = None
        self._file = (0, 0)
        self._content: State | None = None  # the file's content; None: not known
        try:
            if path.is_dir():
                raise IsADirectoryError("it is a directory")
            with contextlib.ExitStack() as opened:
                self._lock = FileLock(path.with_name(path.name + ".lock"))
                opened.callback(self._lock.close)
                self._marked = self._lock.text.startswith("behind")
                with contextlib.suppress(OSError):  # informs people only
                    self._mark(self._marked)
                self._open()
                opened.pop_all()
        except Taken as error:
            holder = "".join(f" ({word.strip()})" for word in str(error).split(",")[1:])
            why = f"another master{holder} uses it: stop that one, or give each a file of its own"
            raise JournalError(f"the journal {path}: {why}") from None
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from None

    @property
    def complete(self) -> bool:
        """True if it holds everything that its last master knew."""
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
        self._content = State(run, incarnation, next_peer, dict(peers), dict(refused))
        return self._content.copy()

    def write(self, state: State) -> None:
        """Writes the differences from the file's content.

        Raises:
            OSError, sqlite3.Error, JournalError: it could not be written.
        """
        before, self._content = self._content, None
        try:
            if self._db is None:
                self._open()
            elif identity(self.path) != self._file:
                raise OSError("the file was removed or replaced while it was in use")
            assert self._db is not None
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                if before is None:
                    self._db.execute("DELETE FROM peers")
                    self._db.execute("DELETE FROM refused")
                    before = State(state.run)
                self._change(self._db, "peers", before.peers, state.peers)
                self._change(self._db, "refused", before.refused, state.refused)
                row = (state.run, state.incarnation, state.next_peer)
                self._db.execute("INSERT OR REPLACE INTO run VALUES (1, ?, ?, ?)", row)
        except BaseException:
            self._shut()
            raise
        self._content = state.copy()

    def mark(self, behind: bool) -> None:
        """Records in the lock's file whether the journal is behind. Raises OSError."""
        if behind != self._marked:
            self._mark(behind)

    def close(self) -> None:
        self._shut()
        self._lock.close()

    def _mark(self, behind: bool) -> None:
        self._lock.leave(f"{'behind' if behind else 'complete'}, process {os.getpid()}")
        self._marked = behind

    @staticmethod
    def _change(
        db: sqlite3.Connection, table: str, old: Mapping[int, bytes], new: Mapping[int, bytes]
    ) -> None:
        gone = [(number,) for number in old.keys() - new.keys()]
        there = [(number, data) for number, data in new.items() if old.get(number) != data]
        db.executemany(f"DELETE FROM {table} WHERE number = ?", gone)
        db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", there)

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        with open(descriptor, "rb") as file:
            header = file.read(len(HEADER))
        if header and header != HEADER:
            raise JournalError(f"{self.path} is not a journal of a master, but some other file")
        self._db = sqlite3.connect(
            self.path, timeout=self._patience_s, isolation_level=None, check_same_thread=False
        )
        try:
            self._check(self._db)
            self._file = identity(self.path)
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
                f"{VERSION}: use the pccl that wrote it, or another file for a new run"
            )
        db.execute(REFUSED)
        db.execute("PRAGMA synchronous = NORMAL")

    def _shut(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _error(self, error: Exception) -> JournalError:
        text = getattr(error, "strerror", None) or str(error)
        return JournalError(f"the journal {self.path} cannot be used: {text}")


_decode = msgspec.msgpack.Decoder(Refusal).decode


class OnError(Enum):
    """The master's reaction when it cannot write its journal."""

    CONTINUE = "continue"
    STOP = "stop"


class Scribe:
    """A master's journal and the thread that writes it, for use by one thread.

    Args:
        path: the file; created if it does not exist.
        run: the number of a new run, if the journal is empty.
        on_error: what to do if the journal cannot be written.

    Raises:
        JournalError: it cannot be used.
    """

    def __init__(self, path: Path, run: int, on_error: OnError = OnError.CONTINUE) -> None:
        self._stops = on_error is OnError.STOP
        self._patience_s = limits.JOURNAL_STOP_S if self._stops else limits.JOURNAL_PATIENCE_S
        self._file = JournalFile(path, self._patience_s)
        try:
            state = self._file.read() or State(run)
            state.incarnation += 1
            refused = {number: _decode(why) for number, why in state.refused.items()}
            self._file.write(state)
        except Exception as error:
            self._file.close()
            if isinstance(error, JournalError):
                raise
            raise JournalError(f"the journal {path} cannot be written: {error}") from None
        # the journal's content, for the master's state machine
        self.remembered = Journal(
            state.run,
            state.incarnation,
            state.next_peer,
            frozenset(state.peers),
            self._file.complete,
            refused,
        )
        self._state = state
        self._whole = self._file.complete  # if not, only returning peers know the rest
        self._asked = self._written = 0  # numbers of changes: all, and those in the file
        self._failed: tuple[float, str] | None = None  # since when it fails, and the last error
        self._said_s = 0.0
        self._ending = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="pccl-journal", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._file.close()
            raise JournalError(f"no thread could be started for the journal: {error}") from None

    # ---- the service ----

    def record(self, effect: Remember | Forget | Adopt) -> None:
        with self._news:
            state = self._state
            match effect:
                case Remember(info):
                    state.peers[info.peer] = msgspec.msgpack.encode(info)
                    state.next_peer = max(state.next_peer, info.peer + 1)
                case Forget(number, why):
                    state.peers.pop(number, None)
                    if why is not None:
                        state.refused[number] = msgspec.msgpack.encode(why)
                        keep_latest(state.refused)
                case Adopt(run, incarnation):
                    if run != state.run:
                        state.refused.clear()  # these were peers of the other run
                    state.run, state.incarnation = run, incarnation
            self._asked += 1

    def recovered(self) -> None:
        """Notes that the master knows the whole run again, even if the journal was behind."""
        if not self._whole:
            with self._news:
                self._whole = True
                self._asked += 1

    def settle(self) -> None:
        """Returns when all changes are written, or cannot be written.

        Raises JournalError: they cannot be written, and the master must stop.
        """
        if self._asked == self._written:
            return
        with self._news:
            self._news.notify_all()
            asked = self._asked
            self._news.wait_for(
                lambda: self._written >= asked or self._failed is not None, self._patience_s
            )
            if self._written >= asked:
                return
            if self._failed is None:
                self._fail(f"it takes longer than {self._patience_s:g} s")
            assert self._failed is not None
            if self._stops:
                raise JournalError(self._text(self._failed[1]))

    def close(self) -> None:
        """Writes the remaining changes, and closes the file."""
        with self._news:
            self._ending = True
            self._news.notify_all()
        self._thread.join(limits.JOURNAL_CLOSE_S)

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._news:
                behind = self._failed is not None
                if not self._ending and (behind or self._asked == self._written):
                    self._news.wait(limits.JOURNAL_RETRY_S if behind else None)
                behind = self._failed is not None
                ending, asked, whole = self._ending, self._asked, self._whole
                state = self._state.copy()
            if behind or asked != self._written:
                self._write(state, asked, whole)
            if ending:
                self._file.close()
                return

    def _write(self, state: State, asked: int, whole: bool) -> None:
        try:
            self._file.write(state)
            if whole:
                self._file.mark(behind=False)
        except Exception as error:  # of SQLite or the system, or a bug: the service continues
            with self._news:
                self._fail(str(error) or repr(error))
                self._news.notify_all()
            try:
                self._file.mark(behind=True)
            except OSError as another:
                log.error("master: %s.lock cannot be written either: %s", self._file.path, another)
            return
        with self._news:
            if self._failed is not None:
                seconds = time.monotonic() - self._failed[0]
                log.warning(
                    "master: the journal %s is written again, after %.1f s, and complete",
                    self._file.path,
                    seconds,
                )
            self._failed = None
            self._written = asked
            self._news.notify_all()

    # ---- both, with the lock ----

    def _fail(self, why: str) -> None:
        now_s = time.monotonic()
        since_s = now_s if self._failed is None else self._failed[0]
        if self._failed is None or now_s - self._said_s >= limits.LOG_REPEAT_S:
            self._said_s = now_s
            log.error("master: %s", self._text(why, now_s - since_s))
        self._failed = since_s, why

    def _text(self, why: str, seconds: float = 0.0) -> str:
        text = f"the journal {self._file.path} cannot be written: {why}"
        if self._stops:
            return text
        lasting = f", for {seconds:.0f} s by now" if seconds >= 1 else ""
        return f"{text}{lasting}; the run goes on without it, and writing is retried"
