"""DiLoCo of models that FSDP2 has sharded: what it takes, and its checkpoints. One process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from programs.with_torch.fsdp_checkpoint import OPTIONS, build, trained  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import pccl.torch  # noqa: E402
from pccl.diloco import Checkpoints, DiLoCo, MuonAndAdamW  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "support/programs/with_torch/fsdp_checkpoint.py"

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


@pytest.fixture(autouse=True)
def _replica() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def resumed(address: str, state: Any, model: nn.Module) -> tuple[dict[str, Any], float]:
    """The whole state of a peer that resumes, and its inner learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pccl.torch.communicator(address) as comm:
        diloco = DiLoCo(comm, model, optimizer, state=state, **OPTIONS)
        return diloco.state_dict(), optimizer.param_groups[0]["lr"]


def plain() -> nn.Module:
    """The same model, in one piece."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model[0].bias.requires_grad = False
    return model


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def test_a_state_is_saved_whole_or_sharded_and_resumed_by_either(
    address: str, tmp_path: Path
) -> None:
    with pccl.torch.communicator(address) as comm:
        diloco = trained(comm, build(0, 1), 3)
        whole = diloco.state_dict()
        dcp.save(diloco.state_dict(sharded=True), checkpoint_id=tmp_path / "sharded")
        diloco.save(tmp_path / "whole")
    given = partial(dcp.load, checkpoint_id=tmp_path / "sharded"), tmp_path / "whole", whole
    for state in given:
        found, lr = resumed(address, state, build(1, 1))
        assert equal(without(found, "revision"), without(whole, "revision"))
        assert lr == 0.1
    found, _ = resumed(address, whole, plain())  # a model in one piece has the same state
    assert equal(without(found, "revision"), without(whole, "revision"))
    found, _ = resumed(address, found, build(1, 1))
    assert equal(without(found, "revision"), without(whole, "revision"))


def test_all_peers_write_their_shards_and_any_model_begins_with_them(
    address: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, every=2)
    with pccl.torch.communicator(address) as comm:
        diloco = trained(comm, build(0, 1), 3, checkpoints=checkpoints)
        diloco.finish()
        whole = diloco.state_dict()
    path = checkpoints.latest()
    assert path == tmp_path / "2" and int(whole["clock"][0]) == 3
    first, _ = resumed(address, path, build(1, 1))
    for model in (plain(), build(1, 1)):
        found, lr = resumed(address, path, model)
        assert equal(without(found, "revision"), without(first, "revision")) and lr == 0.1
    assert int(first["clock"][0]) == 2 and len(first["optimizer"]["state"]["state"]) == 5


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_resumed_by_one(address: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(SCRIPT), address, str(tmp_path)]
    subprocess.run([*run, *words], check=True, capture_output=True, timeout=100)
    sharded, _ = resumed(
        address, partial(dcp.load, checkpoint_id=tmp_path / "sharded"), build(1, 1)
    )
    whole, _ = resumed(address, tmp_path / "whole", plain())
    assert int(whole["clock"][0]) == 2
    assert equal(without(sharded, "revision"), without(whole, "revision"))
    for model in (plain(), build(1, 1)):
        found, _ = resumed(address, tmp_path / "together" / "2", model)
        assert equal(without(found, "revision"), without(whole, "revision"))


def test_an_evaluation_leaves_no_old_parameters_behind(address: str) -> None:
    """It gathers those of the outermost module, which stay gathered: an outer step frees them."""
    model, given = nn.Linear(3, 1), torch.ones(2, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight, bias = (parameter.to_local() for parameter in model.parameters())
    with pccl.torch.communicator(address) as comm:
        diloco = DiLoCo(comm, model, optimizer, inner_steps=1, alone="step", outer_momentum=0.5)
        model(given).sum().backward()
        diloco.step()
        with torch.no_grad():
            before = model(given)
            diloco.step()  # moves by the outer momentum
            after = model(given)
            wanted = given @ weight.T + bias
    assert not torch.equal(before, after)
    assert torch.allclose(after, wanted)


def test_other_kinds_of_sharding_are_refused(address: str) -> None:
    line, grid = (
        init_device_mesh("cpu", (1,)),
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")),
    )

    def refused(model: nn.Module, why: str) -> None:
        with pccl.torch.communicator(address) as comm, pytest.raises(ValueError, match=why):
            DiLoCo(comm, model, torch.optim.SGD(model.parameters(), 0.1), inner_steps=1)

    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(half[1], mesh=line)
    refused(half, "parameter '0.weight' is not sharded, and others are")
    hybrid = nn.Linear(2, 2)
    fully_shard(hybrid, mesh=grid)
    refused(hybrid, "DiLoCo needs one mesh of one dimension, which shards")


def test_an_optimizer_of_another_form_cannot_be_saved(address: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pccl.torch.communicator(address) as comm:
        diloco = DiLoCo(comm, model, MuonAndAdamW(model, lr=0.1), inner_steps=1)
        with pytest.raises(ValueError, match="the state of a MuonAndAdamW of sharded parameters"):
            diloco.state_dict()
