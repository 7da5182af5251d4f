"""DiLoCo with a ledger: each sample has its effect on theta once, whoever comes and goes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training.samples import BATCH, EPOCHS, INNER_STEPS, SAMPLES, make, once, train  # noqa: E402
from training.small import PATIENCE_S, Deserter, Left, together  # noqa: E402

import pccl  # noqa: E402
from pccl.data import Ledger, LedgerSampler  # noqa: E402


@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.parametrize("name", ["all_gather", "are_peers_pending", "sync_shared_state"])
def test_each_sample_has_its_effect_once(address: str, mode: str, name: str) -> None:
    left, joined = threading.Event(), threading.Event()

    def to_the_end(comm: Any) -> Any:
        model, ledger, diloco = make(comm, mode=mode, min_peers=5)
        while not ledger.finished:
            # After some rounds there is nothing to do until the newcomer is there.
            waiting = diloco.outer_step >= 2 and not joined.is_set()
            ledger.wanted = 0 if waiting else BATCH * INNER_STEPS
            train(diloco, model, ledger)
        diloco.finish()
        return diloco.state_dict()["theta"], diloco.state_digest()

    def stays() -> Any:
        with pccl.Communicator(address) as comm:
            return to_the_end(comm)

    def leaves() -> None:
        try:
            with pytest.raises(Left), pccl.Communicator(address) as comm:
                leaving = Deserter(comm, name, 2)
                model, ledger, diloco = make(leaving, mode=mode, min_peers=5)
                leaving.armed = True
                while True:
                    train(diloco, model, ledger)
        finally:
            left.set()

    def joins() -> Any:
        assert left.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            joined.set()
            return to_the_end(comm)

    *stayed, _, newcomer = together(stays, stays, stays, stays, leaves, joins)
    assert len({digest for _, digest in (*stayed, newcomer)}) == 1
    once(newcomer[0], {4, 5})


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_sample_has_its_effect_at_most_once_in_each_fragment(
    address: str, overlap: int
) -> None:
    """Those of a peer that is lost, and of the last rounds, may lack it in one of them.

    With an overlap, a model gives up what it learns between the launch of a mean and its arrival.
    """
    options = {"mode": "streaming", "fragments": 2, "inner_steps": 6, "overlap": overlap}

    def stays() -> Any:
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, min_peers=3, **options)
            while not ledger.finished:
                train(diloco, model, ledger)
            diloco.finish()
            return diloco.state_dict()["theta"], diloco.state_digest()

    def leaves() -> None:
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving = Deserter(comm, "are_peers_pending", 3)
            model, ledger, diloco = make(leaving, min_peers=3, **options)
            leaving.armed = True
            while True:
                train(diloco, model, ledger)

    ours, theirs, _ = together(stays, stays, leaves)
    assert ours[1] == theirs[1]
    effects = ours[0].view(2, -1)
    allowed = torch.tensor([0, 1 / 2, 1 / 3])
    assert ((effects[..., None] - allowed).abs().min(dim=2).values < 1e-6).all()
    lacking = (effects == 0).sum(dim=1)
    if not overlap:
        assert lacking.max() <= 2 * BATCH * INNER_STEPS * 3 and not (effects == 0).all(dim=0).any()


def test_a_resumed_run_takes_the_samples_that_are_left(address: str) -> None:
    def begins() -> Any:
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, min_peers=3)
            for _ in range(2):
                train(diloco, model, ledger)
            return diloco.state_dict()

    def goes_on() -> Any:
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, min_peers=4, state=saved)
            assert ledger.consumed == 2 * 3 * BATCH * INNER_STEPS
            while not ledger.finished:
                train(diloco, model, ledger)
            return diloco.state_dict()["theta"]

    saved = together(begins, begins, begins)[0]
    for theta in together(goes_on, goes_on, goes_on, goes_on):
        once(theta, {3, 4})


@pytest.mark.parametrize("wire", ["int8", "sparse"])
def test_votes_travel_with_gathered_payloads(address: str, wire: str) -> None:
    def body() -> Any:
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, min_peers=2, wire=wire)
            while not ledger.finished:
                train(diloco, model, ledger)
            return diloco.state_digest(), ledger.consumed

    ours, theirs = together(body, body)
    assert ours == theirs and ours[1] == SAMPLES * EPOCHS


def test_a_peer_that_waits_for_others_keeps_the_samples_of_its_round(address: str) -> None:
    alone = threading.Event()

    def waits() -> Any:
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, alone="wait", min_peers=3)
            train(diloco, model, ledger)
            alone.set()
            while not ledger.finished:
                train(diloco, model, ledger)
            return diloco.state_dict()["theta"]

    def leaves() -> None:
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving = Deserter(comm, "all_reduce", 2)
            model, ledger, diloco = make(leaving, alone="wait", min_peers=3)
            leaving.armed = True
            while True:
                train(diloco, model, ledger)

    def joins() -> Any:
        assert alone.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, alone="wait", min_peers=3)
            while not ledger.finished:
                train(diloco, model, ledger)
            return diloco.state_dict()["theta"]

    first, second, _, third = together(waits, waits, leaves, joins)
    assert torch.equal(first, second) and torch.equal(first, third)
    once(first, {3})


def test_a_state_that_does_not_fit_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm:
        model, _, diloco = make(comm)
        state = diloco.state_dict()
        other = Ledger(SAMPLES + 1, share=2, epochs=EPOCHS, peers_max=6)
        for wrong, why in ((other, "101 samples"), (None, "the state has a ledger of samples")):
            with pytest.raises(ValueError, match=why):
                make(comm, ledger=wrong, state=state)
        with pytest.raises(ValueError, match=r"more batches than inner steps: .* inner_steps=3"):
            for places in diloco.round_of([[0]] * 4):
                model.learn(places)
                diloco.step()


def test_a_sampler_gives_the_indices_of_the_round(address: str) -> None:
    with pccl.Communicator(address) as comm:
        _, ledger, _ = make(comm)
        assert list(LedgerSampler(ledger, shuffle=False)) == list(range(BATCH * INNER_STEPS))
