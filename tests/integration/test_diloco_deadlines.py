"""A round of DiLoCo with a deadline does not wait for a peer that stands still in a step.

The progress of that peer is in the next round that it takes part in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training.small import (  # noqa: E402
    PATIENCE_S,
    Cut,
    Hand,
    Model,
    N,
    Places,
    Watched,
    make,
    random,
    together,
)

import pccl  # noqa: E402
from pccl.diloco.averaging import CODECS  # noqa: E402

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
GRACE = {"deadline_peers": 2, "grace": 0.05}
MOVES = (1.0, 2.0, 3.0)  # of each peer, in each of two steps; the last one stands still
BOTH, ALL = (2 + 4) / 2, (2 + 4 + 6) / 3  # means of a round without that one, and with it


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class StoppedPeerRun:
    """Three peers; one stands still in its second round until two rounds have ended without it."""

    def __init__(self, address: str, hand: Hand, pattern: Any = 1.0, **options: Any) -> None:
        self.address, self.hand = address, hand
        self.options: dict[str, Any] = {"inner_steps": 2, "min_peers": 3, **PLAIN, **GRACE}
        self.options |= options
        self.free, self.ended = threading.Event(), threading.Barrier(3)
        self.pattern = torch.as_tensor(pattern)
        self.moved = [torch.zeros(N) for _ in range(3)]
        self.kept = [torch.zeros(N) for _ in range(3)]  # what each has not sent
        self.applied, self.theta = torch.zeros(N), torch.zeros(N)

    def move(self, number: int) -> Any:
        """By what a peer moves in a step."""
        return MOVES[number] * self.pattern

    def play(self) -> list[Any]:
        """For each peer: report, theta, w and digest of each round, and w at the end."""
        return together(*(lambda i=i: self._peer(i) for i in range(3)))  # type: ignore[misc]

    def _peer(self, number: int) -> Any:
        model, seen = Model(), []
        with pccl.Communicator(self.address) as comm:
            diloco = make(comm, model, **self.options)
            wanted = 2  # rounds with a mean of all, after that peer is back
            while wanted:
                outer = None
                while outer is None:
                    if number == 2 and len(seen) == 1 and diloco.inner_step == 1:
                        self.hand.pass_until(self.free, diloco)
                    self.hand.clock.work(1.0)
                    model.move(self.move(number))
                    self.moved[number] += self.move(number)
                    outer = diloco.step()
                whole = diloco.state_dict()["theta"]
                if number == 0:
                    self.applied += outer.contributors * (self.theta - whole)
                    self.theta = whole
                theta = whole[0].item()
                seen.append((outer, theta, model.flat()[0].item(), diloco.state_digest()))
                if number != 2 and len(seen) == 3:
                    self.free.set()
                    while not comm.are_peers_pending():
                        pass
                back = outer.outer_step >= (3 if self.options.get("mode", "sync") == "sync" else 4)
                wanted -= back and outer.contributors == 3
            self.ended.wait(PATIENCE_S)
            diloco.finish()
            state = diloco.state_dict()
            if number == 0:
                self.applied += 3 * (self.theta - state["theta"])
            self.kept[number] = state["averager"].get("residual", torch.zeros(N))
            return seen, model.flat()[0].item(), diloco.state_digest()


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_round_ends_without_a_stopped_peer_whose_progress_is_in_the_next(
    address: str, hand: Hand, wire: str, decay: float
) -> None:
    one, two, late = StoppedPeerRun(address, hand, wire=wire, late_decay=decay).play()
    near = {"rel": 1e-6} if wire == "fp32" else {"rel": 0.02}
    kept = 6 * decay
    moves = [ALL, BOTH, BOTH, BOTH, ALL + kept / 3, ALL]
    thetas = [-sum(moves[: k + 1]) for k in range(6)]
    for seen, *_ in (one, two):
        assert [outer.contributors for outer, *_ in seen] == [3, 2, 2, 2, 3, 3]
        assert [outer.admitted for outer, *_ in seen] == [False, False, False, True, False, False]
        assert [theta for _, theta, *_ in seen] == pytest.approx(thetas, **near)
    assert [outer.rejoined for outer, *_ in late[0]] == [False, True, False, False]
    assert late[0][1][0].contributors == 0
    assert late[0][1][2] == pytest.approx(thetas[3] - kept, **near), "beside theta"
    assert [digest for *_, digest in late[0]] == [one[0][k][3] for k in (0, 3, 4, 5)]
    assert one[2] == two[2] == late[2]


def test_a_delayed_round_ends_without_a_stopped_peer(address: str, hand: Hand) -> None:
    one, two, late = StoppedPeerRun(address, hand, mode="delayed").play()
    moves = [0, ALL, BOTH, BOTH, BOTH, ALL + 6 / 3, ALL, ALL]
    thetas = [-sum(moves[: k + 1]) for k in range(8)]
    for seen, *_ in (one, two):
        assert [outer.contributors for outer, *_ in seen] == [0, 3, 2, 2, 2, 3, 3]
        assert [theta for _, theta, *_ in seen] == pytest.approx(thetas[:7])
    assert [outer.rejoined for outer, *_ in late[0]] == [False, True, False, False, False]
    assert late[0][1][2] == pytest.approx(thetas[3] - 6), "beside theta"
    assert [outer.contributors for outer, *_ in late[0]] == [0, 0, 2, 3, 3]
    assert one[1] == two[1] == late[1] == pytest.approx(thetas[7])
    assert one[2] == two[2] == late[2]


@pytest.mark.parametrize("wire", ["fp32", *CODECS])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_no_progress_is_lost_or_counted_twice(
    address: str, hand: Hand, mode: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The applied means, and the progress not sent yet, are together all that was trained."""
    if wire != "fp32":
        monkeypatch.setitem(CODECS, wire, replace(CODECS[wire], decay=1.0))  # else it forgets
    scene = StoppedPeerRun(address, hand, random(0), mode=mode, wire=wire)
    one, two, late = scene.play()
    assert one[2] == two[2] == late[2]
    assert any(outer.rejoined for outer, *_ in late[0])
    trained, kept = sum(scene.moved), sum(scene.kept)
    assert torch.allclose(scene.applied + kept, trained, rtol=0, atol=1e-5 * trained.abs().max())
    assert kept.abs().max() > 0 or wire == "fp32"


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_a_peer_stopped_until_the_others_finish_does_not_train_alone(
    address: str, hand: Hand, mode: str
) -> None:
    finished = threading.Event()

    def peer(number: int) -> None:
        model, rounds = Model(), 0
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, inner_steps=2, min_peers=3, mode=mode, **GRACE)
            while rounds < 3:
                hand.clock.work(1.0)
                model.move(1.0)
                if number == 2 and rounds == 1 and diloco.inner_step == 1:
                    hand.pass_until(finished, diloco)
                rounds += diloco.step() is not None
            diloco.finish()
            comm.finish()
            finished.set()

    def still() -> None:
        with pytest.raises(pccl.RunFinishedError):
            peer(2)

    together(lambda: peer(0), lambda: peer(1), still)


# ---- where else a peer may be dropped ----


@pytest.mark.parametrize(
    ("name", "of_second_round"),
    [("all_reduce", BOTH), ("sync_shared_state", ALL), ("all_gather", ALL)],
)
def test_progress_that_others_may_have_is_in_no_other_round(
    address: str, hand: Hand, name: str, of_second_round: float
) -> None:
    """It is in the mean if its peer was in the collective that has made that; else it is lost."""
    ended = threading.Barrier(3)

    def peer(number: int) -> Any:
        model, seen = Model(), []
        with pccl.Communicator(address) as comm:
            cut: Any = Cut(comm, name, 2)
            diloco = make(cut, model, inner_steps=2, min_peers=3, **PLAIN, **GRACE)
            cut.armed = number == 2
            while not (len(seen) > 2 and seen[-1][0].contributors == 3):
                hand.clock.work(1.0)
                model.move(MOVES[number])
                outer = diloco.step()
                if outer:
                    seen.append((outer, -model.flat()[0].item(), diloco.state_digest()))
            ended.wait(PATIENCE_S)
        return seen

    one, two, dropped = together(*(lambda i=i: peer(i) for i in range(3)))  # type: ignore[misc]
    assert dropped[1][0].rejoined, "in its second round"
    alone = sum(outer.contributors == 2 for outer, *_ in one)
    assert alone == sum(outer.contributors == 2 for outer, *_ in two)
    first = ALL + of_second_round + (alone - (of_second_round == BOTH)) * BOTH
    assert dropped[1][1] == pytest.approx(first), "nothing is beside theta"
    for seen in (one, two, dropped):
        assert seen[-1][1] == pytest.approx(first + ALL) and seen[-1][2] == one[-1][2]


ROUNDS: dict[str, dict[str, Any]] = {
    "sync": {"inner_steps": 2},
    "delayed": {"inner_steps": 2, "mode": "delayed"},
    "streaming": {"inner_steps": 4, "mode": "streaming", "fragments": 2, "overlap": 1},
}
STEPS = 100  # of a peer, at most
SHARES = torch.tensor([0.5, 1 / 3])  # of a step in a mean of two, or of three


@pytest.mark.parametrize(
    ("mode", "name", "nth", "how", "gone", "kept"),
    [
        ("sync", "all_reduce", 2, "", {2, 3}, set()),
        ("sync", "all_reduce", 2, "late", set(), {2}),
        ("sync", "sync_shared_state", 2, "", set(), set()),
        ("delayed", "all_reduce_async", 2, "", {2, 3}, set()),
        ("delayed", "all_gather", 3, "", {4, 5}, set()),
        ("delayed", "all_gather", 3, "failed", set(), {4, 5}),
        ("streaming", "all_reduce_async", 2, "", {1, 3}, {2}),
        ("streaming", "sync_shared_state", 2, "", set(), {2, 4, 5}),
        ("streaming", "all_gather", 3, "", {2, 4}, {5}),
        ("streaming", "all_gather", 3, "failed", set(), {2, 4, 5}),
    ],
)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_dropped_peer_keeps_exactly_what_no_other_can_have(
    address: str,
    hand: Hand,
    mode: str,
    name: str,
    nth: int,
    how: str,
    gone: set[int],
    kept: set[int],
    decay: float,
) -> None:
    """Each step of each peer is in one mean. Those of the dropped one since its last mean may be in
    none if it has begun to give them away (`gone`); else it has them beside theta (`kept`): if it
    was "late", so that its weight was 0, or its collective has "failed" on all."""
    ended = threading.Barrier(3)

    def peer(number: int) -> Any:
        model, taken, seen, back = Places(3, STEPS), 0, [], 0
        with pccl.Communicator(address) as comm:
            cut: Any = Cut(comm, name, nth, fails=how == "failed")
            options = {**PLAIN, **GRACE, **ROUNDS[mode], "late_decay": decay}
            diloco = make(cut, model, min_peers=3, **options)  # type: ignore[arg-type]
            cut.armed = number == 2
            beside, since = None, 0
            while back < 2:  # rounds of all since it is back
                slow = how == "late" and number == 2 and taken == 2
                hand.clock.work(10.0 if slow else 1.0)
                model.move(number, taken)
                taken += 1
                outer = diloco.step()
                if outer is None:
                    continue
                if seen and seen[-1].rejoined and mode != "streaming":
                    assert taken == since + 2, "its next round is a whole one"
                again = any(one.rejoined or one.admitted for one in seen)
                back += again and outer.contributors == 3
                seen.append(outer)
                if outer.rejoined:
                    since = taken
                    beside = model.steps(model.flat())[2]
                elif outer.contributors == 2 and not again and not outer.admitted:
                    while not comm.are_peers_pending():
                        pass
            ended.wait(PATIENCE_S)
            diloco.finish()
            theta = diloco.state_dict()["theta"]
            assert torch.equal(model.flat(), theta)
            return taken, model.steps(-theta), beside, diloco.state_digest()

    *others, (last, shares, beside, digest) = together(*(lambda i=i: peer(i) for i in range(3)))  # type: ignore[misc]
    assert [other[-1] for other in others] == [digest] * 2
    if name != "all_gather":  # others cannot have them, for it was not in their collective
        assert not shares[2, sorted(gone)].any()
    here = {step for step in range(STEPS) if beside[step] < -0.4}
    assert here == kept
    assert beside[sorted(kept)].tolist() == pytest.approx([-decay] * len(kept))
    for number, (taken, *_) in enumerate((*others, (last,))):
        whole = taken - 3 if mode == "streaming" else taken  # the last steps end with their peer
        for step in range(whole):
            share = float(shares[number, step])
            if number == 2 and step in gone:  # in none, or in one that had completed
                assert share == 0 or share == pytest.approx(1 / 3)
            else:
                share /= decay if number == 2 and step in kept else 1.0
                assert (SHARES - share).abs().min() < 1e-5, (number, step, share)


def test_a_peer_that_has_received_a_part_of_the_state_saves_none(address: str) -> None:
    """Its files would mix theta of two rounds."""

    class Partial(Cut):
        def sync_shared_state(self, state: pccl.SharedState, **_: Any) -> Any:
            if not self.armed:
                return self._comm.sync_shared_state(state)
            state._tear([2])
            self._comm.close()
            raise pccl.KickedError(pccl.Result.RANK_CONNECTION_FAILED, "sync", "of the test")

    with pccl.Communicator(address) as comm:
        partial: Any = Partial(comm, "all_reduce", 1)
        model = Model()
        diloco = make(partial, model, **GRACE)
        diloco.state_dict()
        partial.armed = True
        model.move(1.0)
        with pytest.raises(pccl.KickedError):
            diloco.step()
        with pytest.raises(ValueError, match="only a part of the shared state"):
            diloco.state_dict()


def test_a_peer_dropped_again_and_again_gets_the_error(address: str) -> None:
    tries = []

    def refused() -> None:
        tries.append(1)
        raise pccl.KickedError(pccl.Result.RANK_CONNECTION_FAILED, "connect", "unreachable")

    with pccl.Communicator(address) as comm:
        watched: Any = Watched(comm, connect=refused)
        cut: Any = Cut(watched, "are_peers_pending", 1)
        diloco = make(cut, Model(), alone="step", deadline_peers=1)
        cut.armed = True
        with pytest.raises(pccl.KickedError, match="unreachable"):
            diloco.step()
        assert len(tries) == 3


@pytest.mark.parametrize("options", [{}, {"mode": "delayed"}])
def test_without_deadlines_a_dropped_peer_gets_the_error_at_once(
    address: str, options: dict[str, Any]
) -> None:
    with pccl.Communicator(address) as comm:
        cut: Any = Cut(comm, "are_peers_pending", 1)
        diloco = make(cut, Model(), alone="step", **options)
        cut.armed = True
        with pytest.raises(pccl.KickedError, match="as the test has it"):
            diloco.step()


def test_a_peer_that_returns_after_the_end_begins_another_run(address: str) -> None:
    """Else its theta would be that of a run in which others have taken other steps."""
    model = Model()
    with pccl.Communicator(address) as comm:
        cut: Any = Cut(comm, "all_reduce", 1)
        diloco = make(cut, model, alone="step", deadline_peers=1, **PLAIN)
        of_before = diloco.state_dict()["clock"][-1].item()
        cut.armed = True
        seen = []
        for _ in range(2):
            model.move(1.0)
            outer = diloco.step()
            assert outer is not None
            seen.append((outer.rejoined, outer.outer_step, model.flat()[0].item()))
            cut.armed = False
        assert seen == [(True, 0, 0.0), (False, 1, -1.0)], "who was in a collective may not keep it"
        assert diloco.state_dict()["clock"][-1].item() != of_before
