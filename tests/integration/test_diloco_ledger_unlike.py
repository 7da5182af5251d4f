"""A ledger of samples in rounds that peers do not come to with all of their share."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training.samples import EPOCHS, SAMPLES, Effects, make, once, train  # noqa: E402
from training.small import PATIENCE_S, Clock, Deserter, Hand, Left, together  # noqa: E402

import pccl  # noqa: E402
from pccl.data import Ledger  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402
from pccl.diloco.pace import Deadline  # noqa: E402

ALL = range(SAMPLES * EPOCHS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().installed(monkeypatch)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


class Run:
    """Peers that train to the end of the data, and what each round has trained on."""

    def __init__(self, address: str, clock: Clock | None = None) -> None:
        self.address, self.clock = address, clock
        self.trained: list[int] = []  # by rounds whose mean has this peer's progress, or will

    def peer(self, step_s: float = 0.0, **options: Any) -> Any:
        with pccl.Communicator(self.address) as comm:
            model, ledger, diloco = make(comm, **options)
            while not ledger.finished:
                self.round(model, ledger, diloco, step_s)
            diloco.finish()
            assert ledger.consumed == len(ALL)
            return diloco.state_dict()["theta"], diloco.state_digest()

    def round(self, model: Effects, ledger: Ledger, diloco: DiLoCo, step_s: float) -> None:
        places = train(
            diloco, model, ledger, lambda: self.clock.work(step_s) if self.clock else None
        )
        self.trained += places

    def leaver(self, step_s: float, **options: Any) -> None:
        """It leaves in its second round: what that has trained on is lost."""
        with pytest.raises(Left), pccl.Communicator(self.address) as comm:
            leaving: Any = Deserter(comm, "all_reduce", 2)
            model, ledger, diloco = make(leaving, **options)
            leaving.armed = True
            while True:
                self.round(model, ledger, diloco, step_s)

    def check(self, ends: list[Any]) -> None:
        thetas, digests = zip(*ends, strict=True)
        assert len({*digests}) == 1
        assert (thetas[0] > 0).all(), "each sample has an effect"
        assert Counter(self.trained) == Counter(ALL), "and no more than one"


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_shares_of_different_sizes_weigh_as_many_samples(address: str, wire: str) -> None:
    run = Run(address)
    options = {"weight": "samples", "min_peers": 3, "wire": wire}
    shares = (2, 4, 6)
    ends = together(
        *(lambda n=n: run.peer(share=n, **options) for n in shares),  # type: ignore[misc]
    )
    run.check(ends)


def test_weighted_by_samples_none_is_lost_with_a_peer(address: str) -> None:
    run = Run(address)
    options = {"weight": "samples", "min_peers": 3}
    one, two, _ = together(
        lambda: run.peer(**options), lambda: run.peer(**options), lambda: run.leaver(0.0, **options)
    )
    run.check([one, two])


@pytest.mark.parametrize("weight", ["peers", "samples"])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_samples_left_when_the_time_is_over_are_trained_on_later(
    address: str, clock: Clock, weight: str, mode: str
) -> None:
    run = Run(address, clock)
    options = {"inner_steps": None, "inner_seconds": 4.0, "weight": weight, "mode": mode}
    options |= {"share": 12, "min_peers": 2}
    ends = together(lambda: run.peer(1.0, **options), lambda: run.peer(3.0, **options))
    run.check(ends)


def test_nor_is_any_lost_with_a_peer(address: str, clock: Clock) -> None:
    run = Run(address, clock)
    options = {"inner_steps": None, "inner_seconds": 4.0, "share": 12, "min_peers": 3}
    one, two, _ = together(
        lambda: run.peer(1.0, **options),
        lambda: run.peer(3.0, **options),
        lambda: run.leaver(2.0, **options),
    )
    run.check([one, two])


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_samples_of_a_late_peer_are_consumed_with_the_next_round(
    address: str, clock: Clock, mode: str
) -> None:
    run = Run(address, clock)
    options = {"deadline_peers": 2, "grace": 1.0, "min_peers": 3, "mode": mode}
    ends = together(*(lambda s=s: run.peer(s, **options) for s in (1.0, 1.0, 3.0)))  # type: ignore[misc]
    run.check(ends)
    once(ends[0][0], {2, 3})


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_samples_of_a_late_and_then_lone_peer_are_consumed_once(
    address: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applies its own progress, although its vote said that no mean would have it."""
    run = Run(address)
    with pccl.Communicator(address) as comm:
        model, ledger, diloco = make(comm, deadline_peers=1, mode=mode)
        due = Deadline.due

        def late(pace: Deadline, inner_step: int) -> bool:
            pace.late = due(pace, inner_step)
            return pace.late

        monkeypatch.setattr(Deadline, "due", late)
        while not ledger.finished:
            run.round(model, ledger, diloco, 0.0)
            assert diloco.state_dict()["theta"].sum() == ledger.consumed, (
                "what a resume begins from"
            )
        diloco.finish()
        run.check([(diloco.state_dict()["theta"], diloco.state_digest())])
        assert torch.equal(diloco.state_dict()["theta"], torch.ones(SAMPLES * EPOCHS))


@pytest.mark.parametrize("weight", ["peers", "samples"])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_samples_of_a_peer_left_behind_are_given_to_others(
    address: str, hand: Hand, mode: str, weight: str
) -> None:
    """It stands still in its second round, and joins again without the progress of that, which
    gives it no weight either."""
    options = {"deadline_peers": 2, "grace": 0.05, "min_peers": 3, "mode": mode, "weight": weight}
    free = threading.Event()
    run = Run(address, hand.clock)

    def stands_still() -> Any:
        rejoined, stood = False, False

        def before() -> None:
            nonlocal stood
            hand.clock.work(1.0)
            if diloco.last_round is not None and diloco.inner_step == 1 and not stood:
                stood = True
                hand.pass_until(free, diloco)

        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, **options)
            while not ledger.finished:
                places = train(diloco, model, ledger, before)
                assert diloco.last_round is not None
                if not diloco.last_round.rejoined:
                    run.trained += places
                rejoined = rejoined or diloco.last_round.rejoined
            diloco.finish()
            assert rejoined
            return diloco.state_dict()["theta"], diloco.state_digest()

    def goes_on() -> Any:
        rounds = 0
        with pccl.Communicator(address) as comm:
            model, ledger, diloco = make(comm, **options)
            while not ledger.finished:
                run.round(model, ledger, diloco, 1.0)
                rounds += 1
                if rounds == 3:
                    free.set()
                    while not comm.are_peers_pending():
                        pass
            diloco.finish()
            return diloco.state_dict()["theta"], diloco.state_digest()

    ends = together(goes_on, goes_on, stands_still)
    assert free.wait(PATIENCE_S)
    run.check(ends)
    once(ends[0][0], {2, 3})


def test_a_step_must_tell_its_samples_where_rounds_may_end_early(address: str) -> None:
    with pccl.Communicator(address) as comm:
        model, _, diloco = make(comm, deadline_peers=1, grace=1.0)
        model.learn([0])
        with pytest.raises(ValueError, match=r"diloco.step\(samples=len\(batch\)\)"):
            diloco.step()
