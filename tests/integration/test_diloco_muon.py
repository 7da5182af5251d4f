"""Muon as DiLoCo's inner optimizer, and the presets of published variants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training.small import together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo, MuonAndAdamW, muloco, sparseloco  # noqa: E402

HIDDEN = ["up.weight", "down.weight"]


class Model(torch.nn.Module):
    """A language model of two matrices between an embedding and an output layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(11, 8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Any) -> Any:
        inside = self.embedding(tokens)
        return self.head(self.norm(inside + self.down(torch.relu(self.up(inside)))))

    def loss(self, seed: int) -> Any:
        tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
        logits = self(tokens[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def bits(model: Model) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def test_matrices_inside_go_to_muon_and_all_else_to_adamw() -> None:
    one, other = Model(), Model()
    both = MuonAndAdamW(one, lr=0.01, weight_decay=0.05)
    assert both.hidden == HIDDEN
    named = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [named.pop(name) for name in HIDDEN],
        lr=0.01,
        weight_decay=0.05,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(named.values(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.05)
    for seed in range(3):
        for group in (*both.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (seed + 1)  # as a schedule does it
        one.loss(seed).backward()
        other.loss(seed).backward()
        both.step()
        both.zero_grad()
        for each in (muon, adamw):
            each.step()
            each.zero_grad()
        assert bits(one) == bits(other)


def test_names_and_tied_weights_are_left_to_adamw() -> None:
    model = Model()
    assert MuonAndAdamW(model, adamw=["up"]).hidden == ["down.weight"]
    model.head.weight = model.embedding.weight
    model.up.weight.requires_grad_(False)
    optimizer = MuonAndAdamW(model)
    assert optimizer.hidden == ["down.weight"]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    square = torch.nn.Sequential(
        torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    )
    assert MuonAndAdamW(square).hidden == ["1.weight"]
    with pytest.raises(ValueError, match="adamw has 'upper': the model trains nothing of that"):
        MuonAndAdamW(model, adamw=["upper"])
    with pytest.raises(ValueError, match="the model has no matrix for Muon"):
        MuonAndAdamW(torch.nn.LayerNorm(3))


def test_a_model_of_matrices_alone_needs_no_adamw() -> None:
    model = torch.nn.Linear(4, 5, bias=False)
    optimizer = MuonAndAdamW(model, lr=0.1)
    before = model.weight.detach().clone()

    def closure() -> Any:
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(model.weight, before)
    assert MuonAndAdamW(model).state_dict().keys() == {"muon"}


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"has no Muon: it came with torch 2\.9"):
        MuonAndAdamW(Model())


def test_its_state_is_saved_and_loaded() -> None:
    def train(model: Model, optimizer: MuonAndAdamW, seeds: range) -> None:
        for seed in seeds:
            model.loss(seed).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = Model()
    optimizer = MuonAndAdamW(model, lr=0.01)
    train(model, optimizer, range(2))
    resumed = copy.deepcopy(model)
    anew = MuonAndAdamW(resumed, lr=0.5)
    anew.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in anew.param_groups] == [0.01, 0.01]
    for group in (*optimizer.param_groups, *anew.param_groups):
        group["lr"] = 0.02
    train(model, optimizer, range(2, 4))
    train(resumed, anew, range(2, 4))
    assert bits(model) == bits(resumed)
    with pytest.raises(ValueError, match=r"the state has \['state'\], not \['adamw', 'muon'\]"):
        anew.load_state_dict({"state": {}})


@pytest.mark.parametrize("wire", ["int4", "2bit"])
def test_muloco_trains_and_resumes(wire: Any) -> None:
    """Around a loop as it is; then from what was saved, with the moments of the inner optimizer."""

    def peer(number: int, address: str, saved: Any) -> Callable[[], Any]:
        def body() -> Any:
            model = Model(number)
            optimizer = MuonAndAdamW(model, lr=0.02)
            settings = {**muloco(2, wire), "inner_steps": 3}
            with pccl.Communicator(address) as comm:
                diloco = DiLoCo(comm, model, optimizer, min_peers=2, state=saved, **settings)
                losses = []
                with diloco:
                    for step in range(6):
                        loss = model.loss(number + 2 * (step % 2))
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        losses.append(loss.item())
                assert diloco.outer_step == (2 if saved is None else 4)
                return diloco.state_digest(), diloco.state_dict(), losses

        return body

    with pccl.MasterNode("127.0.0.1:0") as master:
        runs = together(*(peer(n, master.address, None) for n in (0, 1)))
    with pccl.MasterNode("127.0.0.1:0") as master:
        again = together(*(peer(n, master.address, runs[n][1]) for n in (0, 1)))
    assert runs[0][0] == runs[1][0] != again[0][0] == again[1][0]
    assert sum(again[0][2] + again[1][2]) < sum(runs[0][2] + runs[1][2])


def test_presets_equal_the_published_values() -> None:
    assert [(muloco(n)["outer_lr"], muloco(n)["outer_momentum"]) for n in (1, 2, 4, 8, 20)] == [
        (0.7, 0.6),
        (0.767, 0.667),
        (0.833, 0.733),
        (0.9, 0.8),
        (0.9, 0.8),
    ]
    with pytest.raises(ValueError, match="peers=0 must be at least 1"):
        muloco(0)
    assert sparseloco() == {
        "inner_steps": 30,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
        "wire": "sparse",
    }
