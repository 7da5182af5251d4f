"""The logger, as PCCL_LOG_LEVEL sets it, and warnings that come seldom."""

from __future__ import annotations

import logging
import os
import time

REMINDER_S = 5.0  # to the second warning of the same kind; each further gap is twice as long

TRACE = 5
LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERR": logging.ERROR,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "FATAL": logging.CRITICAL,
    "NONE": logging.CRITICAL + 10,
}


def configure_logging() -> None:
    """Sets the level of the `pccl` logger from PCCL_LOG_LEVEL and sends it to stderr, once.

    An unknown level is reported and otherwise ignored: nothing is fatal because of a log level.
    """
    logger = logging.getLogger("pccl")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s pccl %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    name = os.environ.get("PCCL_LOG_LEVEL", "WARN")
    logger.setLevel(LEVELS.get(name.upper(), logging.WARNING))
    if name.upper() not in LEVELS:
        logger.warning("PCCL_LOG_LEVEL is %r: it may be %s", name, ", ".join(LEVELS))


class Reminder:
    """Says the same thing seldom: at once, and then after gaps that grow."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Makes the next message new."""
        self._next_s, self._gap_s = 0.0, REMINDER_S

    def warn(self, text: str) -> None:
        """Says it, if it is time."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._log.warning(text)
            if self._next_s:
                self._gap_s *= 2
            self._next_s = now_s + self._gap_s
