"""The algorithm by which DiLoCo averages pseudo-gradients, for different numbers of peers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from combinations import IN_STEP

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.small import PATIENCE_S, Deserter, Left, Watched, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import Algorithm, DiLoCo  # noqa: E402
from pccl.diloco.averaging import Quantized, Selector, Sizes  # noqa: E402


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Pairs(torch.nn.Module):
    """Six parameters, which take 18 bytes in 2 bits: three peers save bytes by not quantizing them.

    They have two values, so quantization in four levels is exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))

    def move(self, by: float) -> None:
        self.weight.grad = torch.tensor([by, by / 3]).repeat(3)


def make(comm: Any, model: Pairs, **options: Any) -> DiLoCo:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "wire": "2bit"}
    return DiLoCo(comm, model, optimizer, inner_steps=1, **{**plain, **options})


@pytest.mark.parametrize(
    ("peers", "quantized", "two_stage", "algorithm"),
    [
        (0, 10**9, False, "gather"),
        (2, 4000, False, "gather"),
        (2, 4001, False, "ring"),
        (7, 1016, False, "gather"),
        (8, 1016, False, "ring"),
        (289, 27, False, "gather"),
        (300, 27, False, "ring"),
        (2, 563, True, "gather"),
        (3, 563, True, "two-stage"),
        (128, 563, True, "two-stage"),
        (129, 563, True, "ring"),
    ],
)
def test_the_algorithm_is_that_of_fewer_received_bytes(
    peers: int, quantized: int, two_stage: bool, algorithm: str
) -> None:
    selector = Selector()
    selector.applied(peers)
    sizes = Sizes(quantized, 4000, two_stage=two_stage)
    chosen, reason = selector.choose(sizes, "gather")
    assert chosen == algorithm and reason.startswith(f"'{algorithm}': of {peers} peers")
    if peers > 1:
        received = {
            "gather": (peers - 1) * quantized,
            "ring": 2 * (peers - 1) / peers * 4000,
            **({"two-stage": 2 * (peers - 1) / peers * quantized} if two_stage else {}),
        }
        if peers > 128:
            received.pop("two-stage", None)
        assert algorithm == min(received, key=lambda name: received[name])
        assert sizes.received(peers) == pytest.approx(received, abs=1)


def test_a_change_of_the_algorithm_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector()
    with caplog.at_level(logging.INFO, "pccl.diloco"):
        chosen: Algorithm = "gather"
        for peers in (2, 3, 3, 2):
            selector.applied(peers)
            chosen, _ = selector.choose(Sizes(6, 8), chosen)
    begin = "from now on pseudo-gradients are averaged by"
    assert caplog.messages == [
        f"{begin} 'ring': of 3 peers, each receives 12 bytes by 'gather', 10 bytes by 'ring'",
        f"{begin} 'gather': of 2 peers, each receives 6 bytes by 'gather', 8 bytes by 'ring'",
    ]


def test_a_peer_explains_its_algorithm(address: str) -> None:
    def peer() -> tuple[str, str]:
        with pccl.Communicator(address) as comm:
            model = Pairs()
            diloco = make(comm, model, min_peers=2)
            before = diloco.explain()
            for _ in range(2):
                model.move(1.0)
                diloco.step()
            return before, diloco.explain()

    for before, after in together(peer, peer):
        assert before.startswith("pseudo-gradients are averaged by 'gather': no round")
        first, second, *_ = after.splitlines()
        assert first == (
            "pseudo-gradients are averaged by 'gather': of 2 peers, each receives 18 bytes by "
            "'gather', 24 bytes by 'ring'"
        )
        assert "took" in second


@pytest.mark.parametrize("mode", ["sync", "delayed", "streaming"])
def test_peers_that_learn_of_a_loss_at_different_times_take_the_same_algorithm(
    address: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three leaves in a ring round; one of the others knows it, and one does not yet."""
    ring = "all_reduce" if mode in ("sync", "streaming") else "all_reduce_async"
    entered = threading.Event()
    digests: dict[int, set[str]] = {}
    load, own = Quantized.load, threading.local()

    def load_late(averager: Quantized, *progress: Any) -> None:
        wait_until(getattr(own, "knows", lambda: True))
        load(averager, *progress)

    monkeypatch.setattr(Quantized, "load", load_late)

    def survivor(ignorant: bool) -> Callable[[], Any]:
        def body() -> Any:
            algorithms, model = [], Pairs()
            with pccl.Communicator(address) as comm:
                watched: Any = Watched(comm, **({ring: entered.set} if ignorant else {}))
                diloco = make(watched, model, mode=mode, min_peers=3)
                if not ignorant:
                    own.knows = lambda: not algorithms or comm.world_size < 3
                for _ in range(4):
                    model.move(1.0)
                    outer = diloco.step()
                    assert outer is not None
                    algorithms.append(outer.algorithm)
                    digests.setdefault(diloco.outer_step, set()).add(diloco.state_digest())
                    if algorithms == ["gather", "ring"] and mode in ("sync", "streaming"):
                        assert not diloco.state_dict()["averager"]["residual"].any()
                        assert outer.contributors == 2
                diloco.finish()
                assert diloco.last_reduce is not None and diloco.last_reduce.world_size == 2
            return algorithms, model.weight.detach().clone()

        return body

    def leaver() -> None:
        model = Pairs()
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving: Any = Deserter(comm, ring, 1)
            leaving.armed = True
            watched: Any = Watched(leaving, **{ring: lambda: entered.wait(PATIENCE_S)})
            diloco = make(watched, model, mode=mode, min_peers=3)
            for _ in range(2):
                model.move(1.0)
                diloco.step()

    (ours, first), (theirs, second), _ = together(survivor(True), survivor(False), leaver)
    assert ours == theirs == ["gather", "ring", "gather", "gather"]
    assert torch.equal(first, second)
    assert all(len(each) == 1 for each in digests.values())
    if mode in ("sync", "streaming"):  # what was not sent in one round was in another
        torch.testing.assert_close(first, torch.tensor([-4.0, -4 / 3]).repeat(3), atol=0.02, rtol=0)


@pytest.mark.parametrize("mode", IN_STEP)
def test_a_newcomer_takes_the_algorithm_of_the_others(address: str, mode: str) -> None:
    begun = threading.Event()

    def train(newcomer: bool) -> Callable[[], Any]:
        def body() -> Any:
            assert not newcomer or begun.wait(PATIENCE_S)
            model, seen = Pairs(), []
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode=mode, min_peers=1 if newcomer else 2)
                while not seen or seen[-1] != "ring":  # which all of them see in the same round
                    model.move(1.0)
                    outer = diloco.step()
                    assert outer is not None
                    begun.set()
                    seen.append(outer.algorithm)
                diloco.finish()
                return len(seen), diloco.outer_step, diloco.state_digest()

        return body

    *incumbents, (rounds, step, digest) = together(train(False), train(False), train(True))
    assert all(each[1:] == (step, digest) for each in incumbents)
    assert 2 <= rounds <= 3
