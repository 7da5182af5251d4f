"""A ledger of samples with mode="decoupled": the syncer claims while the learner trains."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.samples import EPOCHS, SAMPLES, make, train  # noqa: E402
from training.small import DEADLINE_S, Deserter, Left, compute, together  # noqa: E402

import pccl  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Means:
    """The contributions of peers to the means of each fragment."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self._applied: dict[tuple[int, int], set[int]] = defaultdict(set)

    def follow(self, diloco: Any, peer: int) -> None:
        for number, exchange in enumerate(diloco._exchanges):
            load, step = exchange._load, exchange.step

            def noted(exchange: Any = exchange, number: int = number, load: Any = load) -> None:
                load()
                if exchange.weight.value:
                    given = exchange._state.delta.clone()
                    self._given[number, exchange.outer_step][peer] = given

            def stepped(
                contributors: int, exchange: Any = exchange, number: int = number, step: Any = step
            ) -> None:
                self._applied[number, exchange.outer_step].add(peer)
                step(contributors)

            exchange._load, exchange.step = noted, stepped

    def effects(self, fragment: int) -> Any:
        """How often each sample is in a mean of this fragment."""
        found = torch.zeros(SAMPLES * EPOCHS)
        for (number, k), peers in self._applied.items():
            if number == fragment:
                found -= sum(self._given[number, k].get(peer, 0) for peer in peers)
        return found


class Run:
    def __init__(self, address: str, **options: Any) -> None:
        self.address, self.means = address, Means()
        self.options = {"mode": "decoupled", "min_peers": 3, "alone": "continue", **options}

    def train(self, number: int, comm: Any, before: Callable[[Any], object], **own: Any) -> Any:
        model, ledger, diloco = make(comm, **{**self.options, **own})
        self.means.follow(diloco, number)
        if isinstance(comm, Deserter):
            comm.armed = True

        def pause() -> None:
            compute()
            before(diloco)

        while not ledger.finished:
            train(diloco, model, ledger, pause)
        diloco.finish()
        assert ledger.consumed == SAMPLES * EPOCHS
        return diloco.state_digest()

    def peer(self, number: int, before: Callable[[Any], object] = lambda diloco: None) -> Any:
        with pccl.Communicator(self.address) as comm:
            return self.train(number, comm, before)


@pytest.mark.parametrize(("weight", "wire"), [("rate", "fp32"), ("samples", "int8")])
def test_each_sample_is_in_one_mean(address: str, weight: str, wire: str) -> None:
    """This includes learners that have nothing left to train on while others have."""
    run = Run(address, weight=weight, wire=wire)
    ends = together(*(lambda n=n: run.peer(n) for n in range(3)))  # type: ignore[misc]
    assert len({*ends}) == 1
    assert torch.equal(run.means.effects(0), torch.ones(SAMPLES * EPOCHS))


def test_each_sample_is_in_one_mean_of_each_fragment(address: str) -> None:
    run = Run(address, fragments=2)
    assert len({*together(*(lambda n=n: run.peer(n) for n in range(3)))}) == 1  # type: ignore[misc]
    for fragment in range(2):
        assert torch.equal(run.means.effects(fragment), torch.ones(SAMPLES * EPOCHS))


@pytest.mark.parametrize("name", ["all_gather", "are_peers_pending", "sync_shared_state"])
def test_those_of_a_peer_that_is_lost_are_given_to_others(address: str, name: str) -> None:
    run = Run(address)

    def leaves() -> None:
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            run.train(2, Deserter(comm, name, 3), lambda diloco: None)

    one, two, _ = together(lambda: run.peer(0), lambda: run.peer(1), leaves)
    assert one == two
    assert torch.equal(run.means.effects(0), torch.ones(SAMPLES * EPOCHS))


def test_a_peer_that_was_dropped_gives_up_its_samples_and_joins_again(address: str) -> None:
    run, away, back = Run(address, grace=0.3), threading.Event(), threading.Event()

    def stands_still(diloco: Any) -> None:
        if away.is_set() or diloco.outer_step < 1:
            return
        arrive = diloco._group.arrive

        def stop(*arguments: Any) -> None:
            away.set()
            assert back.wait(DEADLINE_S)
            arrive(*arguments)

        diloco._group.arrive = stop
        assert away.wait(DEADLINE_S)
        diloco._group.arrive = arrive

    def goes_on(diloco: Any) -> None:
        if diloco.outer_step >= 2 and not back.is_set():
            assert away.wait(DEADLINE_S)
            wait_until(lambda: diloco.world_size == 2)
            back.set()

    ends = together(
        lambda: run.peer(0, goes_on),
        lambda: run.peer(1, goes_on),
        lambda: run.peer(2, stands_still),
    )
    assert len({*ends}) == 1 and back.is_set()
    assert torch.equal(run.means.effects(0), torch.ones(SAMPLES * EPOCHS))
