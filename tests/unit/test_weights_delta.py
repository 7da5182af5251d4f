"""Differences between two contents of a tensor, and the heads of packages."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.weights.tensors import (
    Damaged,
    Head,
    How,
    Tensors,
    apply,
    blob_of,
    difference,
    found_digests,
    read_head,
    words,
)

HEADER = struct.Struct("<BBxxIII")


def content(seed: int, count: int, itemsize: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * itemsize, np.uint8)


@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3000), st.floats(0, 1))
def test_a_difference_leads_from_one_content_to_the_other(
    seed: int, itemsize: int, count: int, share: float
) -> None:
    old, new = content(seed, count, itemsize), content(seed + 1, count, itemsize)
    kept = np.random.default_rng(seed).random(count) >= share
    words(new, itemsize)[kept] = words(old, itemsize)[kept]
    data = difference(words(old, itemsize), words(new, itemsize))
    assert apply(words(old, itemsize), memoryview(data)) == len(data)
    assert (old == new).all()


def test_what_has_not_changed_takes_nothing_and_what_has_takes_little() -> None:
    old = content(0, 1 << 20, 2)
    bits = words(old, 2)
    assert len(difference(bits, bits)) == HEADER.size
    new = bits.copy()
    new[np.random.default_rng(1).choice(bits.size, bits.size // 50, replace=False)] ^= 1
    assert len(difference(bits, new)) * 8 < 0.19 * bits.size
    assert difference(bits, new)[0] == How.SPARSE
    assert difference(bits, bits ^ np.uint16(1))[0] == How.DENSE


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_harmless(data: bytes) -> None:
    target = np.zeros(100, np.uint16)
    try:
        apply(target, memoryview(data))
    except Damaged:
        pass


@given(st.integers(0, 100_000), st.integers(0, 255))
def test_one_changed_byte_never_writes_elsewhere(at: int, value: int) -> None:
    memory = np.zeros(300, np.uint16)
    old, new = memory[100:200], memory[100:200].copy()
    new[::7] = 5
    data = bytearray(difference(old, new))
    data[at % len(data)] = value
    try:
        apply(old, memoryview(bytes(data)))
    except Damaged:
        pass
    assert not memory[:100].any() and not memory[200:].any()


@pytest.mark.parametrize(
    ("header", "raw", "why"),
    [
        ((How.SPARSE, 4, 1, 6), struct.pack("<IH", 100, 1), "out of the tensor"),
        ((How.SPARSE, 8, 2, 20), struct.pack("<16s", b"\xff" * 16) + b"\1\0\1\0", "out of the"),
        ((How.SPARSE, 3, 1, 5), bytes(5), "another size"),
        ((How.SPARSE, 1, 101, 303), bytes(303), "longer than"),
        ((How.DENSE, 0, 1, 199), bytes(199), "another size"),
        ((7, 0, 1, 0), b"", "another size"),
        ((How.DENSE, 0, 1, 200), bytes(150), "than it says"),
        ((How.DENSE, 0, 1, 200), bytes(1 << 22), "than it says"),
    ],
)
def test_impossible_differences_are_refused(
    header: tuple[int, int, int, int], raw: bytes, why: str
) -> None:
    packed = zlib.compress(raw)
    data = HEADER.pack(*header, len(packed)) + packed
    with pytest.raises(Damaged, match=why):
        apply(np.zeros(100, np.uint16), memoryview(data))


def test_what_is_cut_off_is_refused() -> None:
    old, new = np.zeros(100, np.uint16), np.arange(100, dtype=np.uint16)
    data = difference(old, new)
    for end in (0, 5, len(data) - 1):
        with pytest.raises(Damaged):
            apply(old.copy(), memoryview(data[:end]))


# ---- tensors ----

ARRAYS = {"b": np.arange(5, dtype=np.float32), "a": np.arange(3.0), "empty": np.empty(0, np.int8)}


def test_tensors_lie_in_the_order_of_their_names() -> None:
    tensors = Tensors(ARRAYS, writable=False)
    assert tensors.nbytes == 128 and tensors.sizes == [24, 20, 0]
    stretch = tensors.stretch()
    each, _ = tensors.read()
    for own, one in zip(tensors.within(stretch), each, strict=True):
        own[:] = one
    head = tensors.head(1, 0, found_digests(tensors.within(stretch)), tensors.sizes)
    assert tensors.mismatch(read_head(blob_of(head, stretch).head)) == ""
    assert head.content == blob_of(head, stretch).package.content
    copy = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    Tensors(copy, writable=True).write(stretch, [0, 1, 2])
    assert all((copy[name] == ARRAYS[name]).all() for name in ARRAYS)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"a": np.zeros(3)}, "'b' is only here"),
        ({**ARRAYS, "c": np.zeros(1)}, "'c' is only in what was published"),
        ({**ARRAYS, "a": np.zeros(4)}, "'a' has 4 elements of float64 where 3 elements of float64"),
        ({**ARRAYS, "b": np.zeros(5, np.int32)}, "'b' has 5 elements of int32 where 5"),
    ],
)
def test_what_does_not_fit_is_said(theirs: dict[str, np.ndarray], why: str) -> None:
    tensors = Tensors(theirs, writable=False)
    found = [b"x" * 16] * len(theirs)
    head = tensors.head(1, 0, found, tensors.sizes)
    assert why in Tensors(ARRAYS, writable=False).mismatch(head)


def test_the_order_in_memory_must_be_the_same() -> None:
    one = Tensors({"a": np.zeros((2, 3))}, writable=False)
    other = Tensors({"a": np.zeros((3, 2)).T}, writable=False)
    head = other.head(1, 0, [b"x" * 16], other.sizes)
    assert "(2x3 with strides 1,2) where 6" in one.mismatch(head)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_head_are_refused(data: bytes) -> None:
    try:
        assert isinstance(read_head(memoryview(data)), Head)
    except Damaged:
        pass


@pytest.mark.parametrize("parameters", [{}, {"": np.zeros(1)}, {"x" * 257: np.zeros(1)}])
def test_parameters_need_names(parameters: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="parameter"):
        Tensors(parameters, writable=False)
