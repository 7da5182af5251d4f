"""Writes the master's journal, and keeps the master running when it cannot be written.

A separate thread writes, so that a disk that hangs does not stop the service. Changes are written
before the messages that depend on them are sent: the service waits for the thread, but only for
`JOURNAL_PATIENCE_S`. If that time passes, or writing fails, the master continues without the
journal: the journal is *behind*, the log says so, and the thread retries until it has written the
whole current state. A master that is restarted before that trusts the peers that come back, as one
without a journal does (journal.py says how it knows). If configured so, the master ends instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master import Journal
from pccl.protocol.master.effects import Refusal
from pccl.protocol.master.recovery import REFUSED_MAX, WHOLE_RUN
from pccl.runtime import limits
from pccl.runtime.server.journal import JournalError, JournalFile, State

log = logging.getLogger("pccl")
_decode = msgspec.msgpack.Decoder(Refusal).decode


class OnError(Enum):
    """What the master does when its journal cannot be written."""

    CONTINUE = "continue"
    STOP = "stop"


class Scribe:
    """A master's journal, and the thread that writes it. To be used by one thread.

    Args:
        path: of the file; created if it does not exist.
        run: the number of a new run, if the journal is empty.
        on_error: what to do if it cannot be written.

    Attributes:
        remembered: its content, for the master's state machine.

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
            self._file.write(state, {})
        except Exception as error:
            self._file.close()
            if isinstance(error, JournalError):
                raise
            raise JournalError(f"the journal {path} cannot be written: {error}") from None
        self.remembered = Journal(
            state.run,
            state.incarnation,
            state.next_peer,
            frozenset(state.peers),
            self._file.complete,
            refused,
        )
        self._state = state
        self._whole = self._file.complete  # if not, only peers that come back know the rest
        self._changed: dict[int, bytes | None] = {}
        self._asked = self._written = 0  # numbers of changes: all, and those in the file
        self._failed: tuple[float, str] | None = None  # since when, and why last
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

    def adopt(self, run: int, incarnation: int) -> None:
        """The master continues a run, which it may not have known, in a new incarnation."""
        with self._news:
            if run != self._state.run:
                self._state.refused.clear()  # these were peers of another one
            self._state.run, self._state.incarnation = run, incarnation
            self._asked += 1

    def remember(self, info: m.PeerInfo) -> None:
        """A peer was accepted."""
        with self._news:
            self._changed[info.peer] = self._state.peers[info.peer] = msgspec.msgpack.encode(info)
            self._state.next_peer = max(self._state.next_peer, info.peer + 1)
            self._asked += 1

    def forget(self, number: int, why: Refusal | None = None) -> None:
        """A peer is gone; and why, if it was dropped."""
        with self._news:
            self._changed[number] = None
            self._state.peers.pop(number, None)
            if why is not None:
                refused = self._state.refused
                refused[number] = msgspec.msgpack.encode(why)
                if len(refused) > REFUSED_MAX:
                    del refused[min(refused.keys() - {WHOLE_RUN})]
            self._asked += 1

    def recovered(self) -> None:
        """The master knows everything again, even if the journal was behind."""
        if not self._whole:
            with self._news:
                self._whole = True
                self._asked += 1

    def settle(self) -> None:
        """Returns when all changes are written, or cannot be written.

        Raises:
            JournalError: they cannot be written, and the master must stop.
        """
        if self._asked == self._written:
            return
        with self._news:
            self._news.notify_all()
            asked = self._asked
            if self._failed is None:
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

    def forked(self) -> None:
        """Called in a forked child: the file belongs to the parent."""
        self._file.forked()

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._news:
                behind = self._failed is not None
                if not self._ending and (behind or self._asked == self._written):
                    self._news.wait(limits.JOURNAL_RETRY_S if behind else None)
                behind = self._failed is not None
                ending, asked, whole = self._ending, self._asked, self._whole
                peers, refused = dict(self._state.peers), dict(self._state.refused)
                state = replace(self._state, peers=peers, refused=refused)
                changed = None if behind else self._changed
                self._changed = {}
            if behind or asked != self._written:
                self._write(state, changed, asked, whole)
            if ending:
                self._file.close()
                return

    def _write(
        self, state: State, changed: Mapping[int, bytes | None] | None, asked: int, whole: bool
    ) -> None:
        try:
            self._file.write(state, changed)
            if whole:
                self._file.mark(behind=False)
        except Exception as error:  # of SQLite, the system, or a bug: the service continues
            with self._news:
                self._fail(str(error) or repr(error))
                self._news.notify_all()
            try:
                self._file.mark(behind=True)
            except OSError as another:
                log.error("master: nor can %s.lock say so: %s", self._file.path, another)
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
        return f"{text}{lasting}; the run goes on without it, and it is tried again and again"
