"""Arrays of numpy and torch as memory, and which two go together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl.errors import UnsupportedError
from pccl.tensors import Buffer, pair
from pccl.types import DataType

torch = pytest.importorskip("torch", reason="half of the arrays are torch's")


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0)])
def test_numpy_memory(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.int16)
    buffer = Buffer.of(array)
    assert (buffer.address, buffer.count) == (array.ctypes.data, array.size)
    assert (buffer.dtype, buffer.nbytes) == (DataType.INT16, array.nbytes)
    assert buffer.owner is array


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_torch_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    buffer = Buffer.of(tensor)
    assert (buffer.address, buffer.count) == (tensor.data_ptr(), tensor.numel())
    assert (buffer.dtype, buffer.nbytes) == (DataType.BFLOAT16, 2 * tensor.numel())
    assert buffer.owner is tensor


def test_a_parameter_is_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert Buffer.of(parameter, writable=True).address == parameter.data_ptr()


def test_slices_of_any_alignment() -> None:
    block = np.zeros(4 * 7 + 1, np.uint8)
    assert Buffer.of(block[1:].view(np.float32)).address == block.ctypes.data + 1


@pytest.mark.parametrize(
    "array",
    [
        [1.0],
        3,
        memoryview(b"abcd"),
        np.float32(1),
        np.zeros(3, bool),
        np.zeros(3, ">i4"),
        torch.zeros(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda array: repr(array).partition(" at 0x")[0],  # the same in every process
)
def test_unusable_arrays_are_refused(array: Any) -> None:
    with pytest.raises(ValueError, match=r"neither|dtype|byte order|dense"):
        Buffer.of(array)


@pytest.mark.parametrize(
    "array", [np.zeros((4, 6))[:, ::2], np.zeros((4, 6)).T[:3], torch.eye(3)[:, 1]]
)
def test_arrays_with_gaps(array: Any) -> None:
    with pytest.raises(ValueError, match="are not contiguous in memory"):
        Buffer.of(array)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"meta .*and tensor\.copy_\(c\) after it"):
        Buffer.of(torch.empty(3, device="meta"))


def test_a_distributed_tensor() -> None:
    class DTensor(torch.Tensor):
        def to_local(self) -> Any:
            return self

    with pytest.raises(ValueError, match="to_local"):
        Buffer.of(torch.zeros(3).as_subclass(DTensor))


def test_memory_that_is_vouched_for() -> None:
    assert Buffer.at(0, 0, DataType.FLOAT, None).nbytes == 0
    assert Buffer.at(4096, 3, DataType.DOUBLE, None).nbytes == 24
    for address, count in ((0, 1), (-8, 1), (4096, -1), (4096, (1 << 64) - 1)):
        with pytest.raises(ValueError, match=r"address|count"):
            Buffer.at(address, count, DataType.FLOAT, None)


def test_pairs_in_and_out_of_place() -> None:
    x, y = np.zeros((2, 3)), np.zeros(6)
    send, recv = pair(x, y)
    assert send.owner is x
    assert recv.owner is y
    assert pair(x, x)[0].address == pair(x, x)[1].address
    whole = torch.zeros(10)
    assert pair(whole[:5], whole[5:])[1].count == 5, "neighbors do not overlap"
    assert pair(read_only(np.zeros(3)), np.zeros(3))[0].count == 3, "send is only read"


@pytest.mark.parametrize(
    ("send", "recv"), [(np.zeros(3), torch.zeros(3)), (torch.zeros(3), np.zeros(3)), ([1], [2])]
)
def test_pairs_of_two_kinds(send: Any, recv: Any) -> None:
    with pytest.raises(ValueError, match=r"both|neither"):
        pair(send, recv)


@pytest.mark.parametrize(
    ("send", "recv"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16)),
        (torch.zeros(4)[::2], torch.zeros(2)),
    ],
)
def test_pairs_that_differ(send: Any, recv: Any) -> None:
    with pytest.raises(ValueError, match=r"elements|is FLOAT|is DOUBLE"):
        pair(send, recv)


def test_pairs_that_overlap() -> None:
    x = np.zeros(10)
    for send, recv in ((x[:6], x[4:]), (x[4:], x[:6]), (x[:9], x[1:])):
        with pytest.raises(ValueError, match="overlap"):
            pair(send, recv)


def test_a_result_needs_memory_to_write() -> None:
    with pytest.raises(ValueError, match="read-only"):
        pair(np.zeros(3), read_only(np.zeros(3)))
