"""Digests of memory, what proves the leaves of a transfer, and how two buffers differ."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from pccl.ext import ffi, lib
from pccl.protocol import messages as m
from pccl.runtime.client.sync import Staging
from pccl.runtime.digest import LEAF_BYTES, SPAN_BYTES, digest, digests, each_span
from pccl.tensors import Buffer
from pccl.types import DataType

SIZES = [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 9 * LEAF_BYTES + 5, 3]


def by_definition(data: bytes) -> tuple[bytes, bytes]:
    leaves = (data[begin : begin + LEAF_BYTES] for begin in range(0, len(data), LEAF_BYTES))
    table = b"".join(xxhash.xxh3_128_digest(leaf) for leaf in leaves)
    return xxhash.xxh3_128_digest(table), table


@pytest.mark.parametrize("threads", [1, 2, 5, None])
def test_digests_do_not_depend_on_threads(threads: int | None) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 256, 1 + size, np.uint8)[1:] for size in SIZES]
    found = digests([(array.ctypes.data, array.nbytes) for array in arrays], threads)
    for array, one in zip(arrays, found, strict=True):
        assert (one.root, one.table) == by_definition(array.tobytes())
        assert digest(array.ctypes.data, array.nbytes) == one.root


# ---- leaves that arrive ----


class Arrival:
    """Staging memory for one entry, into which this test writes instead of an engine."""

    def __init__(self, size: int) -> None:
        self.content = np.random.default_rng(4).integers(0, 256, size, np.uint8)
        self.old = np.zeros(size, np.uint8)
        root, self.table = by_definition(self.content.tobytes())
        self.staging = Staging(m.SyncPlan(1, 1, (), (2,), (0,), (root,)), [Buffer.of(self.old)])
        self.places = {number: address for number, address, _ in self.staging.pieces()}

    def write(self, piece: int, data: bytes, offset: int = 0) -> None:
        ffi.memmove(ffi.cast("char *", self.places[piece] + offset), data, len(data))

    def write_leaf(self, leaf: int, spoilt: bool = False) -> None:
        begin = leaf * LEAF_BYTES
        data = bytearray(self.content[begin : begin + LEAF_BYTES].tobytes())
        data[-1] ^= spoilt
        self.write(1, bytes(data), begin)


def test_leaves_wait_for_their_table() -> None:
    arrival = Arrival(2 * LEAF_BYTES + 1)
    for leaf in (2, 0):
        arrival.write_leaf(leaf)
        assert arrival.staging.verify(1, leaf) == []
    arrival.write(0, bytes(len(arrival.table)))
    assert arrival.staging.verify(0, 0) == [(0, 0, False)]
    arrival.write(0, arrival.table)
    assert arrival.staging.verify(0, 0) == [(0, 0, True), (1, 2, True), (1, 0, True)]
    arrival.write_leaf(1, spoilt=True)
    assert arrival.staging.verify(1, 1) == [(1, 1, False)]
    assert (arrival.staging.entries_proven, arrival.staging.bytes_proven) == (0, LEAF_BYTES + 1)
    arrival.write_leaf(1)
    assert arrival.staging.verify(1, 1) == [(1, 1, True)]
    assert (arrival.staging.entries_proven, arrival.staging.bytes_proven) == (1, arrival.old.size)
    assert not arrival.old.any()
    arrival.staging.install()
    np.testing.assert_array_equal(arrival.old, arrival.content)


def test_an_entry_of_one_leaf_needs_no_table() -> None:
    arrival = Arrival(1000)
    assert list(arrival.places) == [1]
    assert arrival.staging.verify(1, 0) == [(1, 0, False)]
    arrival.write_leaf(0)
    assert arrival.staging.verify(1, 0) == [(1, 0, True)]


# ---- differences ----


def compare(dtype: DataType, a: np.ndarray, b: np.ndarray, count: int) -> tuple[int, ...]:
    found = ffi.new("pccl_difference *")
    pointers = [ffi.cast("void *", array.ctypes.data) for array in (a, b)]
    assert lib.pccl_compare(dtype.value, *pointers, count, found) == 0
    return found.bytes, found.ulp, found.nans_a, found.nans_b


FLOATS = {  # bits of the element, of the mantissa
    DataType.FLOAT16: (16, 10),
    DataType.BFLOAT16: (16, 7),
    DataType.FLOAT: (32, 23),
    DataType.DOUBLE: (64, 52),
}


def order(dtype: DataType, bits: int) -> int | None:
    """The place of a value among all of its type; None for a NaN."""
    if dtype not in FLOATS:
        width = 8 * dtype.itemsize
        signed = dtype.name.startswith("INT")
        return bits - (1 << width) if signed and bits >> (width - 1) else bits
    width, mantissa = FLOATS[dtype]
    magnitude = bits & ((1 << (width - 1)) - 1)
    if magnitude > ((1 << (width - 1)) - 1) >> mantissa << mantissa:
        return None
    return -magnitude if bits >> (width - 1) else magnitude


@pytest.mark.parametrize("dtype", list(DataType), ids=lambda dtype: dtype.name)
def test_differences(dtype: DataType) -> None:
    rng = np.random.default_rng(dtype.value)
    unsigned: Any = np.dtype(f"u{dtype.itemsize}")
    for count in (0, 1, 501):
        a = rng.integers(0, 1 << 63, count, np.uint64).astype(unsigned)
        b = np.where(rng.random(count) < 0.5, a, a ^ 5).astype(unsigned)
        if count > 1:
            top = 1 << (8 * dtype.itemsize - 1)
            a[:4], b[:4] = [0, top, top - 1, 7], [top, 1, top, top + 7]
        orders = [(order(dtype, int(x)), order(dtype, int(y))) for x, y in zip(a, b, strict=True)]
        ulp = max((abs(x - y) for x, y in orders if x is not None and y is not None), default=0)
        expected = (
            int((a.view(np.uint8) != b.view(np.uint8)).sum()),
            ulp,
            sum(x is None for x, _ in orders),
            sum(y is None for _, y in orders),
        )
        odd = [np.concatenate([np.zeros(1, np.uint8), x.view(np.uint8)])[1:] for x in (a, b)]
        assert compare(dtype, a, b, count) == expected
        assert compare(dtype, odd[0], odd[1], count) == expected
    assert lib.pccl_compare(99, ffi.NULL, ffi.NULL, 0, ffi.new("pccl_difference *")) < 0


def test_where_no_thread_can_be_started_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(3 * SPAN_BYTES // 8)
    memory = [(data.ctypes.data, data.nbytes)]
    expected = digests(memory, threads=1)
    assert digests(memory, threads=4) == expected

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert digests(memory, threads=4) == expected


def test_an_error_in_a_thread_is_raised() -> None:
    def work(index: int, begin: int, end: int) -> None:
        if begin == SPAN_BYTES:
            raise MemoryError("of all times now")

    with pytest.raises(MemoryError, match="of all times now"):
        each_span([4 * SPAN_BYTES], work, threads=2)
