"""The kernels against numpy, to the bit: types, operations, sizes, alignments, values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import collectives as oracle
from oracles import quantized

from pccl import kernels
from pccl.ext import ffi, lib

SIZES = range(131)
SPECIAL = {  # bits: zeros, subnormals, around 1, the largest, infinities, NaNs
    "float16": [0, 1, 0x3FF, 0x400, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7C01, 0x7E01],
    "bfloat16": [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC1],
    "float32": [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001],
    "float64": [0, 1, 1 << 52, 0x3FF << 52, (0x7FF << 52) - 1, 0x7FF << 52, (0x7FF << 52) + 1],
}
SIGN = {"float16": 1 << 15, "bfloat16": 1 << 15, "float32": 1 << 31, "float64": 1 << 63}


def pointer(array: np.ndarray[Any, Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def shifted(array: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
    """A copy that begins `offset` bytes after an address that is a multiple of 64."""
    block = np.zeros(array.nbytes + 128 + offset, np.uint8)
    begin = -block.ctypes.data % 64 + offset
    out = block[begin : begin + array.nbytes].view(array.dtype)
    out[:] = array
    return out


def reduce(dtype: str, op: str, out: Any, a: Any, b: Any, divisor: int = 1) -> np.ndarray[Any, Any]:
    """pccl_reduce(), which must succeed; returns `out`."""
    status = lib.pccl_reduce(
        oracle.DTYPES.index(dtype),
        oracle.OPS.index(op),
        pointer(out),
        pointer(a),
        pointer(b),
        a.size,
        divisor,
    )
    assert status == 0
    return out


def samples(dtype: str, n: int, seed: int) -> np.ndarray[Any, Any]:
    """Arbitrary bits, and for floats also special values and numbers near 1."""
    rng = np.random.default_rng(seed)
    store = oracle.storage(dtype)
    bits = rng.integers(0, 1 << 8 * store.itemsize, n, f"u{store.itemsize}", endpoint=False)
    if dtype not in oracle.FLOATS:
        return bits.view(store)
    special = np.array([*SPECIAL[dtype], *(s | SIGN[dtype] for s in SPECIAL[dtype])], bits.dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    near = oracle.encode(rng.standard_normal(n).astype(wide), dtype).view(bits.dtype)
    kind = rng.integers(0, 4, n)
    return (
        np.choose(kind, [bits, rng.choice(special, n), near, near]).astype(bits.dtype).view(store)
    )


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_every_size_and_alignment(dtype: str, op: str) -> None:
    for n in SIZES:
        a, b = samples(dtype, n, 2 * n), samples(dtype, n, 2 * n + 1)
        wanted = oracle.reduce(a, b, op, dtype, 3)
        for offset in (0, 1, n % 61):
            x, y = shifted(a, offset), shifted(b, (offset * 7) % 64)
            out = shifted(np.zeros_like(a), (offset * 3) % 64)
            assert same_bits(reduce(dtype, op, out, x, y, 3), wanted), (n, offset)
            assert same_bits(x, a), "an operand changed"
            assert same_bits(y, b), "an operand changed"
            assert same_bits(reduce(dtype, op, y, x, y, 3), wanted), (n, offset)
            assert same_bits(reduce(dtype, op, x, x, shifted(b, offset), 3), wanted), (n, offset)


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_many_values(dtype: str, op: str) -> None:
    a, b = samples(dtype, 50_000, 1), samples(dtype, 50_000, 2)
    for divisor in (1, 2, 7, 4096, (1 << 32) - 1):
        wanted = oracle.reduce(a, b, op, dtype, divisor)
        assert same_bits(reduce(dtype, op, np.zeros_like(a), a, b, divisor), wanted), divisor
        assert same_bits(reduce(dtype, op, np.zeros_like(a), b, a, divisor), wanted), "commutes"


@pytest.mark.parametrize("dtype", oracle.FLOATS)
@pytest.mark.parametrize("op", oracle.OPS)
def test_special_values_by_each_other(dtype: str, op: str) -> None:
    bits = np.array([*SPECIAL[dtype], *(s | SIGN[dtype] for s in SPECIAL[dtype])])
    values = bits.astype(f"u{oracle.storage(dtype).itemsize}").view(oracle.storage(dtype))
    a, b = np.repeat(values, values.size), np.tile(values, values.size)
    out = reduce(dtype, op, np.zeros_like(a), a, b, 3)
    assert same_bits(out, oracle.reduce(a, b, op, dtype, 3))
    x, y = oracle.decode(a, dtype), oracle.decode(b, dtype)
    result = oracle.decode(out, dtype)
    assert np.isnan(result[np.isnan(x) | np.isnan(y)]).all()
    if op == "max":
        assert not np.signbit(result[(x == 0) & (y == 0) & ~(np.signbit(x) & np.signbit(y))]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_halves_survive_the_way_to_fp32_and_back(dtype: str) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(oracle.storage(dtype))
    minus_zero = np.full(1 << 16, 0x8000, np.uint16).view(oracle.storage(dtype))
    out = reduce(dtype, "sum", np.zeros_like(everything), everything, minus_zero)
    nan = np.isnan(oracle.decode(everything, dtype))
    assert same_bits(out[~nan], everything[~nan])
    assert np.isnan(oracle.decode(out[nan], dtype)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_all_halves_by_many_partners(dtype: str, op: str) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(oracle.storage(dtype))
    partners = [*SPECIAL[dtype], *np.random.default_rng(0).integers(0, 1 << 16, 40)]
    for partner in partners:
        other = np.full(1 << 16, partner, np.uint16).view(oracle.storage(dtype))
        out = reduce(dtype, op, np.zeros_like(everything), everything, other)
        assert same_bits(out, oracle.reduce(everything, other, op, dtype)), hex(partner)


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_halves_equal_numpy_and_torch(op: str) -> None:
    a, b = samples("float16", 100_000, 5), samples("float16", 100_000, 6)
    out = reduce("float16", op, np.zeros_like(a), a, b)
    with np.errstate(all="ignore"):
        wanted = a + b if op == "sum" else a * b
    np.testing.assert_array_equal(out, wanted)

    torch = pytest.importorskip("torch", reason="torch has the only other bfloat16")
    a, b = samples("bfloat16", 100_000, 7), samples("bfloat16", 100_000, 8)
    x, y = (torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (a, b))
    wanted = (x + y if op == "sum" else x * y).float().numpy()
    out = oracle.decode(reduce("bfloat16", op, np.zeros_like(a), a, b), "bfloat16")
    np.testing.assert_array_equal(out, wanted)


def test_integers_wrap_and_divide_towards_zero() -> None:
    low, high = np.int64(-(1 << 63)), np.int64((1 << 63) - 1)
    a = np.array([high, low, -7, 7, low], np.int64)
    b = np.array([1, -1, 0, 0, 0], np.int64)
    assert reduce("int64", "sum", a.copy(), a, b).tolist() == [low, high, -7, 7, low]
    halves = [-(1 << 62), (1 << 62) - 1, -3, 3, -(1 << 62)]
    assert reduce("int64", "avg", a.copy(), a, b, 2).tolist() == halves


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint16", "int8"])
def test_integer_means_near_multiples_of_the_divisor(dtype: str) -> None:
    """Where a division in floating point could round up to the next integer."""
    info = np.iinfo(dtype)
    for divisor in (1, 3, 49, 255, 4095, 4096, 65537, (1 << 31) - 1, (1 << 32) - 1):
        steps = np.linspace(int(info.min) // divisor, int(info.max) // divisor, 500).astype(
            np.int64
        )
        near = np.concatenate([steps * divisor + d for d in (-1, 0, 1)])
        a = near[(near >= info.min) & (near <= info.max)].astype(dtype)
        out = reduce(dtype, "avg", np.zeros_like(a), a, np.zeros_like(a), divisor)
        exact = [abs(int(v)) // divisor * (1 if v >= 0 else -1) for v in a]
        assert out.tolist() == exact, divisor


def test_bad_arguments_are_refused() -> None:
    x = np.zeros(4, np.float32)
    for dtype, op, divisor in (
        (-1, 0, 1),
        (13, 0, 1),
        (12, 3, 1),
        (10, -1, 1),
        (10, 5, 1),
        (10, 1, 0),
    ):
        status = lib.pccl_reduce(dtype, op, pointer(x), pointer(x), pointer(x), 4, divisor)
        assert status == lib.PCCL_EINVAL
    assert [lib.pccl_dtype_size(i) for i in (-1, 13)] == [0, 0]
    sizes = [lib.pccl_dtype_size(i) for i in range(12)]
    assert sizes == [oracle.storage(dtype).itemsize for dtype in oracle.DTYPES]


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_step_is_four_rounded_operations(nesterov: bool) -> None:
    lr, mu = np.float32(0.7), np.float32(0.9)
    for n in (*SIZES, 10_007):
        theta, v, g = (samples("float32", n, 3 * n + k) for k in range(3))
        with np.errstate(all="ignore"):
            momentum = mu * v + g
            step = g + mu * momentum if nesterov else momentum
            wanted = [oracle.encode(x, "float32") for x in (theta - lr * step, momentum)]
        x, y, z = shifted(theta, n % 5), shifted(v, n % 7), shifted(g, n % 3)
        kernels.outer_sgd(x, y, z, lr=lr, momentum=mu, nesterov=nesterov)
        assert same_bits(x, wanted[0]), n
        assert same_bits(y, wanted[1]), n
        assert same_bits(z, g), n


def test_subtraction_in_and_out_of_place() -> None:
    for n in (*SIZES, 10_007):
        a, b = samples("float32", n, n), samples("float32", n, n + 1)
        with np.errstate(all="ignore"):
            wanted = oracle.encode(a - b, "float32")
        for target in (None, 0, 1):
            arrays = [shifted(a, n % 5), shifted(b, n % 7)]
            out = shifted(np.zeros_like(a), n % 3) if target is None else arrays[target]
            kernels.subtract(out, *arrays)
            assert same_bits(out, wanted), (n, target)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_addition_and_a_mean(dtype: str) -> None:
    for n in (*SIZES, 10_007):
        a, b = samples(dtype, n, n), samples(dtype, n, n + 1)
        for divisor, op in ((1, "sum"), (3, "avg")):
            wanted = oracle.reduce(a, b, op, dtype, divisor)
            for target in (None, 0, 1):
                arrays = [shifted(a, n % 5), shifted(b, n % 7)]
                out = shifted(np.zeros_like(a), n % 3) if target is None else arrays[target]
                kernels.add(out, *arrays, divisor=divisor)
                assert same_bits(out, wanted), (n, target)


def test_division() -> None:
    for n in (*SIZES, 10_007):
        a = samples("float32", n, n)
        for divisor in (1, 3, 1000, (1 << 32) - 1):
            out = shifted(a, n % 7)
            kernels.divide(out, divisor)
            with np.errstate(all="ignore"):
                assert same_bits(out, oracle.encode(a / np.float32(divisor), "float32")), n


@pytest.mark.parametrize(("name", "format"), [("int8", "BLOCK_8"), ("int4", "BLOCK_4")])
def test_quantization_there_and_back(name: kernels.Format, format: str) -> None:
    rules = quantized.FORMATS[format]
    for n in (0, 1, 63, 64, 65, 255, 256, 257, 10_007):
        values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        wanted = quantized.quantize(values, rules)
        data = np.zeros(kernels.quantized_size(name, n), np.uint8)
        kernels.quantize(data, values, name)
        assert data.tobytes() == wanted
        back = np.zeros_like(values)
        kernels.dequantize(back, data, name)
        assert same_bits(back, quantized.dequantize(wanted, n, rules, "float32"))
        total = shifted(values[::-1], n % 7)
        kernels.accumulate(total, data, name)
        assert same_bits(total, values[::-1] + back)


def test_quantization_refuses_arrays_that_do_not_fit() -> None:
    values, data = np.zeros(64, np.float32), np.zeros(36, np.uint8)
    assert kernels.quantized_size("int4", 64) == 36
    for wrong, text in (
        ((data[1:], values), "takes 36 bytes as int4"),
        ((data.view(np.int8), values), "is not uint8 in host memory"),
        ((data, values.view(np.int32)), "is not float32 in host memory"),
        ((values.view(np.uint8)[:36], values), "overlap"),
    ):
        with pytest.raises(ValueError, match=text):
            kernels.quantize(*wrong, "int4")
        with pytest.raises(ValueError, match=text):
            kernels.dequantize(*reversed(wrong), "int4")
    with pytest.raises(ValueError, match="divisor is 0: it must be at least 1"):
        kernels.add(values, values, values, divisor=0)
    with pytest.raises(ValueError, match="divisor is 0: it must be at least 1"):
        kernels.divide(values, 0)
    with pytest.raises(ValueError, match="is not int64"):
        kernels.add(np.zeros(4, np.int64), np.zeros(4, np.int64), values[:4])
    with pytest.raises(ValueError, match="overlap"):
        kernels.add(values[:4], values[1:5], values[:4])


def test_a_kernel_refuses_arrays_that_do_not_fit() -> None:
    whole = np.zeros(12, np.float32)
    a, b, c = whole[:4], whole[4:8], whole[8:]
    with pytest.raises(ValueError, match="is not float32"):
        kernels.subtract(a, b, np.zeros(4))
    with pytest.raises(ValueError, match="differ in size"):
        kernels.subtract(a, b, whole)
    with pytest.raises(ValueError, match="differ in size or in the order"):
        kernels.subtract(a.reshape(2, 2), b.reshape(2, 2).T, c.reshape(2, 2))
    with pytest.raises(ValueError, match="are not contiguous"):
        kernels.subtract(whole[::3], a, b)
    with pytest.raises(ValueError, match="overlap"):
        kernels.subtract(a, whole[1:5], b)
    with pytest.raises(ValueError, match="overlap"):
        kernels.outer_sgd(a, a, b, lr=1, momentum=0, nesterov=False)
    fixed = a.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.outer_sgd(b, fixed, c, lr=1, momentum=0, nesterov=False)


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("members", [2, 3, 5])
def test_the_oracle_is_a_ring(dtype: str, op: str, members: int) -> None:
    """The kernels, applied step by step, give what the oracle says a ring gives."""
    count = 64 * 7 + 13
    inputs = [samples(dtype, count, seed) for seed in range(members)]
    cuts = oracle.bounds(count, members)
    assert cuts[0] == 0
    assert cuts[-1] == count
    out = np.zeros_like(inputs[0])
    for segment in range(members):
        part = slice(cuts[segment], cuts[segment + 1])
        chunk = inputs[segment][part].copy()
        for step in range(members - 1):
            own = inputs[(segment + step + 1) % members][part]
            divisor = members if step == members - 2 else 1
            reduce(dtype, op, chunk, chunk, own, divisor)
        out[part] = chunk
    if op != "avg" or "int" not in dtype:  # whose averages are made of wide sums
        assert same_bits(out, oracle.all_reduce(inputs, op, dtype))


def test_the_oracle_is_a_mean() -> None:
    inputs = [np.random.default_rng(i).standard_normal(1000).astype(np.float32) for i in range(5)]
    mean = np.mean(np.stack(inputs, dtype=np.float64), axis=0)
    np.testing.assert_allclose(oracle.all_reduce(inputs, "avg", "float32"), mean, atol=1e-6)
