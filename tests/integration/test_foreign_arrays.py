"""Arrays of other libraries than numpy and torch: those with DLPack, and those with a buffer."""

from __future__ import annotations

import array
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster

import pccl


class Exported:
    """An array that shares its memory by DLPack alone, and that another library makes."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self.__dlpack__ = content.__dlpack__
        self.__dlpack_device__ = content.__dlpack_device__

    def __array_namespace__(self) -> type[Exported]:
        return Exported

    asarray = classmethod(lambda cls, content: cls(content))

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, index: int) -> Any:
        return self._content[index]


def frozen(*content: float) -> np.ndarray:
    made = np.array(content, np.float32)
    made.flags.writeable = False
    return made


def test_memory_that_may_be_written_is_written() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            numbers = array.array("f", [index, 2])
            assert comm.all_reduce(numbers, op="sum").result is numbers
            assert list(numbers) == [1, 4]
            own = np.array([index, 2], np.float32)
            exported = Exported(own)
            assert comm.all_reduce([numbers, exported], op="max").result[1] is exported
            assert list(own) == [1, 2] and list(numbers) == [1, 4]
            text = bytearray(b"abc" if comm.rank == 0 else b"---")
            comm.broadcast(text)
            assert text == b"abc"
            target = memoryview(bytearray(6))
            assert comm.all_gather(b"abc", target) is target and target == b"abcabc"

        cluster.each(job)


def test_instead_of_read_only_memory_the_result_is_new() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            given = Exported(frozen(index, 2))
            made = comm.all_reduce(given, op="sum").result
            assert isinstance(made, Exported) and list(made) == [1, 4] and given[0] == index
            handle = comm.all_reduce_async({"b": given, "a": np.ones(1)}, op="sum")
            assert handle.wait()[0]
            assert list(handle.result) == ["b", "a"] and list(handle.result["b"]) == [1, 4]
            root = comm.rank == 0
            made = comm.broadcast([Exported(frozen(7 if root else 8))]).result
            assert made[0][0] == 7
            made = comm.all_gather(given)
            assert isinstance(made, Exported) and made[0][1] == made[1][1] == 2
            made = comm.reduce(given, op="sum").result
            assert (made is given) != root and list(made) == ([1, 4] if root else [index, 2])

        cluster.each(job)


def test_a_shared_state_has_copies_of_read_only_memory(tmp_path: Path) -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            own = array.array("d", [index])
            state = pccl.SharedState.from_tensors({"x": Exported(frozen(index)), "y": own})
            state.revision = 2 - index
            comm.sync_shared_state(state)
            made = state.tensors()
            assert made["x"][0] == 0 and made["y"] is own and own[0] == 0
            if index == 1:
                state.save(tmp_path / "state")
                again = pccl.SharedState.from_tensors({"x": Exported(frozen(5)), "y": own})
                again.load(tmp_path / "state")
                assert again.tensors()["x"][0] == 0 and again.revision == 2

        cluster.each(job)


@pytest.mark.parametrize(
    ("given", "recv", "why"),
    [
        (b"abc", None, r"bytes is read-only: pass c = numpy\.array\(x\), where the result is"),
        ([np.float32(1)], None, "number 0 of the list: float32 is read-only"),
        ("abc", None, "str is neither a numpy.ndarray nor .* nor does it share its memory by"),
        (Exported(frozen(1)), Exported(frozen(1)), "the array is read-only"),
        ({"x": object()}, None, "the value of 'x': object is neither"),
        (
            Exported(np.ones(1, "U1")),
            None,
            "the memory of this Exported cannot be read: pass a copy",
        ),
    ],
)
def test_the_error_for_an_unusable_array_suggests_another(given: Any, recv: Any, why: str) -> None:
    with Cluster(1) as cluster, pytest.raises(ValueError, match=why):
        cluster.comms[0].all_reduce(given, recv)


# ---- with the real libraries ----


def library(name: str) -> ModuleType:
    return importlib.import_module(pytest.importorskip(name).__name__)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax.numpy", "mlx.core"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_collectives_and_shared_state_of_a_library(name: str, dtype: str) -> None:
    xp = library(name)

    def of(*content: float) -> Any:
        return xp.asarray(np.array(content, dtype))

    kind = type(of(1))
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            made = comm.all_reduce(of(index, 2), op="sum").result
            assert type(made) is kind and made.tolist() == [1, 4]
            made = comm.all_reduce({"x": of(index), "y": np.ones(2)}, op="max").result
            assert type(made["x"]) is kind and made["x"].tolist() == [1]
            made = comm.broadcast([of(comm.rank + 3)]).result[0]
            assert type(made) is kind and made.tolist() == [3]
            made = comm.all_gather(of(1, 2))
            assert type(made) is kind and made.tolist() == [[1, 2], [1, 2]]
            state = pccl.SharedState.from_tensors({"x": of(index, 5)})
            state.revision = 1 + index
            comm.sync_shared_state(state)
            made = state.tensors()["x"]
            assert type(made) is kind and made.tolist() == [1, 5] and state.revision == 2

        cluster.each(job)


@pytest.mark.slow
def test_arrays_of_jax_are_not_changed() -> None:
    jax, jnp = library("jax"), library("jax.numpy")
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            given = jnp.array([index, 2], jnp.bfloat16)
            made = comm.all_reduce(given, op="sum", quantization=None).result
            assert made.dtype == jnp.bfloat16 and made.tolist() == [1, 4]
            assert given.tolist() == [index, 2] and made.sharding == given.sharding
            assert float(jax.jit(jnp.sum)(made)) == 5

        cluster.each(job)


@pytest.mark.slow
def test_the_error_for_an_unshareable_array_suggests_a_conversion() -> None:
    jax, jnp, mlx = library("jax"), library("jax.numpy"), library("mlx.core")
    with Cluster(1) as cluster:
        reduce = cluster.comms[0].all_reduce
        with pytest.raises(
            ValueError, match=r"Tracer cannot be read: pass.*a function that is traced"
        ):
            jax.jit(reduce)(jnp.ones(2))
        with pytest.raises(ValueError, match="dtype float8_e4m3fn is not supported: it may be"):
            reduce(jnp.ones(2, jnp.float8_e4m3fn))
        with pytest.raises(ValueError, match="memory of this array cannot be read: pass a copy"):
            reduce(mlx.ones(2).astype(mlx.bfloat16))
        deleted = jnp.ones(2)
        deleted.delete()
        with pytest.raises(ValueError, match=r"cannot be read.*Array has been deleted"):
            reduce(deleted)
