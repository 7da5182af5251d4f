"""An exception at a chosen line of pccl, as a signal handler raises between two bytecodes."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pccl

PACKAGE = str(Path(pccl.__file__).parent)


class Injected(BaseException):
    """No handler of pccl's can expect it."""


def in_conditions(frame: FrameType, event: str, argument: object) -> Any:
    """A tracer that raises Injected when a Condition, or an Event, has just taken its lock."""
    if frame.f_code is threading.Condition.__enter__.__code__ and event == "return":
        raise Injected
    return in_conditions


@contextlib.contextmanager
def interrupted_in_conditions() -> Iterator[None]:
    sys.settrace(in_conditions)
    try:
        yield
    except Injected:
        pass
    finally:
        sys.settrace(None)


@dataclass
class Tracer:
    """Raises Injected at some lines of pccl that this thread executes, counted from 1.

    Not at a `with` or a `try`, where CPython lets no exception of a signal or of another thread in,
    and nothing would handle it: a tracer hears of a `with` once more at the end of its body, before
    what it holds is released; and the beginning of a `try` in another one is in neither. Nor in a
    `__del__`, where Python ignores exceptions.
    """

    at: frozenset[int] = frozenset()
    lines: int = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "__del__":
            return None
        if event == "line" and not self._begins_block(frame):
            self.lines += 1
            if self.lines in self.at:
                sys.settrace(self)  # which an exception of a tracer ends
                raise Injected
        return self

    def _begins_block(self, frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return line.lstrip().startswith(("with ", "try:"))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Follows what this thread does."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
