"""DiLoCo on three processes that are not alike: on a GPU, if there is one, on a CPU, and slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peers.processes import Reporter  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

pytestmark = pytest.mark.slow
ROUNDS = 5
SECONDS = 1.0
WORK = {"device": 1, "cpu": 1, "slow": 2}  # how often each peer does the work of a step


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_peers_train_for_a_time_and_are_weighted_by_their_samples(mode: str) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = {
            role: Reporter(Path(__file__), master.address, mode, role, patience_s=90)
            for role in WORK
        }
        try:
            ends = {
                role: peer.wait_for(lambda report: "digest" in report)
                for role, peer in peers.items()
            }
        finally:
            for peer in peers.values():
                peer.kill()
    assert len({end["digest"] for end in ends.values()}) == 1
    for end in ends.values():
        assert end["loss"] < 0.5 * end["first_loss"]
    shares = ends["cpu"]["shares"]  # as one of them was told of all
    for of_round in shares:
        assert len(of_round) == len(WORK)
        for samples, inner_steps, compute_s, utilisation in of_round:
            assert samples == 32 * inner_steps and compute_s > 0 and 0 < utilisation <= 1
    # All know each other's, in the same order.
    assert shares == ends["device"]["shares"] == ends["slow"]["shares"]
    total = {role: end["samples"] for role, end in ends.items()}
    assert total["slow"] < total["cpu"]
    assert sum(total.values()) == sum(row[0] for of_round in shares for row in of_round)


def train(address: str, mode: str, role: str) -> None:
    """ROUNDS rounds of a regression. The peer of role "device" is on a GPU, or else of bfloat16,
    which is what makes it unlike the others there."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    cuda = role == "device" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if role == "device" and not cuda else torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(
        device, dtype
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(list(WORK).index(role))
    losses: list[float] = []
    shares: list[list[Any]] = []
    samples = 0
    with pccl.Communicator(address) as comm:
        options: Any = {"outer_lr": 1.0, "outer_momentum": 0.0, "weight": "samples"}
        diloco = DiLoCo(
            comm, model, optimizer, inner_seconds=SECONDS, min_peers=3, mode=mode, **options
        )
        while len(shares) < ROUNDS:
            for _ in range(WORK[role]):
                x = torch.randn(32, 8, generator=generator)
                y = x.sum(1, keepdim=True)
                optimizer.zero_grad()
                loss = (model(x.to(device, dtype)).float() - y.to(device)).pow(2).mean()
                loss.backward()
            losses.append(loss.item())
            samples += 32
            outer = diloco.step(samples=32)
            if outer:
                rows = [(p.samples, p.inner_steps, p.compute_s, p.utilisation) for p in outer.peers]
                shares.append(rows)
        diloco.finish()
        end = {"digest": diloco.state_digest(), "first_loss": losses[0], "loss": losses[-1]}
    print(json.dumps({**end, "samples": samples, "shares": shares}), flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])
