"""The ledger: through random losses and joins, each sample has its effect exactly once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pccl.data import Ledger, LedgerSampler
from pccl.data.rows import NOBODY, Content, Row, Want, claimed, departed, settled


class Gathered:
    """A communicator that has gathered what others want."""

    rank = 0

    def __init__(self, *others: Want) -> None:
        self.others = others

    def all_gather(self, own: Any) -> Any:
        return np.array([own, *self.others], np.int64)


class Asked(Exception):
    """A communicator has been told what a peer wants."""


class Gathering:
    """A communicator of a group, which is asked peer by peer; then it has gathered."""

    rank = 0

    def __init__(self) -> None:
        self.wants: list[Any] = []
        self.over = False

    def all_gather(self, own: Any) -> Any:
        if self.over:
            assert tuple(own) in map(tuple, self.wants)
            return np.array(self.wants)
        self.wants.append(own)
        raise Asked


class Peer:
    """A peer that adds 1 to the effect of each sample that it trains on.

    Attributes:
        kept: the progress of rounds for which it was late.
    """

    def __init__(self, samples: int, epochs: int, share: int) -> None:
        self.ledger = Ledger(samples, share=share, epochs=epochs, peers_max=6)
        self.progress = np.zeros(samples * epochs, np.int64)

    def train(self, count: int | None = None) -> None:
        """Trains on the first samples of its share; None: on all."""
        places = [place for part in self.ledger.share for place in part][:count]
        self.progress[places] += 1
        if count is not None:
            self.ledger.train(len(places))


class Group:
    """Peers, and the effect that they share: what collectives that commit have brought."""

    def __init__(self, seed: int, *, delayed: bool, counted: bool = False) -> None:
        self.random = random.Random(seed)
        self.delayed, self.counted = delayed, counted
        self.samples, self.epochs = self.random.randint(1, 90), self.random.randint(1, 3)
        self.effect = np.zeros(self.samples * self.epochs, np.int64)
        self.peers: list[Peer] = [self.new() for _ in range(self.random.randint(1, 5))]
        self.returning: list[Peer] = []  # that have left to come back
        self.under_way: tuple[Any, Any] | None = None
        self.claim()

    def new(self) -> Peer:
        return Peer(self.samples, self.epochs, self.random.randint(1, 12))

    def lose(self) -> None:
        while len(self.peers) > 1 and self.random.random() < 0.2:
            self.peers.remove(self.random.choice(self.peers))

    def agree(self) -> None:
        assert len({peer.ledger.dump().tobytes() for peer in self.peers}) == 1

    def claim(self) -> None:
        self.agree()
        comm: Any = Gathering()
        for peer in self.random.sample(self.peers, len(self.peers)):
            with pytest.raises(Asked):
                peer.ledger.claim(comm)
        comm.over = True
        for peer in self.peers:
            peer.ledger.claim(comm)
            assert sum(map(len, peer.ledger.share)) <= peer.ledger.wanted
        self.agree()

    def launch(self) -> None:
        """Averages the progress of living peers; some may be lost before it arrives."""
        late = [self.counted and self.random.random() < 0.2 for _ in self.peers]
        votes = [
            peer.ledger.vote(counted=self.counted, late=is_late)
            for peer, is_late in zip(self.peers, late, strict=True)
        ]
        progress = [
            0 * peer.progress if is_late else peer.progress
            for peer, is_late in zip(self.peers, late, strict=True)
        ]
        for peer, own in zip(self.peers, progress, strict=True):
            peer.progress = peer.progress - own
        alive = [i for i in range(len(votes)) if self.random.random() > 0.1]
        mean = np.sum([votes[i] for i in alive], axis=0)
        if not self.counted:
            mean = (mean // max(1, len(alive))).astype(np.uint8)
        self.under_way = (mean, np.sum([progress[i] for i in alive], axis=0))
        gone = [peer for i, peer in enumerate(self.peers) if i not in alive]
        if not alive or self.random.random() < 0.1:  # it has failed for all
            self.under_way = None
            for i, peer in enumerate(self.peers):
                peer.progress += progress[i]
        if len(gone) < len(self.peers):
            self.peers = [peer for peer in self.peers if peer not in gone]

    def land(self) -> None:
        votes, progress = self.under_way or (None, 0)
        self.under_way = None
        for peer in self.peers:
            peer.ledger.settle(votes)
        self.effect += progress

    def admit(self) -> None:
        while len(self.peers) < 6 and (self.returning or self.random.random() < 0.3):
            newcomer = self.returning.pop() if self.returning else self.new()
            newcomer.ledger.restore(self.peers[0].ledger.dump())
            self.peers.append(newcomer)

    def leave_behind(self) -> None:
        """A peer joins once more, without its progress."""
        if len(self.peers) > 1 and self.random.random() < 0.1:
            peer = self.peers.pop(self.random.randrange(len(self.peers)))
            peer.progress[:] = 0
            peer.ledger.renew()
            self.returning.append(peer)

    def round(self) -> None:
        for peer in self.peers:
            peer.train(self.random.randint(0, 12) if self.counted else None)
        self.lose()
        if self.counted:
            self.leave_behind()
        if self.delayed:
            self.land()
        self.launch()
        if not self.delayed:
            self.land()
        self.lose()
        self.admit()
        self.claim()

    @property
    def finished(self) -> bool:
        return self.peers[0].ledger.finished


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_each_sample_has_its_effect_once(delayed: bool, counted: bool) -> None:
    """Also if peers train on parts of their shares, are late, and are left behind."""
    for seed in range(60 if counted else 150):
        group = Group(seed, delayed=delayed, counted=counted)
        for _ in range(2000):
            if group.finished:
                break
            group.round()
        assert group.finished, f"seed {seed}"
        assert (group.effect == 1).all(), f"seed {seed}"
        assert group.peers[0].ledger.consumed == len(group.effect)


def test_a_run_continues_with_another_number_of_peers() -> None:
    group = Group(3, delayed=False)
    group.samples, group.epochs = 50, 2
    group.effect = np.zeros(100, np.int64)
    group.peers = [Peer(50, 2, 4) for _ in range(3)]
    group.claim()
    for _ in range(2):
        group.round()
    saved, effect = group.peers[0].ledger.dump(), group.effect.copy()
    group.peers = [Peer(50, 2, 7) for _ in range(5)]
    group.effect, group.under_way = effect, None
    for peer in group.peers:
        peer.ledger.restore(saved)
    group.claim()
    while not group.finished:
        group.round()
    assert (group.effect == 1).all()


# ---- rows ----


def test_claims_of_lost_peers_are_given_out_first() -> None:
    content = Content(20, (Row(0, 5, 7, 0), Row(5, 9, 8, 0), Row(9, 12, 7, 1)))
    after = claimed(content, [Want(8, 3), Want(9, 4)], end=100, rows_max=10)
    rows = (Row(0, 3, 8, 0), Row(3, 5, 9, 0), Row(5, 9, 8, 0), Row(9, 12, 7, 1), Row(20, 22, 9, 0))
    assert after == Content(22, rows)


def test_the_last_samples_are_shared_in_proportion() -> None:
    after = claimed(Content(90, ()), [Want(1, 20), Want(2, 10)], end=99, rows_max=10)
    assert after.rows == (Row(90, 96, 1, 0), Row(96, 99, 2, 0))


def test_rows_are_bounded() -> None:
    scattered = tuple(Row(10 * i, 10 * i + 5, NOBODY, 0) for i in range(4))
    full = claimed(Content(100, scattered), [Want(1, 3), Want(2, 7)], end=200, rows_max=4)
    assert len(full.rows) == 4 and full.fresh == 100
    assert full.rows[0] == Row(0, 5, 2, 0)  # as a whole; the first peer could have had a part only
    room = claimed(Content(100, scattered), [Want(1, 3)], end=200, rows_max=5)
    assert room.rows[:2] == (Row(0, 3, 1, 0), Row(3, 5, NOBODY, 0))


def test_living_peers_keep_unsettled_samples() -> None:
    content = departed(Content(10, (Row(0, 5, 1, 0), Row(5, 10, 2, 0))), living={1, 2})
    assert content.rows == (Row(0, 5, 1, 1), Row(5, 10, 2, 1))
    assert settled(content, {}).rows == (Row(0, 5, 1, 0), Row(5, 10, 2, 0))
    assert settled(content, {2: None}).rows == (Row(0, 5, 1, 0),)


def test_claims_of_lost_peers_are_not_expected() -> None:
    content = departed(Content(10, (Row(0, 5, 1, 0), Row(5, 10, 2, 0))), living={2})
    assert content.rows == (Row(0, 5, 1, 0), Row(5, 10, 2, 1))


def test_trained_samples_are_consumed_and_the_rest_stays() -> None:
    content = departed(Content(20, (Row(0, 5, 1, 0), Row(5, 9, 2, 0), Row(9, 20, 1, 0))), {1, 2})
    assert settled(content, {1: 7}).rows == (Row(5, 9, 2, 0), Row(11, 20, 1, 0))
    assert settled(content, {1: 5, 2: 3}).rows == (Row(8, 9, 2, 0), Row(9, 20, 1, 0))


def test_a_peer_with_samples_left_gets_only_later_ones() -> None:
    content = Content(20, (Row(0, 5, NOBODY, 0), Row(10, 12, 1, 0)))
    after = claimed(content, [Want(1, 3, first=12), Want(2, 2)], end=21, rows_max=10)
    rows = (Row(0, 2, 2, 0), Row(2, 5, NOBODY, 0), Row(10, 12, 1, 0), Row(20, 21, 1, 0))
    assert after == Content(21, rows)


def test_a_peer_cannot_train_on_more_than_its_share() -> None:
    ledger = Ledger(10, share=4)
    ledger.claim(Gathered())  # type: ignore[arg-type]
    ledger.train(3)
    with pytest.raises(ValueError, match="samples=2 must be in 0 to 1, what is left"):
        ledger.train(2)


# ---- what scripts see ----


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"share": 0}, {"epochs": 0}, {"peers_max": 256}, {"peers_max": 0}]
)
def test_arguments_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Ledger(**{"samples": 10, "share": 2, **options})  # type: ignore[arg-type]


def test_another_data_set_is_refused() -> None:
    ledger, other = Ledger(10, share=2), Ledger(10, share=2, epochs=None)
    ledger.restore(other.dump())
    with pytest.raises(ValueError, match="10 samples in 1 epochs, and the run's of 10 samples in"):
        ledger.claim(Gathered())  # type: ignore[arg-type]


def test_more_peers_than_the_ledger_is_made_for_are_refused() -> None:
    ledger = Ledger(10, share=2, peers_max=1)
    with pytest.raises(ValueError, match="2 peers: the ledger is made for up to 1"):
        ledger.claim(Gathered(Want(5, 2)))  # type: ignore[arg-type]


def test_an_endless_run_has_an_order_for_each_epoch() -> None:
    ledger = Ledger(10, share=10, epochs=None)
    sampler = LedgerSampler(ledger, seed=4)
    passes = []
    for _ in range(3):
        ledger.claim(Gathered())  # type: ignore[arg-type]
        assert len(sampler) == 10
        passes.append(list(sampler))
        ledger.settle(ledger.vote())
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert not ledger.finished and ledger.consumed == 30
    assert list(LedgerSampler(ledger, shuffle=False)) == list(range(10))
