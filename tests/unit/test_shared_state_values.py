"""TensorInfo and SharedState as values: signatures, checks, revisions."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import numpy as np
import pytest

from pccl.errors import UnsupportedError
from pccl.protocol import messages as m
from pccl.protocol.messages import ENTRY_BYTES_MAX, LIST_BYTES_MAX
from pccl.shared_state import SharedState, TensorInfo
from pccl.types import DataType, DeviceType

torch = pytest.importorskip("torch", reason="half of the entries are torch's")


def info(name: str = "x", data_ptr: int = 4096, numel: int = 3, **changes: Any) -> TensorInfo:
    arguments = {
        "numel": numel,
        "dtype": DataType.FLOAT,
        "device_type": DeviceType.CPU,
        "allow_content_inequality": False,
        **changes,
    }
    return TensorInfo(name, data_ptr, **arguments)


def test_signatures() -> None:
    kinds = {p.name: p.kind for p in inspect.signature(TensorInfo).parameters.values()}
    positional = [name for name, kind in kinds.items() if kind.name == "POSITIONAL_OR_KEYWORD"]
    keyword = [name for name, kind in kinds.items() if kind.name == "KEYWORD_ONLY"]
    assert positional == ["name", "data_ptr"]
    assert keyword == ["numel", "dtype", "device_type", "allow_content_inequality"]
    for maker in (TensorInfo.from_torch, TensorInfo.from_numpy):
        parameters = inspect.signature(maker).parameters
        assert list(parameters) == ["tensor", "name", "allow_content_inequality"]
        flag = parameters["allow_content_inequality"]
        assert (flag.kind.name, flag.default) == ("KEYWORD_ONLY", False)
    assert list(inspect.signature(SharedState).parameters) == ["tensor_infos"]


def test_attributes_are_the_arguments() -> None:
    made = info("w", 4096, 3, allow_content_inequality=True)
    assert (made.name, made.data_ptr, made.numel) == ("w", 4096, 3)
    assert (made.dtype, made.device_type) == (DataType.FLOAT, DeviceType.CPU)
    assert made.allow_content_inequality is True
    assert made.nbytes == 12


def test_from_arrays() -> None:
    tensor, array = torch.zeros(2, 3, dtype=torch.float16), np.zeros(4, np.uint64)
    of_torch = TensorInfo.from_torch(tensor, "t", allow_content_inequality=True)
    assert (of_torch.name, of_torch.data_ptr, of_torch.numel) == ("t", tensor.data_ptr(), 6)
    assert (of_torch.dtype, of_torch.device_type) == (DataType.FLOAT16, DeviceType.CPU)
    assert of_torch.allow_content_inequality is True
    of_numpy = TensorInfo.from_numpy(array, "n")
    assert (of_numpy.name, of_numpy.data_ptr, of_numpy.numel) == ("n", array.ctypes.data, 4)
    assert (of_numpy.dtype, of_numpy.nbytes) == (DataType.UINT64, 32)
    assert of_numpy.allow_content_inequality is False


def test_an_entry_keeps_its_array_alive() -> None:
    class Weighable(np.ndarray[Any, Any]):
        pass

    array = np.zeros(3).view(Weighable)
    alive = weakref.ref(array)
    made = TensorInfo.from_numpy(array, "x")
    del array
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("name", "data_ptr", "numel"), [("x", 0, 1), ("x", 4096, -1), ("", 4096, 1), ("x" * 257, 1, 1)]
)
def test_impossible_entries(name: str, data_ptr: int, numel: int) -> None:
    with pytest.raises(ValueError, match=r"address|count|characters"):
        info(name, data_ptr, numel)


def test_an_entry_may_be_empty() -> None:
    assert info(data_ptr=0, numel=0).nbytes == 0
    assert TensorInfo.from_torch(torch.zeros(0), "x").numel == 0


def test_entries_on_other_devices() -> None:
    assert info(device_type=DeviceType.CUDA).device_type is DeviceType.CUDA
    with pytest.raises(UnsupportedError, match="meta"):
        TensorInfo.from_torch(torch.empty(3, device="meta"), "x")


def test_entries_of_the_wrong_kind_are_named() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    wrong: list[tuple[Any, Any]] = [
        (TensorInfo.from_torch, np.zeros(3)),
        (TensorInfo.from_numpy, torch.zeros(3)),
        (TensorInfo.from_torch, torch.zeros(3, dtype=torch.bool)),
        (TensorInfo.from_numpy, read_only),
    ]
    for maker, array in wrong:
        with pytest.raises(ValueError, match="'weird'"):
            maker(array, "weird")
    with pytest.raises(ValueError, match=r"'weird'.*are not contiguous"):
        TensorInfo.from_torch(torch.eye(3)[:, 0], "weird")


def test_a_shared_state_has_entries_with_different_names() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SharedState([])
    with pytest.raises(ValueError, match="'b'"):
        SharedState([info("a"), info("b"), info("c"), info("b")])


def test_as_many_entries_as_fit_in_a_message() -> None:
    """Accepted entries can be sent, with the longest names and numbers."""
    entries = [info(f"{i:0256}", numel=1 << 56, dtype=DataType.UINT8) for i in range(60_000)]
    with pytest.raises(ValueError, match="60000 entries take"):
        SharedState(entries)
    fewer = SharedState(entries[: LIST_BYTES_MAX // (256 + ENTRY_BYTES_MAX)])
    made = tuple(
        m.Entry(one.name, one.dtype.value, one.numel, True, bytes(16)) for one in fewer.tensor_infos
    )
    vote = m.SyncVote(1 << 56, m.Manifest((1 << 64) - 1, 2, made, True))
    assert len(m.encode(vote)) <= m.MESSAGE_BYTES_MAX


def test_a_shared_state_keeps_the_order_of_its_own_list() -> None:
    entries = [info("b"), info("a")]
    state = SharedState(entries)
    entries.reverse()
    assert [entry.name for entry in state.tensor_infos] == ["b", "a"]


def test_revisions() -> None:
    state = SharedState([info()])
    assert state.revision == 0
    state.push_revision()
    assert state.revision == 1
    state.revision = np.int64(7)
    assert (state.revision, type(state.revision)) == (7, int)
    state.revision = (1 << 64) - 1
    with pytest.raises(OverflowError, match="2\\*\\*64"):
        state.push_revision()
    with pytest.raises(OverflowError, match="2\\*\\*64"):
        state.revision = -1
    with pytest.raises(TypeError, match="must be a whole number"):
        state.revision = 1.5  # type: ignore[assignment]
    assert state.revision == (1 << 64) - 1


def test_from_tensors_takes_both_kinds_in_order() -> None:
    tensors = {"b": torch.zeros(3), "a": np.zeros(2)}
    state = SharedState.from_tensors(tensors)
    assert [(entry.name, entry.numel) for entry in state.tensor_infos] == [("b", 3), ("a", 2)]
    with pytest.raises(ValueError, match="at least one"):
        SharedState.from_tensors({})


def test_from_module_is_its_parameters_and_buffers_themselves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    state = SharedState.from_module(model)
    assert [entry.name for entry in state.tensor_infos] == list(model.state_dict())
    addresses = {entry.name: entry.data_ptr for entry in state.tensor_infos}
    assert addresses["0.weight"] == model[0].weight.data_ptr()
    assert addresses["1.num_batches_tracked"] == model[1].num_batches_tracked.data_ptr()
