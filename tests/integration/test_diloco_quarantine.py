"""A pseudo-gradient that would spoil the mean is left out of it, and its peer has a name."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Model, N, make, refuse, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "min_peers": 3, "quarantine": 2}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "delayed": {"mode": "delayed"},
    "streaming": {"mode": "streaming", "inner_steps": 2, "overlap": 1, "alpha": 0.5},
}


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


def train(
    address: str, moves: Callable[[int, int], float], rounds: int, **options: Any
) -> list[tuple[list[Any], Any, str]]:
    """Three peers, by their numbers and rounds: reports, the model at the end, and the digest."""

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            model, outers = Model(), []
            with pccl.Communicator(address, name=f"peer-{number}") as comm:
                diloco = make(comm, model, **{**PLAIN, **options})
                while len(outers) < rounds:
                    model.move(moves(number, len(outers)))
                    outer = diloco.step()
                    outers += [outer] if outer else []
                diloco.finish()
                return outers, model.flat(), diloco.state_digest()

        return run

    return together(*(body(number) for number in range(3)))


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_progress_is_in_no_mean(address: str, mode: str, wire: str, bad: float) -> None:
    def moves(number: int, k: int) -> float:
        return bad if number == 1 and k == 1 else 1.0

    ends = train(address, moves, 4, wire=wire, **MODES[mode])
    assert len({digest for *_, digest in ends}) == 1
    for outers, flat, _ in ends:
        assert torch.isfinite(flat).all()
        named = [outer.excluded for outer in outers if outer.excluded]
        assert len(named) == 1 and "peer-1" in named[0][0] and len(named[0]) == 1
        assert sum(outer.contributors == 2 for outer in outers) == 1


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("mode", [*MODES, "decoupled"])
def test_without_quarantine_a_nan_costs_its_peer_alone(
    address: str, mode: str, wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    def moves(number: int, k: int) -> float:
        return math.nan if number == 1 and k == 1 else 1.0

    options = MODES.get(mode, {"mode": mode})
    ends = train(address, moves, 4, wire=wire, quarantine=None, **options)
    assert len({digest for *_, digest in ends}) == 1
    for number, (_, flat, _) in enumerate(ends):
        assert torch.isfinite(flat).all() or (mode == "decoupled" and number == 1)
    assert "the pseudo-gradient of this peer is not finite" in caplog.text


@pytest.mark.parametrize("quarantine", [None, 2])
def test_the_state_of_the_inner_optimizer_is_named(
    address: str, quarantine: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays NaN when the model is that of the others again, until it is cleared."""

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            with pccl.Communicator(address) as comm:
                options = {**PLAIN, "min_peers": 2, "alone": "step", "quarantine": quarantine}
                diloco = DiLoCo(comm, model, optimizer, inner_steps=1, **options)  # type: ignore[arg-type]
                for k in range(4):
                    model.move(math.nan if (number, k) == (1, 1) else 1.0)
                    if (number, k) == (1, 3):
                        optimizer.state.clear()
                    diloco.step()
                return diloco.state_digest()

        return run

    named = r"not finite.*the state of its inner optimizer .*\(momentum_buffer\).*clear\(\)"

    def bad() -> Any:
        if quarantine is None:
            return body(1)()
        with pytest.raises(pccl.KickedError, match=named):
            body(1)()

    ours, theirs = together(body(0), bad)
    if quarantine is None:
        assert ours == theirs
        errors = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert len(errors) == 2 and all(re.search(named, error) for error in errors), errors


@pytest.mark.parametrize("quarantine", [None, 2])
def test_a_buffer_that_is_not_finite_is_in_no_mean(address: str, quarantine: int | None) -> None:
    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            model.register_buffer("seen", torch.zeros(2))
            with pccl.Communicator(address, name=f"peer-{number}") as comm:
                diloco = make(comm, model, **{**PLAIN, "quarantine": quarantine})
                contributors = []
                for k in range(3):
                    model.move(1.0)
                    model.seen += math.nan if (number, k) == (1, 1) else 1.0
                    outer = diloco.step()
                    contributors.append(outer.contributors if outer else 0)
                return model.seen, contributors, diloco.state_digest()

        return run

    ends = together(*(body(number) for number in range(3)))
    assert len({digest for *_, digest in ends}) == 1
    for seen, contributors, _ in ends:
        assert torch.isfinite(seen).all()
        assert quarantine is None or contributors == [3, 2, 3]


def test_outliers_are_left_out_or_clipped(address: str) -> None:
    def moves(number: int, k: int) -> float:
        return 100.0 if number == 1 else 1.0 + number

    ends = train(address, moves, 1)
    for outers, flat, _ in ends:
        assert outers[0].contributors == 2 and "peer-1" in outers[0].excluded[0]
        assert torch.allclose(flat, torch.full((N,), -2.0))
    with pccl.MasterNode("127.0.0.1:0") as master:
        ends = train(master.address, moves, 1, outliers="clip")
    for outers, flat, _ in ends:
        assert outers[0].contributors == 3 and outers[0].excluded == ()
        assert torch.allclose(flat, torch.full((N,), -(1.0 + 3.0 + 3.0) / 3))


@pytest.mark.parametrize("mode", ["sync", "decoupled"])
def test_a_peer_that_is_left_out_again_and_again_is_dropped(address: str, mode: str) -> None:
    dropped = threading.Event()
    ends: list[int] = []  # one of the two may see it a round later

    def good() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **PLAIN, mode=mode)
            while not (dropped.is_set() and diloco.world_size == 2):
                model.move(1.0)
                diloco.step()
            ends.append(diloco.outer_step + 2)
            while diloco.outer_step < max(ends):
                model.move(1.0)
                diloco.step()
            diloco.finish()
            assert torch.isfinite(model.flat()).all()
            return diloco.state_digest()

    def bad() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **PLAIN, mode=mode)
            with pytest.raises(pccl.KickedError, match=r"in 2 rounds in a row .* not finite"):
                while True:
                    model.move(math.nan)
                    diloco.step()
        dropped.set()

    one, two, _ = together(good, good, bad)
    assert one == two
    assert dropped.wait(PATIENCE_S)


def test_it_must_be_the_same_on_all_peers(address: str) -> None:
    why = r"quarantine is 2 in the run and None here$"
    refuse(address, why, {"quarantine": 2}, {})


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("quarantine=0 must be", {"quarantine": 0}),
        ("outliers='drop' must be", {"quarantine": 1, "outliers": "drop"}),
        ("outliers='clip' is for quarantine", {"outliers": "clip"}),
    ],
)
def test_settings_out_of_range_are_refused(why: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=why):
        make(None, Model(), **options)  # type: ignore[arg-type]
