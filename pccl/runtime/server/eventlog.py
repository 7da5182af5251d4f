"""Records all inputs of the master, without ever holding it up.

The service thread makes the lines, and a separate thread writes them, so that a disk that hangs
does not stop the service. If it cannot write, that is said once, and it tries again and again; if
more lines wait than `EVENT_LOG_WAITING_BYTES`, the following ones are lost, and a line says so.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from pccl.protocol.master import Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.record import Gap, Recorder, exception_text
from pccl.runtime import limits
from pccl.runtime.server.eventfile import EventFile

log = logging.getLogger("pccl")

BATCH_BYTES = 1 << 20  # written at once
UNKNOWN = -1  # lines are missing, and it is not known yet how many


class EventLog:
    """An event log, and the thread that writes it. To be used by one thread.

    Args:
        path: of its file.

    Raises:
        EventLogError: it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._file = EventFile(path)
        self._recorder = Recorder(secrets.token_bytes(32))
        self._encoder = msgspec.json.Encoder()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._missing = 0  # lines that are lost after those that wait
        self._written = 0  # lines of this master, lost ones included
        self._lost = 0  # of these since `_failed`
        self._failed: tuple[float, str] | None = None  # since when, and why
        self._broken = False  # whether a line could not even be made: that was said
        self._ending = False
        self._news = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pccl-events", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._file.close()
            raise

    # ---- the service ----

    def began(self, began: inputs.Began, at_s: float, effects: list[Effect]) -> None:
        """A master begins, after these effects of the one before."""
        self._note(at_s, began, effects)

    def feed(self, master: Master, event: inputs.Event) -> list[Effect]:
        """Has an input happen to the master. Raises what that raises."""
        recovering = master.recovering
        try:
            effects = inputs.feed(master, event)
        except BaseException as error:
            self._note(master.now_s, event, [], exception_text(error))
            raise
        if self._recorder.matters(event, recovering, effects):
            self._note(master.now_s, event, effects)
        return effects

    def close(self) -> None:
        """Writes what waits, if that is possible, and closes the file."""
        with self._news:
            self._ending = True
            self._news.notify_all()
        self._over.set()
        self._thread.join(limits.JOURNAL_CLOSE_S)

    def forked(self) -> None:
        """Called in a forked child: the file belongs to the parent."""
        self._file.forked()

    def _note(
        self, at_s: float, event: inputs.Input, effects: list[Effect], failed: str = ""
    ) -> None:
        """Hands a line to the thread. Whatever fails here must not fail the master."""
        line: bytes | None = None
        try:
            made = self._recorder.line(at_s, event, effects, failed)
            line = self._encoder.encode(made) + b"\n"
        except Exception:
            if not self._broken:
                self._broken = True
                log.exception("master: an event cannot be recorded")
        with self._news:
            full = self._waiting_bytes > limits.EVENT_LOG_WAITING_BYTES
            if line is None or full or self._missing:
                self._missing += 1
                if full and self._failed is None:
                    self._fail("the disk is slower than the events come")
            else:
                self._waiting.append(line)
                self._waiting_bytes += len(line)
            self._news.notify_all()

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._news:
                while not (self._waiting or self._missing or self._ending):
                    self._news.wait()
                batch, ending = self._take(), self._ending
                lost = self._missing if len(batch) == len(self._waiting) else 0
            written = self._write(batch, lost) if batch or lost else True
            if ending and not (written and (self._waiting or self._missing)):
                self._file.close()
                return
            pause_s = limits.EVENT_LOG_PAUSE_S if written else limits.JOURNAL_RETRY_S
            self._over.wait(pause_s)

    def _take(self) -> list[bytes]:
        batch: list[bytes] = []
        nbytes = 0
        for line in self._waiting:
            nbytes += len(line)
            if batch and nbytes > BATCH_BYTES:
                break
            batch.append(line)
        return batch

    def _write(self, batch: list[bytes], lost: int) -> bool:
        """Writes lines, and how many are lost after them; whether that worked."""
        why = self._failed[1] if self._failed is not None else "an error of the master"
        gap = [self._encoder.encode(Gap(lost, why)) + b"\n"] if lost else []
        try:
            self._file.write(b"".join(batch + gap), self._written, lost)
        except Exception as error:  # of the system, or a bug: the service continues
            with self._news:
                self._fail(getattr(error, "strerror", None) or str(error) or repr(error))
            self._mark()
            return False
        with self._news:
            for line in batch:
                self._waiting.popleft()
                self._waiting_bytes -= len(line)
            self._written += len(batch) + lost
            self._missing -= lost
            self._lost += lost
            if self._failed is not None and not (self._waiting or self._missing):
                self._mend()
        return True

    def _mark(self) -> None:
        """Lines are lost if this master ends now: the head must say so already."""
        try:
            self._file.mark(UNKNOWN)
        except OSError as error:
            log.debug("master: nor can the head of %s say so: %s", self._file.path, error)

    # ---- both, with the lock ----

    def _fail(self, why: str) -> None:
        if self._failed is None:
            log.error(
                "master: the event log %s cannot be written: %s; the run goes on, and it is tried "
                "again and again",
                self._file.path,
                why,
            )
            self._failed = time.monotonic(), why

    def _mend(self) -> None:
        assert self._failed is not None
        log.warning(
            "master: the event log %s is written again, after %.1f s; it lacks %s",
            self._file.path,
            time.monotonic() - self._failed[0],
            f"{self._lost} events" if self._lost else "nothing",
        )
        self._failed, self._lost = None, 0
