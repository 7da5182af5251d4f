"""DiLoCo with mode="delayed": what runs in the background, who is lost or joins meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from training.small import (  # noqa: E402
    PATIENCE_S,
    Deserter,
    Left,
    Lost,
    Model,
    Watched,
    desert,
    make,
    random,
    together,
)

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


# ---- the background ----


def test_a_round_ends_before_its_mean_is_there(address: str) -> None:
    ended = threading.Event()

    def ahead() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(
                comm, model, mode="delayed", min_peers=2, outer_lr=0.7, outer_momentum=0.0
            )
            model.move(1.0)
            assert diloco.step() is not None
            assert torch.equal(model.flat(), torch.full((1000,), -0.75))  # it begins the next round
            ended.set()
            model.move(1.0)
            outer = diloco.step()
            assert outer is not None and outer.contributors == 2
            assert outer.tx_bytes > 0
            diloco.finish()
            torch.testing.assert_close(model.flat(), torch.full((1000,), -1.4))

    def behind() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            watched: Any = Watched(comm, all_reduce_async=lambda: ended.wait(PATIENCE_S))
            diloco = make(
                watched, model, mode="delayed", min_peers=2, outer_lr=0.7, outer_momentum=0.0
            )
            for _ in range(2):
                model.move(1.0)
                diloco.step()
            diloco.finish()
            diloco.finish()  # there is no more
            torch.testing.assert_close(model.flat(), torch.full((1000,), -1.4))
            assert diloco.outer_step == 2

    together(ahead, behind)
    assert ended.is_set()


def test_a_script_may_reduce_numbers_of_its_own_meanwhile(address: str) -> None:
    def body() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", min_peers=2)
            for step in range(1, 4):
                model.move(1.0)
                diloco.step()
                loss = np.full(10, float(step))
                comm.all_reduce(loss, op="sum")
                assert (loss == 2 * step).all()

    together(body, body)


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("all_reduce_async", 1),
        ("all_reduce_async", 3),
        ("are_peers_pending", 2),
        ("sync_shared_state", 2),
    ],
)
def test_a_peer_may_be_lost_at_any_point_of_a_delayed_round(
    address: str, name: str, nth: int
) -> None:
    def survivor() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", min_peers=3)
            seen = []
            while diloco.outer_step < 5:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                seen.append((outer.contributors, diloco.state_digest()))
            return seen

    def deserter() -> None:
        desert(address, name, nth, mode="delayed", min_peers=3)

    ours, theirs, _ = together(survivor, survivor, deserter)
    assert ours == theirs
    # The second synchronization is in the third round, the first of which has none.
    means_of_three = {"all_reduce_async": nth - 1, "are_peers_pending": 1, "sync_shared_state": 2}
    contributors = [0, *[3] * means_of_three[name]]
    assert [count for count, _ in ours] == contributors + [2] * (6 - len(contributors))


@pytest.mark.parametrize("call", ["all_reduce", "update_topology", "sync_shared_state"])
def test_a_peer_may_be_lost_while_a_newcomer_is_admitted(address: str, call: str) -> None:
    """After any loss, the newcomer is in phase with the others."""
    ready = threading.Event()

    def train(diloco: DiLoCo, model: Model, rounds: int | None) -> dict[int, str]:
        seen = {diloco.outer_step: diloco.state_digest()}
        last = None if rounds is None else diloco.outer_step + rounds
        while last is None or diloco.outer_step < last:
            model.move(1.0)
            outer = diloco.step()
            assert outer is not None
            ready.set()
            seen[diloco.outer_step] = diloco.state_digest()
            if outer.admitted:
                last = diloco.outer_step + 3
        return seen

    def member() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            return train(make(comm, model, mode="delayed", min_peers=3), model, None)

    def deserter() -> None:
        """Makes its first call of that name, after it was asked to admit, its last."""
        model = Model()
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving: Any = None

            def arm() -> None:
                leaving.armed = True

            leaving = Deserter(Watched(comm, update_topology=arm), call, 1)  # type: ignore[arg-type]
            diloco = make(leaving, model, mode="delayed", min_peers=3)
            leaving.armed = call != "sync_shared_state"
            train(diloco, model, None)

    def newcomer() -> Any:
        model = Model(9.0)
        assert ready.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            return train(make(comm, model, mode="delayed", min_peers=3), model, 3)

    ours, theirs, _, new = together(member, member, deserter, newcomer)
    assert ours == theirs and new.items() <= ours.items() and len(new) == 4


def test_the_first_pseudo_gradient_of_a_newcomer_counts_in_full(address: str) -> None:
    """It is measured before theta moves; and the newcomer knows the mean that it did not make."""
    ready = threading.Event()
    leaving = threading.Barrier(3)  # who is left alone before it has launched keeps its progress

    def incumbent() -> Any:
        model = Model(1.0)
        with pccl.Communicator(address) as comm:
            diloco = make(
                comm, model, mode="delayed", min_peers=2, outer_lr=0.7, outer_momentum=0.0
            )
            contributors, moved = 2, 0.0
            while contributors < 3:
                model.move(1.0)  # of two peers, until the newcomer is there
                outer = diloco.step()
                assert outer is not None
                moved += outer.contributors == 2
                contributors = outer.contributors
                ready.set()
            theta = diloco.state_dict()["theta"]
            leaving.wait(PATIENCE_S)
            return theta, diloco.state_digest(), moved

    def newcomer() -> Any:
        model = Model(-5.0)
        assert ready.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            diloco = make(
                comm, model, mode="delayed", min_peers=2, outer_lr=0.7, outer_momentum=0.0
            )
            model.move(4.0)
            outer = diloco.step()
            assert outer is not None and outer.contributors == 2  # what it has received
            model.move(1.0)
            diloco.step()
            theta = diloco.state_dict()["theta"]
            leaving.wait(PATIENCE_S)
            return theta, diloco.state_digest(), None

    (theta, digest, moved), (_, second, _), (_, third, _) = together(incumbent, incumbent, newcomer)
    assert digest == second == third
    torch.testing.assert_close(
        theta, torch.full((1000,), 1.0 - 0.7 * (moved + (1 + 1 + 4) / 3)), rtol=1e-5, atol=0
    )


def test_survivors_launch_again_while_they_train(address: str) -> None:
    """The others repeat a mean in which a peer was lost, and do not wait for the round's end."""
    again = threading.Barrier(2)

    def survivor() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            watched: Any = Watched(comm)
            watched.all_reduce_async = lambda *_, **__: Lost()
            diloco = make(watched, model, mode="delayed", min_peers=2, inner_steps=3)
            for _ in range(3):
                model.move(1.0)
                diloco.step()
            del watched.all_reduce_async
            model.move(1.0)
            assert diloco.step() is None
            assert diloco.last_reduce is None
            again.wait(PATIENCE_S)
            diloco.state_dict()  # the mean comes, though no peer ends its round
            assert diloco.last_reduce is not None and diloco.last_reduce.world_size == 2
            again.wait(PATIENCE_S)
            for _ in range(2):
                model.move(1.0)
                outer = diloco.step()
            assert outer is not None and (outer.contributors, outer.retries) == (2, 1)

    together(survivor, survivor)


@pytest.mark.parametrize("at", ["launch", "wait"])
def test_errors_that_no_retry_mends_are_raised(address: str, at: str) -> None:
    class Kicked(Lost):
        error = pccl.KickedError(pccl.Result.INVALID_USAGE, "all_reduce_async", "of the test")

    def launch(*_: Any, **__: Any) -> Any:
        if at == "launch":
            watched.all_reduce_async = refuse
            return Lost()
        return Kicked()

    def refuse(*_: Any, **__: Any) -> Any:
        raise Kicked.error

    model = Model()
    with pccl.Communicator(address) as comm:
        watched: Any = Watched(comm)
        watched.all_reduce_async = launch
        diloco = make(watched, model, mode="delayed", inner_steps=2)
        for _ in range(2):
            model.move(1.0)
            diloco.step()
        for call in (diloco.step, diloco.finish):
            model.move(1.0)
            with pytest.raises(pccl.KickedError, match="of the test"):
                call()


# ---- alone ----


def test_a_lone_peer_keeps_its_progress_and_shares_it_with_a_newcomer(address: str) -> None:
    """Also what was under way when the other was lost."""
    alone, left = threading.Event(), threading.Event()
    leaving = threading.Barrier(2)  # who is alone before it has launched keeps its progress

    def veteran() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(
                comm, model, mode="delayed", min_peers=2, outer_lr=0.7, outer_momentum=0.0
            )
            assert left.wait(PATIENCE_S)
            for moved in (1.0, 2.0, 4.0):
                model.move(1.0 if moved == 1.0 else moved / 2)
                outer = diloco.step()
                assert outer is not None and outer.contributors == 0 and outer.outer_step == 0
            assert torch.equal(model.flat(), torch.full((1000,), -4.0))
            moved, contributors = 4.0, 0
            alone.set()
            while contributors < 2:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                contributors = outer.contributors
                moved += 1
            theta = diloco.state_dict()["theta"]
            leaving.wait(PATIENCE_S)
            return theta, diloco.state_digest(), moved - 1  # the last is under way

    def leaver() -> None:
        options = {"mode": "delayed", "min_peers": 2, "outer_lr": 0.7, "outer_momentum": 0.0}
        desert(address, "all_reduce_async", by=8.0, joined=left, **options)

    def newcomer() -> Any:
        model = Model(9.0)
        assert alone.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", outer_lr=0.7, outer_momentum=0.0)
            assert torch.equal(model.flat(), torch.zeros(1000))
            for _ in range(2):
                model.move(2.0)
                outer = diloco.step()
            assert outer is not None and outer.contributors == 2
            diloco.state_dict()
            leaving.wait(PATIENCE_S)
            return None, diloco.state_digest()

    (theta, digest, moved), _, (_, other) = together(veteran, leaver, newcomer)
    assert digest == other
    torch.testing.assert_close(
        theta, torch.full((1000,), -0.7 * (moved + 2.0) / 2), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("buffers", ["mean", "local"])
def test_a_pending_mean_goes_back_into_the_model_when_all_others_are_lost(
    address: str, buffers: str
) -> None:
    launched, left = threading.Event(), threading.Event()

    def veteran() -> None:
        model = Model()
        model.register_buffer("seen", torch.zeros(2))
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", min_peers=2, buffers=buffers)
            model.seen += 1
            model.move(2.0)
            diloco.step()
            assert torch.equal(model.flat(), torch.full((1000,), -1.5))
            assert model.seen[0] == (1 if buffers == "local" else 0)
            launched.set()
            assert left.wait(PATIENCE_S)
            model.seen += 4
            model.move(1.0)
            outer = diloco.step()
            assert outer is not None and (outer.contributors, outer.outer_step) == (0, 0)
            assert torch.equal(model.flat(), torch.full((1000,), -3.0)) and model.seen[0] == 5

    def leaver() -> None:
        model = Model()
        model.register_buffer("seen", torch.zeros(2))
        events = {"after": launched, "left": left}
        options = {"mode": "delayed", "min_peers": 2, "buffers": buffers}
        desert(address, "all_reduce_async", by=8.0, model=model, **events, **options)

    together(veteran, leaver)


def test_a_lone_peer_with_alone_step_applies_its_progress_a_round_later(address: str) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, mode="delayed", alone="step", outer_lr=0.5, outer_momentum=0.0)
        for at_last, contributors in ((-1.5, 0), (-3.1875, 1), (-4.4453125, 1)):
            model.move(2.0)
            outer = diloco.step()
            assert outer is not None and outer.contributors == contributors
            assert torch.equal(model.flat(), torch.full((1000,), at_last))
        diloco.finish()
        assert torch.equal(model.flat(), torch.full((1000,), -3.0)) and diloco.outer_step == 3


@pytest.mark.parametrize("call", ["all_reduce_async", "are_peers_pending"])
def test_a_group_that_waits_takes_no_delayed_step_with_fewer(address: str, call: str) -> None:
    """It waits where it learns that it is too small: with a mean under way, or before."""
    left = threading.Event()

    def survivor() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", alone="wait", min_peers=3)
            seen = {}
            while diloco.outer_step < 5:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None and outer.contributors in (0, 3)
                seen[diloco.outer_step] = diloco.state_digest()
            return seen

    def leaver() -> None:
        desert(address, call, 2, left=left, mode="delayed", alone="wait", min_peers=3)

    def successor() -> Any:
        assert left.wait(PATIENCE_S)
        return survivor()

    ours, theirs, _, new = together(survivor, survivor, leaver, successor)
    assert ours == theirs and new.items() <= ours.items() and 5 in new


def test_one_of_two_that_wait_begins_again_with_its_successor(address: str) -> None:
    left = threading.Event()

    def survivor() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, mode="delayed", alone="wait", min_peers=2)
            while diloco.outer_step < 3:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None and outer.contributors in (0, 2)
            return diloco.state_digest()

    def leaver() -> None:
        options = {"mode": "delayed", "alone": "wait", "min_peers": 2}
        desert(address, "sync_shared_state", 2, left=left, **options)

    def successor() -> Any:
        assert left.wait(PATIENCE_S)
        return survivor()

    ours, _, new = together(survivor, leaver, successor)
    assert ours == new


def test_a_peer_that_could_not_launch_waits_in_its_next_round(address: str) -> None:
    """And not at the end of that one, which may be the last of the script."""
    left, waits = threading.Event(), threading.Event()
    settings = {"mode": "delayed", "alone": "wait", "min_peers": 2}

    def survivor() -> Any:
        model, contributors = Model(), []
        with pccl.Communicator(address) as comm:
            watched: Any = Watched(comm, all_reduce_async=lambda: left.wait(PATIENCE_S))
            diloco = make(watched, model, **settings)
            while diloco.outer_step < 1:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                contributors.append(outer.contributors)
                waits.set()
            return contributors, diloco.state_digest()

    def leaver() -> None:
        desert(address, "all_reduce_async", left=left, **settings)

    def successor() -> str:
        assert waits.wait(PATIENCE_S)
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **settings)
            while diloco.outer_step < 1:
                model.move(1.0)
                diloco.step()
            return diloco.state_digest()

    (contributors, digest), _, other = together(survivor, leaver, successor)
    assert contributors == [0, 0, 2] and digest == other


# ---- checkpoints ----


@pytest.mark.parametrize("peers", [2, 3])
def test_a_delayed_run_resumes_from_its_checkpoint(address: str, peers: int) -> None:
    """As many peers go on as if never interrupted, but for rounding. It has the mean under way."""

    def body(address: str, first: int, last: int, state: Any, among: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode="delayed", min_peers=among, state=state)
                for seed in range(first, last):
                    model.move(random(seed))
                    outer = diloco.step()
                    assert outer is not None
                    assert outer.contributors == (2 if seed in (1, 2) else among if seed else 0)
                return diloco.state_digest(), diloco.state_dict()

        return run

    saved = together(*[body(address, 0, 2, None, 2)] * 2)
    with pccl.MasterNode("127.0.0.1:0") as master:
        resumed = together(*[body(master.address, 2, 4, saved[0][1], peers)] * peers)
    with pccl.MasterNode("127.0.0.1:0") as master:
        uninterrupted = together(*[body(master.address, 0, 4, None, 2)] * 2)
    assert len({digest for digest, _ in resumed}) == 1
    if peers == 2:
        theta, wanted = (each[0][1]["theta"] for each in (resumed, uninterrupted))
        torch.testing.assert_close(theta, wanted)
    # All peers move alike, so the mean is the same of any number of them, but for its rounding.
    torch.testing.assert_close(resumed[0][1]["theta"], uninterrupted[0][1]["theta"])


def test_a_checkpoint_serves_another_mode(address: str) -> None:
    """They get theta from it, but not the mean that was under way."""
    with pccl.Communicator(address) as comm:
        model = Model()
        diloco = make(comm, model, mode="delayed", alone="step")
        model.move(1.0)
        diloco.step()
        state = diloco.state_dict()
    for mode, buffers in (("sync", "mean"), ("delayed", "first")):
        with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
            options = {"mode": mode, "buffers": buffers, "alone": "step"}
            other = make(comm, Model(2.0), state=state, **options)
            assert torch.equal(other.state_dict()["theta"], torch.zeros(1000))
            other.finish()
            assert other.outer_step == (mode == "delayed")


# ---- buffers ----


def test_buffers_are_averaged_a_round_later_too(address: str) -> None:
    class WithBuffer(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("scale", torch.full((3,), 0.1))

    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = WithBuffer()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, mode="delayed", min_peers=2)
                values = []
                for _ in range(3):
                    model.seen += own
                    model.move(1.0)
                    diloco.step()
                    values.append(model.seen.tolist())
                assert torch.equal(model.scale, torch.full((3,), 0.1))
                diloco.finish()
                return values, model.seen.tolist(), diloco.state_digest()

        return run

    ours, theirs = together(body(4), body(8))
    assert ours == theirs
    assert ours[:2] == ([[0, 0], [6, 6], [12, 12]], [18, 18])


def test_buffers_of_a_lone_peer_are_updated(address: str) -> None:
    model = Model()
    model.register_buffer("seen", torch.zeros(2))
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, mode="delayed")
        for seen in (1.0, 2.0, 3.0):
            model.seen += 1
            model.move(1.0)
            diloco.step()
            assert torch.equal(model.seen, torch.full((2,), seen))
