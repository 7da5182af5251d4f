"""The outer learning rate and momentum: by the outer step, or by the number of peers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pccl.diloco.outer import OuterOptimizer, OuterState  # noqa: E402
from pccl.diloco.settings import Rates, rates  # noqa: E402

USUAL: Any = {"mode": "sync", "inner_steps": 30, "sparse": False, "muon": False}


def test_points_are_joined_by_lines() -> None:
    schedule = rates([(2, 1.0), (4, 0.5), (5, 0.25)], [(0, 0.5)], **USUAL)
    found = [schedule.at(k, 8)[0] for k in range(8)]
    assert found == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    assert schedule.at(9, 1)[1] == 0.5


def test_defaults_go_by_the_peers_of_a_mean_and_the_inner_steps() -> None:
    usual = rates(None, None, **USUAL)
    assert [usual.at(7, peers)[0] for peers in (1, 2, 3, 4, 6, 8, 99)] == pytest.approx(
        [0.4, 0.6, 0.6, 0.6, 0.7, 0.8, 0.8]
    )
    assert usual.momentum == 0.9
    assert rates(None, None, **{**USUAL, "muon": True}).momentum == 0.6
    assert rates(None, None, **{**USUAL, "inner_steps": 19, "muon": True}).momentum == 0.5
    assert rates(None, None, **{**USUAL, "sparse": True}) == Rates(1.0, 0.0)
    assert rates(0.3, 0.2, **{**USUAL, "sparse": True}) == Rates(0.3, 0.2)


def test_a_mean_that_is_a_round_old_has_less_momentum_unless_it_is_given() -> None:
    late = {**USUAL, "mode": "delayed"}
    assert rates(None, None, **late) == rates(None, 0.85, **late) == Rates(0.6, 0.85)
    assert rates(None, None, **{**late, "inner_steps": 5}).momentum == 0.5
    assert rates(0.3, None, **late) == Rates(0.3, 0.85)
    assert rates(None, 0.6, **late) == Rates(None, 0.6)
    assert rates(None, None, **{**late, "sparse": True}) == Rates(1.0, 0.0)
    assert rates(None, None, **{**USUAL, "mode": "streaming"}) == Rates(None, 0.9)


@pytest.mark.parametrize("bad", [0.0, -1.0, [], [(0, 1.0), (0, 0.5)], [(-1, 1.0)], [(3, 0.0)]])
def test_learning_rates_out_of_range_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="outer_lr"):
        rates(bad, None, **USUAL)


@pytest.mark.parametrize("bad", [1.0, -0.1, [(0, 0.5), (9, 1.0)]])
def test_momenta_out_of_range_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="outer_momentum"):
        rates(None, bad, **USUAL)


def test_a_step_takes_its_rates_and_logs_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    log = logging.getLogger("pccl.diloco")
    monkeypatch.setattr(log, "info", lambda text, *words: said.append(text % words))
    optimizer = OuterOptimizer(rates([(1, 1.0), (2, 0.5)], [(1, 0.5), (2, 0.0)], **USUAL), False)
    state = OuterState(
        [torch.nn.Parameter(torch.zeros(1))], optimizer, torch.zeros(1, dtype=torch.int64)
    )
    state.mean.fill_(1.0)
    seen = []
    for _ in range(4):
        state.step(2)
        seen.append((state.theta.item(), state.velocity.item()))
    assert seen == [(-1.0, 1.0), (-2.5, 1.5), (-3.0, 1.0), (-3.5, 1.0)]
    assert len(said) == 2 and "eta 1, mu 0.5, effective gain eta / (1 - mu) = 2" in said[0]
    assert "from outer step 3 on, for a mean of 2 peers: eta 0.5, mu 0, " in said[1]
