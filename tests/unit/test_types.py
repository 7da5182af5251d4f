"""The values of the compatible API: names, numbers, signatures, conversions, errors that pickle."""

from __future__ import annotations

import doctest
import inspect
import pickle
import weakref
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pccl import cuda, descriptors, errors, insight, types
from pccl.types import DataType, DeviceType, ReduceOp, Result
from pccl.weights import publisher

torch = pytest.importorskip("torch", reason="half of the conversions are torch's")

from pccl.diloco import stats  # noqa: E402

MEMBERS = {
    types.Result: (
        "SUCCESS 0, NOT_INITIALIZED 1, INTERNAL_ERROR 2, INVALID_ARGUMENT 3, INVALID_USAGE 4, "
        "TOO_FEW_PEERS 5, MASTER_CONNECTION_FAILED 6, RANK_CONNECTION_FAILED 7, "
        "RANK_CONNECTION_LOST 8, NO_SHARED_STATE_AVAILABLE 9, PENDING_ASYNC_OPS 10, "
        "UPDATE_TOPOLOGY_FAILED 11, TOPOLOGY_OPTIMIZATION_FAILED 12, TIMEOUT 13"
    ),
    types.ReduceOp: "SUM 0, AVG 1, PROD 2, MAX 3, MIN 4",
    types.Attribute: (
        "GLOBAL_WORLD_SIZE 1, LOCAL_WORLD_SIZE 2, NUM_DISTINCT_PEER_GROUPS 3, "
        "LARGEST_PEER_GROUP_WORLD_SIZE 4"
    ),
    types.SharedStateSyncStrategy: "ENFORCE_POPULAR 0, RECEIVE_ONLY 1, SEND_ONLY 2",
    types.DataType: (
        "UINT8 0, INT8 1, INT16 2, UINT16 3, UINT32 4, INT32 5, UINT64 6, INT64 7, FLOAT16 8, "
        "BFLOAT16 9, FLOAT 10, DOUBLE 11"
    ),
    types.DeviceType: "CPU 0, CUDA 1",
    types.DistributionHint: "NONE 0, NORMAL 1, UNIFORM 2",
    types.QuantizationAlgorithm: "NONE 0, MIN_MAX 1, ZERO_POINT_SCALE 2, "
    "BLOCKWISE_INT8 3, BLOCKWISE_INT4 4",
}

PARAMETERS = {
    descriptors.ReduceOperandDescriptor: "datatype, distribution_hint=DistributionHint.NONE",
    types.QuantizationOptions: (
        "quantized_datatype=DataType.UINT8, algorithm=QuantizationAlgorithm.MIN_MAX"
    ),
    descriptors.ReduceDescriptor: "count, op, tag, operand_descriptor, quantization_options",
    descriptors.ReduceOpDescriptor.from_torch: "send, recv, reduce_descriptor",
    descriptors.ReduceOpDescriptor.from_numpy: "send, recv, reduce_descriptor",
    types.ReduceInfo: "local_world_size, tx_bytes, rx_bytes",
    types.SharedStateSyncInfo: "tx_bytes, rx_bytes",
    types.DataType.from_torch_dtype: "dtype",
    types.DataType.from_numpy_dtype: "dtype",
    types.DeviceType.from_torch_device_type: "device_type",
    errors.PCCLError: "result, func_name, message=",
    errors.PCCLError.check: "result, func_name",
}


def parameters(function: Any) -> str:
    """The parameters of a callable as the contract writes them."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else f"={default}"
        words.append(parameter.name + shown)
    return ", ".join(words)


@pytest.mark.parametrize("enum", MEMBERS, ids=lambda enum: enum.__name__)
def test_members_and_their_values(enum: type[Enum]) -> None:
    assert ", ".join(f"{member.name} {member.value}" for member in enum) == MEMBERS[enum]
    assert enum.__base__ is Enum


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda function: function.__qualname__)
def test_parameters(function: Any) -> None:
    assert parameters(function) == PARAMETERS[function]


def test_the_descriptor_of_an_op_is_made_by_position() -> None:
    assert parameters(descriptors.ReduceOpDescriptor).startswith(
        "sendbuf_ptr, recvbuf_ptr, reduce_descriptor, _buffers="
    )


@pytest.mark.parametrize("dtype", DataType, ids=lambda dtype: dtype.name)
def test_dtypes_there_and_back(dtype: DataType) -> None:
    assert DataType.from_torch_dtype(dtype.to_torch_dtype()) is dtype
    assert torch.empty(0, dtype=dtype.to_torch_dtype()).element_size() == dtype.itemsize
    if dtype is not DataType.BFLOAT16:
        assert DataType.from_numpy_dtype(dtype.to_numpy_dtype()) is dtype
        assert dtype.to_numpy_dtype().itemsize == dtype.itemsize


def test_numpy_dtypes_in_every_spelling() -> None:
    for spelling in (np.float32, np.dtype("f4"), "float32"):
        assert DataType.from_numpy_dtype(spelling) is DataType.FLOAT


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, "S4", ">f4", "no such", object])
def test_unknown_numpy_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype|byte order"):
        DataType.from_numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float8_e5m2, "float32", 3])
def test_unknown_torch_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype"):
        DataType.from_torch_dtype(dtype)


def test_bfloat16_has_no_numpy_dtype() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        DataType.BFLOAT16.to_numpy_dtype()


def test_device_types() -> None:
    found = [DeviceType.from_torch_device_type(name) for name in ("cpu", "cuda", "mps")]
    assert found == [DeviceType.CPU, DeviceType.CUDA, None]


def test_cuda_is_there_when_torch_finds_it() -> None:
    torch = pytest.importorskip("torch")
    assert cuda.is_available() is torch.cuda.is_available()


def test_the_world_size_has_two_names() -> None:
    info = types.ReduceInfo(3, 10, 20)
    assert info.world_size == info.local_world_size == 3


def describe(send: Any, recv: Any, dtype: DataType, count: int) -> descriptors.ReduceOpDescriptor:
    operand = descriptors.ReduceOperandDescriptor(dtype)
    work = descriptors.ReduceDescriptor(
        count, ReduceOp.SUM, 7, operand, types.QuantizationOptions()
    )
    if isinstance(send, np.ndarray):
        return descriptors.ReduceOpDescriptor.from_numpy(send, recv, work)
    return descriptors.ReduceOpDescriptor.from_torch(send, recv, work)


def test_op_descriptors_take_addresses_and_keep_arrays_alive() -> None:
    x, y = np.zeros(5, np.float32), torch.zeros(5)
    made = describe(x, x, DataType.FLOAT, 5)
    assert made.sendbuf_ptr == made.recvbuf_ptr == x.ctypes.data
    kept = weakref.ref(x)
    del x
    assert kept() is not None
    del made
    assert kept() is None
    assert describe(y, torch.ones(5), DataType.FLOAT, 5).sendbuf_ptr == y.data_ptr()


@pytest.mark.parametrize(("dtype", "count"), [(DataType.DOUBLE, 5), (DataType.FLOAT, 6)])
def test_op_descriptors_do_not_contradict_arrays(dtype: DataType, count: int) -> None:
    with pytest.raises(ValueError, match="descriptor says"):
        describe(np.zeros(5, np.float32), np.zeros(5, np.float32), dtype, count)


# ---- errors ----

LEAVES = [
    errors.PCCLError,
    errors.PeerLostError,
    errors.TooFewPeersError,
    errors.MismatchError,
    errors.KickedError,
    errors.MasterLostError,
    errors.RunFinishedError,
    errors.PCCLTimeoutError,
    errors.NotFiniteError,
    errors.DivergenceError,
    errors.UnsupportedError,
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_errors_tell_and_pickle(leaf: type[errors.PCCLError]) -> None:
    error = leaf(Result.RANK_CONNECTION_LOST, "all_reduce", "peer 3 (10.0.0.7:5000) went away")
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert type(each) is leaf
        assert isinstance(each, errors.PCCLError)
        assert each.result is Result.RANK_CONNECTION_LOST
        assert each.func_name == "all_reduce"
        assert "all_reduce" in str(each)
        assert "RANK_CONNECTION_LOST" in str(each)
        assert "peer 3 (10.0.0.7:5000)" in str(each)


def test_every_leaf_is_listed_and_says_what_to_do_next() -> None:
    assert set(errors.PCCLError.__subclasses__()) == set(LEAVES[1:])
    for leaf in LEAVES:
        assert leaf.__name__ in (errors.__doc__ or "")
        assert "communicator" in (leaf.__doc__ or ""), "usable or not?"


def test_a_timeout_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="waited"):
        raise errors.PCCLTimeoutError(Result.TIMEOUT, "connect", "waited 5 s for peer 3")


@pytest.mark.parametrize(
    ("result", "leaf"),
    [
        (Result.RANK_CONNECTION_LOST, errors.PeerLostError),
        (Result.TOO_FEW_PEERS, errors.TooFewPeersError),
        (Result.MASTER_CONNECTION_FAILED, errors.MasterLostError),
        (Result.TIMEOUT, errors.PCCLTimeoutError),
        (Result.INVALID_USAGE, errors.PCCLError),
    ],
)
def test_results_choose_their_leaf(result: Result, leaf: type[errors.PCCLError]) -> None:
    assert type(errors.error_for(result, "f", "why")) is leaf
    with pytest.raises(leaf) as caught:
        errors.PCCLError.check(result.value, "f")
    assert caught.value.result is result


def test_check_lets_success_pass_and_knows_all_numbers() -> None:
    errors.PCCLError.check(0, "f")
    with pytest.raises(errors.PCCLError, match="99") as caught:
        errors.PCCLError.check(99, "f")
    assert caught.value.result is Result.INTERNAL_ERROR


@pytest.mark.parametrize("module", [types, descriptors, insight, publisher, stats])
def test_examples_are_right(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
