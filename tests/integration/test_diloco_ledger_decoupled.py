"""A ledger of samples with mode="decoupled": the syncer claims while the learner trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.samples import EPOCHS, SAMPLES, make, train  # noqa: E402
from training.small import PATIENCE_S, Deserter, Left, StoppedSyncer, compute, together  # noqa: E402

import pccl  # noqa: E402


def once(theta: Any, fragments: int, atol: float) -> None:
    """Each sample is in one mean of each fragment: no other has the share of one of n peers."""
    counts = 1 / theta.view(fragments, SAMPLES * EPOCHS)
    off = (counts - counts.round()).abs()
    assert (off < atol * counts**2).all() and (counts < 3.5).all(), theta


class Run:
    def __init__(self, address: str, **options: Any) -> None:
        self.address = address
        self.options = {
            "mode": "decoupled",
            "min_peers": 3,
            "alone": "continue",
            "weight": "peers",
            **options,
        }

    def train(self, comm: Any, before: Callable[[Any], object], **own: Any) -> Any:
        model, ledger, diloco = make(comm, **{**self.options, **own})
        if isinstance(comm, Deserter):
            comm.armed = True

        def pause() -> None:
            compute()
            before(diloco)

        while not ledger.finished:
            train(diloco, model, ledger, pause)
        diloco.finish()
        assert ledger.consumed == SAMPLES * EPOCHS
        self.theta = diloco.state_dict()["theta"]
        return diloco.state_digest()

    def peer(self, before: Callable[[Any], object] = lambda diloco: None) -> Any:
        with pccl.Communicator(self.address) as comm:
            return self.train(comm, before)


@pytest.mark.parametrize(
    ("weight", "wire"), [("rate", "fp32"), ("peers", "fp32"), ("peers", "int8")]
)
def test_each_sample_is_in_one_mean(address: str, weight: str, wire: str) -> None:
    """This includes learners that have nothing left to train on while others have."""
    run = Run(address, weight=weight, wire=wire)
    assert len({*together(*[run.peer] * 3)}) == 1
    if weight == "peers":
        once(run.theta, 1, 1e-6 if wire == "fp32" else 0.02)
    else:
        assert (run.theta > 0).all() and (run.theta < 1 + 1e-6).all()


def test_each_sample_is_in_one_mean_of_each_fragment(address: str) -> None:
    run = Run(address, fragments=2)
    assert len({*together(*[run.peer] * 3)}) == 1
    once(run.theta, 2, 1e-6)


@pytest.mark.parametrize("name", ["all_gather", "are_peers_pending", "sync_shared_state"])
def test_those_of_a_peer_that_is_lost_are_given_to_others(address: str, name: str) -> None:
    run = Run(address)

    def leaves() -> None:
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            run.train(Deserter(comm, name, 3), lambda diloco: None)

    one, two, _ = together(run.peer, run.peer, leaves)
    assert one == two
    once(run.theta, 1, 1e-6)


def test_a_peer_that_was_dropped_gives_up_its_samples_and_joins_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stop = Run(address, grace=0.3), StoppedSyncer(monkeypatch)

    def stands_still() -> Any:
        with pccl.Communicator(address) as comm:

            def before(diloco: Any) -> None:
                if diloco.outer_step >= 1 and not stop.away.is_set():
                    stop.comms.append(comm)
                    assert stop.away.wait(PATIENCE_S)

            return run.train(comm, before)

    def goes_on(diloco: Any) -> None:
        if diloco.outer_step >= 2 and not stop.back.is_set():
            assert stop.away.wait(PATIENCE_S)
            wait_until(lambda: diloco.world_size == 2)
            stop.back.set()

    ends = together(lambda: run.peer(goes_on), lambda: run.peer(goes_on), stands_still)
    assert len({*ends}) == 1 and stop.back.is_set()
    once(run.theta, 1, 1e-6)
