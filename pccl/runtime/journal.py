"""The master's journal: one SQLite file that says which run it is and who was accepted.

A commit survives that the process is killed, not that the machine loses power at that moment
(synchronous is NORMAL): then the journal may lack the last newcomers, who are refused and join
again.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from pccl.protocol import master as core
from pccl.protocol import messages as m

SCHEMA = """
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    CREATE TABLE IF NOT EXISTS run (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        run INTEGER NOT NULL,
        incarnation INTEGER NOT NULL,
        next_peer INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS peers (number INTEGER PRIMARY KEY, info BLOB NOT NULL);
"""


class Journal:
    """An open journal; to be used by one thread at a time.

    Args:
        path: of the file; made if it is not there.

    Raises:
        OSError: it cannot be opened, or is no journal of a master.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"{path} cannot be used as a master's journal: {error}") from None

    def begin(self, run: int) -> core.Journal:
        """Counts one more start of the master.

        Args:
            run: the nonce of a new run, for a journal that is empty.

        Returns:
            What it remembers.
        """
        row = self._db.execute("SELECT run, incarnation, next_peer FROM run").fetchone()
        run, incarnation, next_peer = row or (run, -1, 1)
        self._db.execute(
            "INSERT OR REPLACE INTO run VALUES (1, ?, ?, ?)", (run, incarnation + 1, next_peer)
        )
        numbers = self._db.execute("SELECT number FROM peers").fetchall()
        accepted = frozenset(number for (number,) in numbers)
        return core.Journal(run, incarnation + 1, next_peer, accepted)

    def adopt(self, run: int) -> None:
        """The master goes on with a run that it did not know."""
        self._db.execute("UPDATE run SET run = ?", (run,))

    def remember(self, info: m.PeerInfo) -> None:
        """A peer was accepted."""
        self._db.execute("BEGIN")
        row = (info.peer, msgspec.msgpack.encode(info))
        self._db.execute("INSERT OR REPLACE INTO peers VALUES (?, ?)", row)
        self._db.execute("UPDATE run SET next_peer = max(next_peer, ?)", (info.peer + 1,))
        self._db.execute("COMMIT")

    def forget(self, number: int) -> None:
        """A peer is gone."""
        self._db.execute("DELETE FROM peers WHERE number = ?", (number,))

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
