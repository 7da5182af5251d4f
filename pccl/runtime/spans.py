"""Processes large memory span by span, in several threads if that is faster.

The work must release the GIL, as hashing and copying do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from pccl.runtime import limits
from pccl.runtime.uninterrupted import aside

SPAN_BYTES = 16 << 20  # that a thread takes at a time
ALONE_BYTES = 32 << 20  # below this, starting threads costs more than they save
_Span: TypeAlias = tuple[int, int, int]


def each_span(
    sizes: Sequence[int], work: Callable[[int, int, int], None], threads: int | None = None
) -> None:
    """Calls work(i, begin, end) for all spans of several areas of memory, sizes[i] bytes each.

    Args:
        sizes: bytes of each area.
        work: called in any order.
        threads: number of threads; None: as many as help.
    """
    if threads is None:
        threads = 1 if sum(sizes) < ALONE_BYTES else min(_cores(), limits.SPAN_THREADS_MAX)
    if threads == 1:
        for span in _spans(sizes):
            work(*span)
        return
    # In a separate thread: after an exception in the caller, no thread may still use its memory.
    aside(lambda: _share(list(_spans(sizes)), work, threads))


def _share(spans: list[_Span], work: Callable[[int, int, int], None], threads: int) -> None:
    """Does the work in up to `threads` threads, including this one."""
    left = iter(spans)  # next() of a list's iterator may be called by several threads
    failures: list[BaseException] = []

    def take_part() -> None:
        try:
            for span in left:
                if not failures:
                    work(*span)
        except BaseException as error:
            failures.append(error)

    helpers = []
    for _ in range(threads - 1):
        helper = threading.Thread(target=take_part, name="pccl-span", daemon=True)
        with contextlib.suppress(RuntimeError):  # fewer threads do it then
            helper.start()
            helpers.append(helper)
    take_part()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _spans(sizes: Sequence[int]) -> Iterator[_Span]:
    for index, nbytes in enumerate(sizes):
        for begin in range(0, nbytes, SPAN_BYTES):
            yield index, begin, min(begin + SPAN_BYTES, nbytes)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
