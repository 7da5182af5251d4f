"""The diaries of a stress run, one for each worker and one for the director, as JSON lines.

Each worker writes its own file without a buffer, so its entries stay when it is killed. All times
are from the machine's monotonic clock.

A sum reveals its contributors: each worker has its own digit, to base 4, of a long number, so a sum
shows how often each worker has contributed, up to three times.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from pccl.cli.processes import held

WORDS = 64  # of a contribution
DIGITS = 32  # of a word
WORKERS = WORDS * DIGITS  # whose contributions differ
Words: TypeAlias = tuple[tuple[int, int], ...]  # those that are not 0, by their places
DIRECTOR = "director.jsonl"


class Joined(Struct, frozen=True, tag="joined"):
    """The worker is in the run, for the first time or again."""

    at_s: float
    group: int = 0


class Begin(Struct, frozen=True, tag="begin"):
    """The worker enters a call."""

    at_s: float
    what: str  # "sync", which ends with a shared state; "reduce"; or another call
    revision: int  # of its shared state
    attempt: int = 0  # how often this reduction has failed before
    repeats: int = 0  # how often the contribution is repeated in the buffer
    gives: Words = ()  # its contribution
    tag: int = 0  # of the reduction: several may be open at once


class End(Struct, frozen=True, tag="end"):
    """The call is over."""

    at_s: float
    # "done"; "lost": a peer was lost; "alone": there is no other peer; "inner": the shared state
    # has not changed
    outcome: str
    revision: int  # of the shared state, after a "sync"
    digest: str = ""  # of the shared state after a "sync"; of the whole buffer after a "reduce"
    sum: Words = ()  # the words at the start of that buffer
    world: int = 0  # how many peers the group had
    tag: int = 0  # that of its Begin
    what: str = "sync"  # that of its Begin


class Size(Struct, frozen=True, tag="size"):
    """The resources of the worker's process."""

    at_s: float
    descriptors: int
    threads: int
    mib: int


class Out(Struct, frozen=True, tag="out"):
    """The worker's membership has ended: "left", "dropped", "cut off" by a fault, or "failed"."""

    at_s: float
    how: str
    why: str = ""


class Fault(Struct, frozen=True, tag="fault"):
    """A fault of a worker, or of the master, with `worker` -1."""

    at_s: float
    what: str
    worker: int = -1


Entry: TypeAlias = Joined | Begin | End | Size | Out | Fault


class Diary:
    """A file of entries, which grows."""

    def __init__(self, path: Path) -> None:
        binary = getattr(os, "O_BINARY", 0)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | binary, 0o644)

    def write(self, entry: Entry) -> None:
        os.write(self._file, msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        os.close(self._file)

    def size(self) -> None:
        """Writes the resources of this process, if the system reports them."""
        if (found := held(os.getpid())) is not None:
            self.write(Size(now(), found[0], threading.active_count(), found[2]))


def path_of(directory: Path, worker: int) -> Path:
    """The diary of a worker."""
    return directory / f"worker-{worker}.jsonl"


def read(path: Path) -> list[Entry]:
    """The entries of a diary, without an incomplete last line.

    Raises msgspec.DecodeError: another line is damaged.
    """
    decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
    data = path.read_bytes()
    whole, _, _ = data.rpartition(b"\n")
    return [decoder.decode(line) for line in whole.split(b"\n") if line]


def workers(directory: Path) -> Iterator[int]:
    """The numbers of the workers that have written a diary."""
    for path in sorted(directory.glob("worker-*.jsonl")):
        yield int(path.stem.partition("-")[2])


# ---- contributions ----


def contribution(worker: int) -> Words:
    """The contribution of a worker: 1 at its own digit."""
    return ((worker // DIGITS % WORDS, 4 ** (worker % DIGITS)),)


def contributors(total: Words) -> dict[int, int]:
    """How often each worker, by its number modulo WORKERS, has contributed to a sum."""
    return {
        index * DIGITS + digit: count
        for index, word in total
        for digit in range(DIGITS)
        if (count := word >> (2 * digit) & 3)
    }


def buffer_of(words: Words, repeats: int) -> np.ndarray:
    """The words, repeated."""
    whole = np.zeros(WORDS, np.uint64)
    for index, word in words:
        whole[index] = word
    return np.tile(whole, repeats)


def words_of(buffer: np.ndarray) -> Words:
    """The words at the start of a buffer."""
    (indices,) = np.nonzero(buffer[:WORDS])
    return tuple((int(index), int(buffer[index])) for index in indices)


def digest_of(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(array.data)


def now() -> float:
    return time.monotonic()
