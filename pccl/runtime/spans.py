"""Work on large memory span by span, in as many threads as that takes to be fast.

The work has to let go of the GIL, as hashing and copying do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pccl.runtime.call import aside

SPAN_BYTES = 16 << 20  # that one thread works on at a stretch
THREADS_MAX = 8  # they saturate the memory of any machine
ALONE_BYTES = 32 << 20  # below this, starting threads costs more than they save


def each_span(
    sizes: Sequence[int], work: Callable[[int, int, int], None], threads: int | None = None
) -> None:
    """Calls work(i, begin, end) for all spans of stretches of memory, sizes[i] bytes each.

    Args:
        sizes: bytes of each stretch.
        work: done in any order.
        threads: how many do it; None: as many as help.
    """
    if threads is None:
        threads = 1 if sum(sizes) < ALONE_BYTES else min(_cores(), THREADS_MAX)
    if threads == 1:
        for span in _spans(sizes):
            work(*span)
        return

    def in_threads() -> None:
        with ThreadPoolExecutor(threads, "pccl-span") as pool:
            for _ in pool.map(lambda span: work(*span), _spans(sizes)):
                pass

    aside(in_threads)  # an exception that comes to the caller must not leave them at its memory


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for index, nbytes in enumerate(sizes):
        for begin in range(0, nbytes, SPAN_BYTES):
            yield index, begin, min(begin + SPAN_BYTES, nbytes)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
