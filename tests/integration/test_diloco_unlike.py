"""DiLoCo of peers that are not alike: by time, by samples, and with deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.small import (  # noqa: E402
    PATIENCE_S,
    Clock,
    Deserter,
    Left,
    Model,
    N,
    Watched,
    come_and_go,
    make,
    random,
    refuse,
    together,
)

import pccl  # noqa: E402
from pccl.diloco.pace import Deadline  # noqa: E402
from pccl.diloco.stats import OuterRound, PeerShare  # noqa: E402

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().installed(monkeypatch)


# ---- weights ----


def weighted_peer(address: str, number: int, rounds: int, **options: Any) -> Callable[[], Any]:
    """Moves by random(10 * number + round), on 3 samples if it is the first, else on 1."""

    def body() -> Any:
        model, thetas = Model(), []
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, weight="samples", min_peers=2, **{**PLAIN, **options})
            for k in range(rounds):
                model.move(random(10 * number + k))
                outer = diloco.step(samples=1 if number else 3)
                if outer and not outer.admitted:
                    assert sorted(share.samples for share in outer.peers) == [1, 3]
                thetas.append(diloco.state_dict()["theta"].numpy())
            return thetas, diloco.state_digest()

    return body


def expected(rounds: int) -> list[Any]:
    """In fp32, to the bit: weights times what is measured, in any order, and one division."""
    theta, thetas = np.zeros(N, np.float32), []
    for k in range(rounds):
        ours, theirs = (theta - (theta - random(10 * n + k).numpy()) for n in (0, 1))
        theta = theta - (np.float32(3) * ours + theirs) / np.float32(4)
        thetas.append(theta)
    return thetas


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_a_mean_is_weighted_by_samples_to_the_bit(address: str, mode: str) -> None:
    ours, theirs = together(*(weighted_peer(address, n, 4, mode=mode) for n in (0, 1)))
    assert ours[1] == theirs[1]
    if mode == "sync":
        for theta, wanted in zip(ours[0], expected(4), strict=True):
            assert theta.tobytes() == wanted.tobytes()
    else:
        np.testing.assert_allclose(ours[0][1], expected(1)[0], rtol=0, atol=1e-6)


def test_weights_apply_to_quantized_fragments(address: str) -> None:
    """The error that quantization makes comes back, so means add up to the true ones."""
    options = {"mode": "streaming", "fragments": 2, "inner_steps": 2, "wire": "int8"}
    ours, theirs = together(*(weighted_peer(address, n, 40, **options) for n in (0, 1)))
    assert ours[1] == theirs[1]
    # Peers begin each round of a fragment from theta, so that all moves but its first are in it.
    moves = [sum(random(10 * n + k).numpy() for k in range(40)) for n in (0, 1)]
    np.testing.assert_allclose(
        ours[0][-1][N // 4 * 3 :], -(3 * moves[0] + moves[1])[N // 4 * 3 :] / 4, rtol=0, atol=0.2
    )


def test_buffers_are_weighted_too(address: str) -> None:
    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            model.register_buffer("scale", torch.zeros(1))
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, weight="samples", min_peers=2)
                model.seen += own
                model.scale += own
                model.move(1.0)
                diloco.step(samples=own)
                return model.seen.tolist(), model.scale.tolist(), diloco.state_digest()

        return run

    ours, theirs = together(body(2), body(5))
    assert ours == theirs and ours[:2] == ([4, 4], [pytest.approx(29 / 7)])


def test_weights_that_cannot_be_counted_are_refused(address: str) -> None:
    def body() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, weight="samples", min_peers=2)
            model.move(1.0)
            with pytest.raises(ValueError, match=r"trained on 8589934592 samples .* larger unit"):
                diloco.step(samples=1 << 32)

    together(body, body)


def test_samples_of_a_lone_peer_count_with_its_progress(address: str) -> None:
    """A peer that could not average has trained on them, and the next mean has them all."""
    alone = threading.Event()

    def veteran() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, weight="samples", **PLAIN)
            for _ in range(2):
                model.move(1.0)
                diloco.step(samples=5)
            alone.set()
            outer, taken = diloco.last_round, 2
            while outer is None or outer.contributors < 2:
                model.move(1.0)
                outer = diloco.step(samples=5)
                taken += 1
            ended.wait(PATIENCE_S)
            return model.flat()[0].item(), taken

    def newcomer() -> Any:
        assert alone.wait(PATIENCE_S)
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, weight="samples", **PLAIN)
            model.move(10.0)
            diloco.step(samples=4)
            ended.wait(PATIENCE_S)
            return model.flat()[0].item()

    ended = threading.Barrier(2)
    (ours, taken), theirs = together(veteran, newcomer)
    assert ours == theirs == pytest.approx(-(taken * 5 * taken + 4 * 10) / (5 * taken + 4))


# ---- time ----


def test_peers_of_different_speed_train_for_the_same_time(address: str, clock: Clock) -> None:
    """And no peer begins a step that would end after the grace."""

    def peer(step_s: float, steps: list[int]) -> Callable[[], Any]:
        def body() -> Any:
            model, seen = Model(), []
            with pccl.Communicator(address) as comm:
                options = {"inner_steps": None, "inner_seconds": 10.0, "grace": 1.0}
                diloco = make(comm, model, min_peers=2, weight="samples", **PLAIN, **options)
                while len(seen) < len(steps):
                    clock.work(step_s)
                    model.move(step_s)
                    outer = diloco.step(samples=2)
                    if outer:
                        seen.append([(s.inner_steps, s.samples) for s in outer.peers])
                        assert diloco.inner_step == 0
                        assert all(s.utilisation == 1 for s in outer.peers)
            assert all((n, 2 * n) in shares for n, shares in zip(steps, seen, strict=True))
            return model.flat()[0].item(), diloco.state_digest()

        return body

    fast, slow = together(peer(1.0, [10, 10]), peer(4.0, [2, 2]))
    assert fast == slow
    assert fast[0] == pytest.approx(-2 * (10 * 10 + 2 * 8) / 12)


def test_fragments_are_due_after_a_part_of_the_time(address: str, clock: Clock) -> None:
    def peer(step_s: float, steps: int) -> Callable[[], Any]:
        def body() -> Any:
            model, taken = Model(), []
            with pccl.Communicator(address) as comm:
                options = {"inner_steps": None, "inner_seconds": 8.0, "mode": "streaming"}
                diloco = make(comm, model, min_peers=2, fragments=2, overlap=1, **PLAIN, **options)
                while len(taken) < 4:
                    clock.work(step_s)
                    model.move(1.0)
                    outer = diloco.step()
                    taken += [share.inner_steps for share in outer.peers] if outer else []
                diloco.finish()
                assert sorted(taken) == [2, 2, 4, 4] and steps in taken
                return model.flat().tolist(), diloco.state_digest()

        return body

    fast, slow = together(peer(1.0, 4), peer(2.0, 2))
    assert fast == slow
    assert (fast[0][0], fast[0][-1]) == (-(4 + 2) / 2, -(8 + 4) / 2)


def test_a_step_longer_than_the_time_is_told(
    address: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, inner_steps=None, inner_seconds=2.0, alone="step")
        clock.work(3.0)
        model.move(1.0)
        assert diloco.step() is not None
    assert "one inner step of this peer took 3.00 s" in caplog.text


# ---- deadlines ----


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_late_peer_is_in_the_next_round(
    address: str, clock: Clock, wire: str, decay: float
) -> None:
    """Two of three do six steps in 6 s; the third takes 18 s, and has 7 s from the second round."""

    def peer(step_s: float, late: list[bool]) -> Callable[[], Any]:
        def body() -> Any:
            model, contributors, models = Model(), [], []
            with pccl.Communicator(address) as comm:
                options = {"inner_steps": 6, "deadline_peers": 2, "grace": 1.0, "wire": wire}
                diloco = make(comm, model, min_peers=3, late_decay=decay, **PLAIN, **options)
                while len(models) < 4:
                    clock.work(step_s)
                    model.move(1.0)
                    outer = diloco.step()
                    if outer:
                        contributors.append(outer.contributors)
                        models.append(model.flat()[0].item())
                        assert sum(share.late for share in outer.peers) == late[len(models) - 1]
                return contributors, models, diloco.state_digest(), diloco.state_dict()

        return body

    times = [False, True, False, True]
    one, two, slow = together(peer(1.0, times), peer(1.0, times), peer(3.0, times))
    assert one[0] == two[0] == slow[0] == [3, 2, 3, 2] and one[2] == two[2] == slow[2]
    third = (6 + 6 + 2 * decay + 2) / 3
    tolerance = {"abs": 1e-5 if wire == "fp32" else 0.1}
    assert one[1] == pytest.approx([-6, -12, -12 - third, -18 - third], **tolerance)
    kept = [0, 2 * decay, 0, 2 * decay]
    assert slow[1] == pytest.approx([w - k for w, k in zip(one[1], kept, strict=True)], **tolerance)


@pytest.mark.parametrize("mode", ["sync", "delayed", "streaming"])
def test_a_mean_without_samples_is_no_step_and_no_peer_waits(address: str, mode: str) -> None:
    """Without samples: the progress is in the next round."""

    def body() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            options = {"weight": "samples", "alone": "wait", "min_peers": 2, "mode": mode}
            diloco = make(comm, model, **PLAIN, **options)
            seen = []
            for samples in (0, 3, 1):
                model.move(1.0)
                outer = diloco.step(samples=samples)
                assert outer is not None
                seen.append((outer.contributors, outer.outer_step))
            diloco.finish()
            return seen, model.flat()[0].item(), diloco.state_digest()

    ours, theirs = together(body, body)
    assert ours == theirs and ours[1] == -3
    late = mode == "delayed"
    assert ours[0] == ([(0, 0), (0, 0), (2, 1)] if late else [(0, 0), (2, 1), (2, 2)])


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_no_mean_is_of_fewer_than_were_wanted_because_others_are_late(
    address: str, clock: Clock, mode: str
) -> None:
    """Two of three think that they are late in the second round, as on a busy machine."""

    def peer(slow: bool) -> Callable[[], Any]:
        def body() -> Any:
            model, contributors = Model(), []
            with pccl.Communicator(address) as comm:
                options = {"inner_steps": 6, "deadline_peers": 2, "grace": 1.0, "mode": mode}
                diloco = make(comm, model, min_peers=3, **PLAIN, **options)
                while len(contributors) < 5:
                    clock.work(3.0 if slow and len(contributors) == 1 else 1.0)
                    model.move(1.0)
                    outer = diloco.step()
                    if outer:
                        contributors.append(outer.contributors)
                diloco.finish()
                return contributors, diloco.state_digest(), model.flat()[0].item()

        return body

    ends = together(peer(False), peer(True), peer(True))
    wanted = {"sync": [3, 3, 3, 3, 3], "delayed": [0, 3, 0, 3, 3]}
    assert [end[0] for end in ends] == [wanted[mode]] * 3
    assert len({end[1] for end in ends}) == 1


def test_a_slow_peer_contributes_its_steps_to_each_fragment(address: str, clock: Clock) -> None:
    """Two of three take 6 steps in 6 s, and so 3 for each of two fragments; the third takes 2."""

    def peer(step_s: float) -> Callable[[], Any]:
        def body() -> Any:
            model, seen = Model(), []
            with pccl.Communicator(address) as comm:
                options = {"mode": "streaming", "fragments": 2, "inner_steps": 6}
                options |= {"deadline_peers": 2, "grace": 1.0, "min_peers": 3}
                diloco = make(comm, model, **PLAIN, **options)
                while len(seen) < 6:
                    clock.work(step_s)
                    model.move(1.0)
                    outer = diloco.step()
                    if outer:
                        assert not any(share.late for share in outer.peers)
                        steps = sorted(share.inner_steps for share in outer.peers)
                        seen.append((outer.contributors, outer.fragment, steps))
                return seen, model.flat().tolist(), diloco.state_digest()

        return body

    ends = together(peer(1.0), peer(1.0), peer(2.0))
    assert len({digest for *_, digest in ends}) == 1
    first, later = [3, 3, 3], [2, 3, 3]  # there is no forecast before the first meeting
    wanted = [(3, i % 2, later if i else first) for i in range(6)]
    assert all(seen == wanted for seen, *_ in ends)
    of_all = [-(3 + 4 * 8 / 3), -(3 + 5 * 8 / 3)]  # the first is without the last round
    for _, flat, _ in ends:
        assert flat[-1] == pytest.approx(of_all[1])
    assert sorted({flat[0] for _, flat, _ in ends}) == pytest.approx([of_all[0] - 3, of_all[0] - 2])


def test_a_lone_peer_is_never_late(address: str, clock: Clock) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        options = {"inner_steps": 2, "deadline_peers": 1, "grace": 0.0, "alone": "step"}
        diloco = make(comm, model, **PLAIN, **options)
        seen = []
        for step_s in (1.0, 1.0, 1.5, 1.0):  # by which the third ends the second round
            clock.work(step_s)
            model.move(1.0)
            outer = diloco.step()
            seen.append((outer.outer_step if outer else None, model.flat()[0].item()))
        assert seen == [(None, -1), (1, -2), (2, -3), (None, -4)]


def test_a_negative_number_of_samples_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm:
        diloco = make(comm, Model(), weight="samples")
        with pytest.raises(ValueError, match="samples=-1 must be at least 0"):
            diloco.step(samples=-1)


def test_peers_that_learn_of_a_loss_at_different_times_gather_shares_together(
    address: str,
) -> None:
    """One is in it when a peer is lost; the other enters it only then."""
    entered = threading.Event()

    def survivor(waits: bool) -> Callable[[], Any]:
        def body() -> Any:
            model = Model()
            with pccl.Communicator(address) as comm:

                def gather(*args: Any, **kwargs: Any) -> Any:
                    if waits and not left:
                        left.append(True)
                        wait_until(lambda: comm.world_size == 2)
                    entered.set()
                    return comm.all_gather(*args, **kwargs)

                left: list[bool] = []
                watched: Any = Watched(comm)
                watched.all_gather = gather
                diloco = make(watched, model, weight="samples", min_peers=3)
                sizes = []
                for _ in range(2):
                    model.move(1.0)
                    outer = diloco.step()
                    assert outer is not None
                    sizes.append(len(outer.peers))
                return sizes, diloco.state_digest()

        return body

    def leaver() -> None:
        def leave(*_: Any, **__: Any) -> Any:
            assert entered.wait(PATIENCE_S)
            raise Left

        model = Model()
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            watched: Any = Watched(comm)
            watched.all_gather = leave
            diloco = make(watched, model, weight="samples", min_peers=3)
            model.move(1.0)
            diloco.step()

    ours, theirs, _ = together(survivor(True), survivor(False), leaver)
    assert ours == theirs and ours[0] == [2, 2]


def test_a_grace_that_is_not_given_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("pccl.diloco.pace.time", clock)
    pace = Deadline(2, None, fragments=1)

    def steps_until_due(step_s: float) -> int:
        pace.late = False  # as if each round were the first
        pace.begin(10)
        for step in range(1, 11):
            clock.work(step_s)
            if pace.due(step):
                return step
        raise AssertionError

    assert steps_until_due(9.0) == 10, "no deadline in the first round"
    pace.set_speeds([(10.0, 10), (20.0, 10), (90.0, 10)])
    assert steps_until_due(2.125) == 10 and not pace.late  # within a tenth, which is a step
    assert steps_until_due(2.25) == 9 and pace.late
    pace.set_speeds([(10.0, 10), (24.0, 10), (9.0, 1)])
    assert steps_until_due(2.75) == 10  # the second has varied by 4 s
    assert steps_until_due(2.875) == 9


def test_a_peer_may_be_lost_in_a_deadline_round_and_another_join(
    address: str, clock: Clock
) -> None:
    options = {"inner_steps": 4, "deadline_peers": 2, "min_peers": 3, "wire": "int4"}

    def train(number: int, ready: threading.Event) -> Any:
        model, seen = Model(), {}
        with pccl.Communicator(address) as comm:
            leaving: Any = Deserter(comm, "all_gather", 2)
            diloco = make(leaving, model, **options)
            leaving.armed = number == 2
            last = diloco.outer_step + 4 if number == 3 else None
            while last is None or diloco.outer_step < last:
                clock.work(1.0 if number < 2 else 3.0)
                model.move(random(100 * number + diloco.outer_step))
                outer = diloco.step()
                if outer is None:
                    continue
                seen[diloco.outer_step] = diloco.state_digest()
                ready.set()
                if outer.admitted:
                    last = diloco.outer_step + 4
        return seen

    ours, theirs, new = come_and_go(train)
    assert ours == theirs and new.items() <= ours.items() and len(new) >= 3


# ---- what is refused ----


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("inner_steps or inner_seconds", {"inner_seconds": 1.0}),
        ("inner_steps or inner_seconds", {"inner_steps": None}),
        ("inner_seconds", {"inner_steps": None, "inner_seconds": 0.0}),
        ("grace", {"grace": 1.0}),
        ("grace", {"grace": -1.0, "deadline_peers": 2}),
        ("grace", {"grace": float("inf"), "deadline_peers": 2}),
        ("grace", {"grace": float("nan"), "deadline_peers": 2}),
        ("late_decay", {"late_decay": 0.5}),
        ("late_decay", {"late_decay": 1.5, "deadline_peers": 2}),
        ("deadline_peers", {"deadline_peers": 0}),
        ("needs a grace", {"deadline_peers": 2, "inner_steps": None, "inner_seconds": 1.0}),
        ("weight", {"weight": "tokens"}),
    ],
)
def test_settings_out_of_range_are_refused(why: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=why):
        make(None, Model(), **options)  # type: ignore[arg-type]


def test_peers_with_other_weights_are_refused_by_name(address: str) -> None:
    why = r"weight is 'peers' in the run and 'samples' here$"
    refuse(address, why, {}, {"weight": "samples"})


def test_a_round_as_a_dict_of_floats() -> None:
    peers = (PeerShare(8, 64, 1.0, 0.9, False), PeerShare(4, 32, 1.0, 0.5, True))
    one = OuterRound(
        7, 2, 1, True, False, 0, 2.0, 0.5, 0.0, 0.25, 0.75, 10, 20, "gather", ("a",), peers
    )
    flat = one.flat("run/")
    assert all(type(value) is float for value in flat.values())
    assert (flat["run/outer_step"], flat["run/reduce_s"], flat["run/admitted"]) == (7, 0.5, 1)
    assert flat["run/excluded"] == 1
    assert (flat["run/gathered"], flat["run/utilisation"], flat["run/late"]) == (1, 0.5, 1)
    assert len(flat) == len(OuterRound.__slots__) + 1
