"""The quantized format of the C core for given `QuantizationOptions`."""

from __future__ import annotations

from pccl.ext import lib
from pccl.protocol.messages import Spec
from pccl.types import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

_BY_BITS = {
    QuantizationAlgorithm.MIN_MAX: {8: lib.PCCL_MIN_MAX_8, 16: lib.PCCL_MIN_MAX_16},
    QuantizationAlgorithm.ZERO_POINT_SCALE: {8: lib.PCCL_ZERO_POINT_8, 16: lib.PCCL_ZERO_POINT_16},
}
_BLOCKWISE = {
    QuantizationAlgorithm.BLOCKWISE_INT8: lib.PCCL_BLOCK_8,
    QuantizationAlgorithm.BLOCKWISE_INT4: lib.PCCL_BLOCK_4,
}
_SOURCES = {DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE}
_TARGETS = {DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16}


def fingerprint(
    options: QuantizationOptions | None, dtype: DataType, op: ReduceOp
) -> tuple[int, int]:
    """`Spec.algorithm` and `Spec.quantized` of a collective of `dtype` elements.

    Raises ValueError: it cannot be quantized like this; the text says why.
    """
    if options is None or options.algorithm is QuantizationAlgorithm.NONE:
        return 0, 0
    if dtype not in _SOURCES:
        raise ValueError(f"elements of {dtype.name} cannot be quantized: only floats can")
    if op is ReduceOp.PROD:
        raise ValueError(
            "PROD cannot be quantized, because the error of one factor is multiplied by the "
            "others: only SUM, AVG, MAX and MIN can"
        )
    if options.algorithm in _BLOCKWISE:
        return options.algorithm.value, 0
    if options.quantized_datatype not in _TARGETS:
        raise ValueError(
            f"{options.algorithm.name} cannot quantize to {options.quantized_datatype.name}: "
            "only to UINT8, INT8, UINT16 and INT16"
        )
    return options.algorithm.value, options.quantized_datatype.value


def wire_format(work: Spec) -> int:
    """The pccl_format of a collective; 0 if it is not quantized."""
    algorithm = QuantizationAlgorithm(work.algorithm)
    if algorithm in _BY_BITS:
        return int(_BY_BITS[algorithm][8 * DataType(work.quantized).itemsize])
    return int(_BLOCKWISE.get(algorithm, lib.PCCL_UNQUANTIZED))


def wire_bytes(work: Spec, dtype: DataType, count: int) -> int:
    if not work.algorithm:
        return count * dtype.itemsize
    return int(lib.pccl_quantized_size(wire_format(work), dtype.value, count))
