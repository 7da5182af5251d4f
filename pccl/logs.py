"""The logger, as PCCL_LOG_LEVEL sets it."""

from __future__ import annotations

import logging
import os

TRACE = 5
LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
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
