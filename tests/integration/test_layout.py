"""Arrays that are not in C's order: transposed, Fortran's, channels_last; and slices with gaps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import listed
from peers.cluster import Cluster, to

import pccl
from pccl import operands
from pccl.errors import ArgumentError
from pccl.tensors import Buffer, Layout, order_of

torch = pytest.importorskip("torch", reason="half of the arrays are torch's")

from pccl.diloco import DiLoCo  # noqa: E402  which needs torch

SUM = pccl.ReduceOp.SUM


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    """The array of that shape in C's order: 0, 1, 2, ..."""
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def plain(array: Any) -> np.ndarray:
    """A copy in C's order."""
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().resolve_neg().numpy()
    return np.array(array, order="C")


def channels_last(*shape: int) -> Any:
    return torch.from_numpy(numbers(*shape)).to(memory_format=torch.channels_last)


MAKERS: dict[str, Callable[[], Any]] = {
    "Fortran's order": lambda: np.asfortranarray(numbers(4, 6)),
    "transposed array": lambda: numbers(6, 5, 4).transpose(2, 0, 1),
    "transposed tensor": lambda: torch.from_numpy(numbers(6, 4)).t(),
    "channels_last": lambda: channels_last(2, 3, 4, 4),
    "large channels_last": lambda: channels_last(8, 32, 16, 16),
    "with dimensions of one": lambda: torch.from_numpy(numbers(6, 1, 4)).permute(2, 1, 0),
}


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((4, 6), (1, 4), "4x6/1,4"),
        ((2, 3, 4, 4), (48, 1, 12, 3), "2x3x4x4/48,1,12,3"),
        ((1, 4, 1, 6), (99, 1, -7, 4), "4x6/1,4"),
        ((4, 6), (1, 5), None),
        ((4, 6), (1, 3), None),
        ((3, 3), (0, 1), None),
        ((5,), (-1,), None),
        ((2, 3), (1.5, 3), None),
    ],
)
def test_layouts(shape: tuple[int, ...], strides: tuple[int, ...], layout: str | None) -> None:
    found = Layout.of(shape, strides)
    assert (None if found is None else str(found)) == layout


def test_parts_of_a_layout() -> None:
    whole = Layout((4, 3, 2), (6, 1, 3))
    assert whole.part(4) == Layout((3, 2), (1, 3))
    assert whole.part(2) == Layout((2, 3, 2), (6, 1, 3))
    assert whole.part(3) is None
    assert Layout((4, 6), (1, 4)).part(2) is None, "columns are not one after the other"


def test_arrays_in_c_order_have_no_layout() -> None:
    for array in (numbers(3, 4), np.zeros((3, 0)).T, np.zeros((1, 5)).T, torch.zeros(5, 1).t()):
        assert Buffer.of(array).layout is None
    assert Buffer.of(torch.zeros(2, 1, 4, 4).to(memory_format=torch.channels_last)).layout is None


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_collective_moves_arrays_in_memory_order(make: Callable[[], Any]) -> None:
    """Results are right by index, and have the memory order of the input."""
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            rank, base = comm.rank, plain(make())

            def check(found: Any, expected: np.ndarray) -> None:
                np.testing.assert_array_equal(plain(found), expected)

            x = make()
            begin = Buffer.of(x)
            assert begin.layout is not None
            comm.all_reduce(x, op="sum")
            check(x, 2 * base)
            assert Buffer.of(x) == begin
            library: Any = torch if isinstance(x, torch.Tensor) else np
            y = library.empty_like(x)
            comm.all_reduce(x, y, op="sum")
            check(x, 2 * base)
            check(y, 4 * base)
            comm.all_reduce({"a": x, "b": y, "c": np.full(3, 7.0)})
            check(y, 4 * base)
            comm.all_reduce(y, quantization="int8")
            assert np.abs(plain(y) - 4 * base).max() <= base.max() / 16
            x = make() + rank
            assert Buffer.of(x).layout == begin.layout
            comm.broadcast(x, root=1)
            check(x, base + 1)
            assert comm.all_reduce_async(x, op="sum").wait()[0]
            check(x, 2 * base + 2)
            x = make()
            work = pccl.ReduceDescriptor(
                base.size, SUM, 3, pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT), None
            )
            describe = pccl.ReduceOpDescriptor
            form = describe.from_numpy if library is np else describe.from_torch
            comm.all_reduce_multiple_with_retry([form(x, x, work)])
            check(x, 2 * base)
            gathered = comm.all_gather(make() + 10 * rank)
            check(gathered, np.stack([base, base + 10]))
            again = library.empty_like(gathered)
            comm.all_gather(make() + 10 * rank, again)
            check(again, np.stack([base, base + 10]))
            if order_of(gathered)[0] == 0:
                check(comm.reduce_scatter(gathered, op="sum"), 2 * (base[None] + 10 * rank))
                part = library.empty_like(gathered[0])
                comm.reduce_scatter(gathered, part, op="sum")
                check(part, 2 * (base + 10 * rank))

        cluster.each(job)


def test_gathered_rows_of_tensors_are_in_c_order() -> None:
    ranks = operands.Ranks(rank=1, members=2, first=0)
    tensor = torch.zeros((3, 2), dtype=torch.bfloat16)
    work = operands.all_gather({"x": tensor}, None, ranks, [4, 3])
    result = work.result()
    assert result["x"].shape == (7, 2) and result["x"].dtype is torch.bfloat16
    assert work.work.rows == (4, 3) and work.work.parts[0].count == 2
    with pytest.raises(ValueError, match="in memory 3x2 with strides 1,3: it must have 3"):
        operands.all_gather(torch.zeros((2, 3)).t(), None, ranks, [4, 3])


@pytest.mark.parametrize("small", [True, False])
def test_different_layouts_are_an_error_that_names_the_peers(small: bool) -> None:
    """Flat memory of as many elements, as ever in C's order, does not go with channels_last."""
    shape = (2, 3, 4, 4) if small else (8, 16, 16, 16)
    n = int(np.prod(shape))
    with Cluster(2) as cluster:
        numbers_ = [comm.peers[comm.rank].removeprefix("peer ") for comm in cluster.comms]

        def job(index: int, comm: pccl.Communicator) -> str:
            x = channels_last(*shape) if index else torch.from_numpy(numbers(n))
            with pytest.raises(pccl.MismatchError) as caught:
                comm.all_reduce(x, op="sum")
            assert np.array_equal(x.flatten(), numbers(n)), "as it was"
            text = str(caught.value)
            # what it says, done literally, on all
            scope = {"x": x}
            copy, back = re.findall(r"c = (x\.contiguous\(\)).*then do (x\.copy_\(c\))", text)[0]
            scope["c"] = eval(copy, scope)
            comm.all_reduce(scope["c"], op="sum")
            exec(back, scope)
            assert np.array_equal(x.flatten(), 2 * numbers(n))
            with pytest.raises(pccl.MismatchError, match=r"tensor 1 is b of .*with strides"):
                comm.all_reduce({"a": torch.zeros(4), "b": x})
            return text

        for reader, said in zip(numbers_, cluster.each(job), strict=True):
            text = to(reader, said)
            listed(f"MismatchError: {text}")
            strides = ",".join(map(str, channels_last(*shape).stride()))
            lies = f"{n} elements of float32 ({'x'.join(map(str, shape))} with strides {strides})"
            assert f"{numbers_[1]} called all_reduce({lies}, sum)" in text, text
            assert f"{numbers_[0]} called all_reduce({n} elements of float32, sum)" in text, text


GAPS: dict[str, Callable[[], Any]] = {
    "column of an array": lambda: numbers(4, 6)[:, 1],
    "every second": lambda: torch.from_numpy(numbers(40))[::2],
    "inner block": lambda: torch.from_numpy(numbers(4, 6))[1:3, 1:5],
    "backwards": lambda: numbers(10)[::-1],
    "part of a transposed one": lambda: numbers(4, 6).T[:3],
    "field": lambda: np.ones(5, [("a", "f4"), ("b", "i2")])["a"],
    "negated": lambda: torch._neg_view(torch.from_numpy(numbers(6))),
    "expanded": lambda: torch.from_numpy(numbers(3)).expand(4, 3),
    "windows": lambda: torch.from_numpy(numbers(8)).unfold(0, 4, 2),
}


@pytest.mark.parametrize("make", GAPS.values(), ids=GAPS)
def test_arrays_with_gaps_are_refused_with_a_remedy_that_works(
    make: Callable[[], Any],
) -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            x, expected = make(), 2 * plain(make())
            with pytest.raises(ValueError, match=r"memory|sign") as caught:
                comm.all_reduce(x, op="sum")
            text = str(caught.value)
            scope = {"tensor": x, "array": x}
            exec(re.findall(r"c = \w+\.\w+\(\)", text)[0], scope)
            found = scope["c"]
            around = re.findall(r"instead, with (.+) before each call and (.+) after it", text)
            for before, after in around or [("", "")]:
                exec(before, scope)
                comm.all_reduce(scope["c"], op="sum")
                exec(after, scope)
                found = x if around else found
            np.testing.assert_array_equal(plain(found), expected)

        cluster.each(job)


def test_errors_of_the_page() -> None:
    x = channels_last(2, 3, 4, 4)
    cases: list[tuple[Any, Any]] = [(x[:, :2], None), (x[0, 0, 0].expand(2, 4), None)]
    for send, recv in [*cases, (x, x.contiguous()), (x.contiguous(), x)]:
        with pytest.raises(ArgumentError) as caught:
            operands.all_reduce(send, recv, SUM, None)
        listed(f"ArgumentError: {caught.value}")
    square = np.asfortranarray(numbers(3, 3))
    with pytest.raises(ValueError, match=r"3x3 with strides 1,3 and as in C: .*numpy.empty_like"):
        operands.all_reduce(square, square.T, SUM, None)
    ranks = operands.Ranks(rank=0, members=2, first=0)
    for call in (
        lambda: operands.all_gather(x, torch.empty(4, 3, 4, 4), ranks),
        lambda: operands.reduce_scatter(np.asfortranarray(numbers(4, 6)), None, SUM, None, ranks),
        lambda: operands.reduce_scatter(numbers(4, 6), square[:2], SUM, None, ranks),
    ):
        with pytest.raises(ValueError, match=r"in C's order, as a copy if need be|elements"):
            call()
    work = pccl.ReduceDescriptor(
        50, SUM, 0, pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT), None
    )
    with pytest.raises(ValueError, match="the first of 96 of arrays that do not lie in C's order"):
        pccl.ReduceOpDescriptor.from_torch(x, x, work)


# ---- shared state ----


def shared(x: Any) -> pccl.SharedState:
    return pccl.SharedState.from_tensors({"x": x, "step": np.zeros(1)})


def test_shared_state_of_equal_layouts() -> None:
    with Cluster(2) as cluster:
        tensors = [channels_last(8, 32, 16, 16) + i for i in range(2)]
        states = [shared(x) for x in tensors]
        states[1].revision = 5
        infos = cluster.each(lambda i, comm: comm.sync_shared_state(states[i]))
    assert infos[0].rx_bytes == tensors[0].numel() * 4
    assert torch.equal(tensors[0], channels_last(8, 32, 16, 16) + 1)


def test_shared_state_of_another_layout_is_an_error() -> None:
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            x = channels_last(2, 3, 4, 4)
            state = shared(x if index else x.contiguous())
            if not index:
                comm.sync_shared_state(state)
                return
            with pytest.raises(pccl.KickedError) as caught:
                comm.sync_shared_state(state)
            text = str(caught.value)
            assert "'x') has order in memory 'as in C' there and '2x3x4x4 with strides" in text
            listed(f"KickedError: {text}")

        cluster.each(job)


def test_an_entry_with_gaps_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        pccl.TensorInfo.from_torch(torch.eye(3)[:, 0], "w")
    assert str(caught.value) == (
        "'w': elements of the tensor (3 with strides 3) are not contiguous in memory; those of "
        "c = tensor.contiguous() are: pass c instead, with c.copy_(tensor) before each call and "
        "tensor.copy_(c) after it"
    )
    with pytest.raises(ValueError, match=r"'w': .*do not: pass c instead, where the result is"):
        pccl.TensorInfo.from_torch(torch.zeros(1).expand(3), "w")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_files_hold_c_order(tmp_path: Path, kind: str) -> None:
    def ordered() -> Any:
        return np.asfortranarray(numbers(4, 6)) if kind == "numpy" else channels_last(2, 3, 4, 4)

    def in_c_order() -> Any:
        return numbers(4, 6) if kind == "numpy" else torch.from_numpy(numbers(2, 3, 4, 4))

    shared(ordered()).save(tmp_path / "a")
    shared(in_c_order()).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for make in (ordered, in_c_order):
        x = make() * 0
        begin = Buffer.of(x)
        shared(x).load(tmp_path / "a")
        np.testing.assert_array_equal(plain(x), plain(in_c_order()))
        assert Buffer.of(x) == begin


def test_a_parameter_in_another_order_is_loaded(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    state = pccl.SharedState([pccl.TensorInfo.from_torch(model.weight, "w")])
    saved = model.weight.detach().clone()
    state.save(tmp_path / "f")
    with torch.no_grad():
        model.weight.zero_()
    state.load(tmp_path / "f")
    assert torch.equal(model.weight.detach(), saved)


# ---- DiLoCo ----


def test_models_in_different_orders_train_together() -> None:
    """DiLoCo moves flat copies, so each peer has its own order, which it keeps."""

    def job(index: int, comm: pccl.Communicator) -> str:
        torch.manual_seed(index)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
        model[1].requires_grad_(False)
        if index:
            model.to(memory_format=torch.channels_last)
        lying = model[0].weight.stride(), model[1].weight.stride()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(comm, model, optimizer, inner_steps=1, min_peers=2)
        while diloco.outer_step < 2:
            model(torch.ones(1, 3, 8, 8)).square().sum().backward()
            diloco.step()
        assert (model[0].weight.stride(), model[1].weight.stride()) == lying
        weights = [p.detach().flatten().tolist() for p in model.parameters()]
        return diloco.state_digest() + str(weights)

    with Cluster(2) as cluster:
        first, second = cluster.each(job)
    assert first == second
