"""Silent mistakes of a script: each is warned of once, with what to do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from combinations import IN_STEP

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Model, Watched, make, random, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

LOGGER = "pccl.diloco"  # busy machines are told of by others
ROUNDS = 3


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Trained(Model):
    """A model and its inner optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)


def two(
    address: str,
    step: Callable[[DiLoCo, Trained, int, int], object],
    *,
    end: Callable[[DiLoCo, Trained], object] = lambda diloco, _: diloco.finish(),
    **options: Any,
) -> list[Any]:
    """Two peers, which take `step` of their number and the round's in each of some rounds."""
    both = threading.Barrier(2)

    def peer(number: int) -> Callable[[], Any]:
        def body() -> Any:
            model = Trained()
            with pccl.Communicator(address) as comm:
                usual = {"inner_steps": 1, "min_peers": 2, **options}
                diloco = DiLoCo(comm, model, model.optimizer, **usual)
                for k in range(ROUNDS):
                    step(diloco, model, number, k)
                both.wait(PATIENCE_S)
                end(diloco, model)
                both.wait(PATIENCE_S)
            return model.flat()

        return body

    return together(peer(0), peer(1))


def train(diloco: DiLoCo, model: Model, number: int, k: int) -> None:
    model.move(random(10 * k + number))
    diloco.step()


@pytest.mark.parametrize("mode", IN_STEP)
def test_a_step_in_the_middle_of_another(address: str, mode: str) -> None:
    """That of another thread waits, and that of a signal handler is refused: no calls out of order
    keep the other peer waiting."""

    def peer(number: int) -> Any:
        model, busy = Model(), threading.Event()
        other = threading.Thread(target=lambda: diloco.step())

        def meanwhile() -> None:
            if number == 0 and diloco is not None and not busy.is_set():
                busy.set()
                other.start()
                with pytest.raises(RuntimeError, match="has interrupted a call"):
                    diloco.step()

        diloco: Any = None
        with pccl.Communicator(address) as comm:
            watched: Any = Watched(comm, sync_shared_state=meanwhile)
            diloco = make(watched, model, mode=mode, min_peers=2, **IN_STEP[mode])
            while diloco.outer_step < 6:
                model.move(random(10 * diloco.outer_step + number))
                diloco.step()
                if busy.is_set():
                    other.join()
            diloco.finish()
            assert busy.is_set() == (number == 0)
            return diloco.state_digest()

    ours, theirs = together(lambda: peer(0), lambda: peer(1))
    assert ours == theirs


@pytest.mark.parametrize("wire", ["fp32", "int4", "sparse"])
@pytest.mark.parametrize("mode", IN_STEP)
def test_correct_use_gives_no_warning(
    address: str, mode: str, wire: str, warnings: list[str]
) -> None:
    two(address, train, mode=mode, wire=wire, **{**IN_STEP[mode], "inner_steps": 2, "overlap": 0})
    gc.collect()
    assert not warnings


def test_a_step_of_the_optimizer_beside(address: str, warnings: list[str]) -> None:
    def twice(diloco: DiLoCo, model: Model, number: int, k: int) -> None:
        model.move(random(10 * k + number))
        model.optimizer.step()
        diloco.step()

    two(address, twice)
    assert len(warnings) == 2, warnings  # of each peer
    assert all("leave out optimizer.step()" in text for text in warnings)


def test_a_step_of_the_optimizer_in_a_block_or_after_the_training(
    address: str, warnings: list[str]
) -> None:
    def steps(diloco: DiLoCo, model: Model, number: int, k: int) -> None:
        with diloco:
            model.move(random(10 * k + number))
            model.optimizer.step()

    def end(diloco: DiLoCo, model: Trained) -> None:
        diloco.finish()
        model.optimizer.step()

    two(address, steps, end=end)
    assert not warnings


@pytest.mark.parametrize("mode", ["sync", "delayed", "streaming"])
def test_no_finish(address: str, mode: str, warnings: list[str]) -> None:
    two(address, train, end=lambda *_: None, mode=mode)
    gc.collect()
    said = [text for text in warnings if "without diloco.finish()" in text]
    assert len(said) == (0 if mode == "sync" else 2), warnings


@pytest.mark.parametrize("name", ["bias", "more"])
def test_a_parameter_that_was_replaced_or_added(
    address: str, warnings: list[str], name: str
) -> None:
    def changed(diloco: DiLoCo, model: Model, number: int, k: int) -> None:
        if k == 1:
            setattr(model, name, torch.nn.Parameter(model.bias.detach().clone()))
        train(diloco, model, number, k)

    two(address, changed)
    assert len(warnings) == 2, warnings
    assert all(text.startswith(f"parameter '{name}' has been replaced") for text in warnings)


def test_an_optimizer_that_needs_a_closure(address: str) -> None:
    """It steps in a block: a step of DiLoCo takes no closure, and says so."""

    def steps(diloco: DiLoCo, model: Trained, number: int, k: int) -> None:
        def closure() -> float:
            model.move(random(10 * k + number))
            return 1.0

        with pytest.raises(TypeError, match=r"takes no closure: put the loop into `with diloco:`"):
            diloco.step(closure)  # type: ignore[arg-type]
        with diloco:
            model.optimizer.step(closure)

    ours, theirs = two(address, steps)
    assert torch.equal(ours, theirs)


def test_a_round_without_gradients(address: str, warnings: list[str]) -> None:
    two(address, lambda diloco, model, number, k: diloco.step())
    assert len(warnings) == 2, warnings
    assert all("call loss.backward()" in text for text in warnings)


@pytest.mark.parametrize("wire", ["fp32", "int4", "sparse"])
@pytest.mark.parametrize("mode", IN_STEP)
def test_the_same_data_on_all_peers(
    address: str, mode: str, wire: str, warnings: list[str]
) -> None:
    def same(diloco: DiLoCo, model: Model, number: int, k: int) -> None:
        train(diloco, model, 0, k)

    two(address, same, mode=mode, wire=wire)
    assert len(warnings) == 2, warnings
    assert all("pccl.data.Ledger" in text for text in warnings)


def test_fewer_than_the_deadline_wants(address: str, warnings: list[str]) -> None:
    two(address, train, deadline_peers=3, grace=5.0)
    assert len(warnings) == 2, warnings
    assert all("deadline_peers=3: it had 2" in text for text in warnings)


def test_a_state_of_another_mode(address: str, warnings: list[str]) -> None:
    states: list[dict[str, Any]] = []

    def end(diloco: DiLoCo, _: Model) -> None:
        states.append(diloco.state_dict())
        diloco.finish()

    two(address, train, end=end, mode="delayed")
    with pccl.Communicator(address) as comm:
        make(comm, Model(), state=states[0])
    (text,) = warnings
    assert "mode='delayed', and this one has mode='sync'" in text


@pytest.mark.parametrize("mode", IN_STEP)
def test_progress_goes_from_0_to_1(address: str, mode: str) -> None:
    """Alike on all peers: with rounds of one that is alone and takes no step, and a newcomer."""
    outer_steps = 4
    alone = threading.Event()

    def peer(number: int) -> Callable[[], Any]:
        def body() -> Any:
            drawn: list[float] = []
            assert number == 0 or alone.wait(PATIENCE_S)
            model = Model()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode=mode, **IN_STEP[mode])
                while diloco.outer_step < outer_steps:
                    drawn.append(diloco.progress(outer_steps))
                    model.move(random(len(drawn)))
                    if diloco.step():
                        alone.set()
                diloco.finish()
                assert diloco.progress(outer_steps) == 1.0
            return drawn

        return body

    ours, theirs = together(peer(0), peer(1))
    assert ours == sorted(ours)
    assert ours[0] == 0 and 0.9 < ours[-1] < 1
    assert len(theirs) >= 12 and ours[-len(theirs) :] == theirs
