"""All settings of DiLoCo that go together do, and all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from combinations import FEATURES, MODES, SHARDED, WHY_NOT

torch = pytest.importorskip("torch")

from training.replicas import Meeting, Part, Team, in_parts  # noqa: E402, F401
from training.small import Model, compute, make, random, together  # noqa: E402

import pccl  # noqa: E402
from pccl.data import Ledger  # noqa: E402
from pccl.diloco import Checkpoints  # noqa: E402


class Buffered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


def trained(address: str, mode: str, options: dict[str, Any], tmp_path: Path) -> list[Any]:
    """The state of two peers after some rounds."""

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            given = dict(options)
            if given.pop("ledger", False):
                given["ledger"] = Ledger(1 << 40, share=1 << 30, peers_max=4)
            if given.pop("checkpoints", False):
                given["checkpoints"] = Checkpoints(tmp_path, every=1)
            model = Buffered()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode=mode, min_peers=2, **given)
                while diloco.outer_step < 3:
                    model.move(random(1000 * number + diloco.outer_step))
                    model.seen += number
                    if mode == "decoupled":
                        compute()
                    diloco.step(samples=1 + number)
                diloco.finish()
                if "checkpoints" in given:
                    assert given["checkpoints"].latest() is not None
                return diloco.state_digest()

        return run

    return together(body(0), body(1))


@pytest.mark.parametrize("mode", MODES)
def test_what_goes_together_trains_to_the_same_bits(mode: str, tmp_path: Path) -> None:
    for number, (feature, options) in enumerate(FEATURES.items()):
        if feature == SHARDED or (feature, mode) in WHY_NOT:
            continue
        with pccl.MasterNode("127.0.0.1:0") as master:
            given = {**MODES[mode], **options}
            ours, theirs = trained(master.address, mode, given, tmp_path / str(number))
            assert ours == theirs, feature


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("mode", [mode for mode in MODES if (SHARDED, mode) not in WHY_NOT])
def test_sharded_models_train_to_the_same_bits(address: str, mode: str) -> None:
    options = {**MODES[mode], "mode": mode, "min_peers": 2}
    teams = [
        Team(address, name).start(3, lambda name, shard, k: random(100 * name + k), options)
        for name in range(2)
    ]
    for team in teams:
        team.check()
    ours, theirs = (team.processes[1].digests for team in teams)
    assert ours and ours == theirs


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("feature", "mode"), WHY_NOT)
def test_what_does_not_is_refused_with_the_reason(address: str, feature: str, mode: str) -> None:
    model = Model()
    model.part = Part(Meeting(2 if feature == SHARDED else 1), 0)
    options = {**MODES[mode], **FEATURES[feature], "mode": mode}
    options.pop("sharded", None)
    why = WHY_NOT[feature, mode]
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match=why):
        make(comm, model, **options)
