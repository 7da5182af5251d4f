"""DiLoCo with mode="streaming": fragments, overlap and mixing, with peers that are lost or join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from oracles import diloco as diloco_oracle

torch = pytest.importorskip("torch")

from training.small import (  # noqa: E402
    PATIENCE_S,
    Deserter,
    Left,
    Model,
    N,
    desert,
    make,
    random,
    refuse,
    together,
)

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402
from pccl.diloco.outer import split  # noqa: E402

STREAMING = {"mode": "streaming", "fragments": 2, "overlap": 1, "inner_steps": 4}
OUTER = {"outer_lr": 0.3, "outer_momentum": 0.5}
PROBLEM = diloco_oracle.Problem({"a": 1.0, "b": -3.0, "c": 7.0, "d": 2.5}, 5, 0.25)
CUT = N // 4 * 3  # where `Model` has its second parameter, and so its second fragment


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


def train(diloco: DiLoCo, model: Any, target: float) -> Any:
    """Inner steps up to the end of the next round, of the oracle's problem."""
    outer = None
    while outer is None:
        model.move(PROBLEM.rate * (model.flat() - target))
        outer = diloco.step()
    return outer


# ---- trajectories ----


def test_a_trajectory_without_mixing(address: str) -> None:
    """`c` leaves before it gives its second pseudo-gradient; `d` joins some rounds later."""
    first_is_in, some_rounds = threading.Event(), threading.Event()
    ended = threading.Barrier(3)
    options = {**STREAMING, **OUTER, "inner_steps": 5, "min_peers": 3}
    rounds: dict[str, list[Any]] = {"a": [], "b": [], "d": []}

    def follow(name: str, comm: Any, until: Callable[[], bool]) -> Any:
        model, weights, digests = Model(0.5), [], {}
        diloco = make(comm, model, **options)
        while not until():
            rounds[name].append(train(diloco, model, PROBLEM.targets[name]))
            weights.append(model.flat().double().numpy())
            digests[tuple(diloco.state_dict()["clock"][:-1].tolist())] = diloco.state_digest()
            if len(rounds[name]) == 5:
                some_rounds.set()
        theta = diloco.state_dict()["theta"]
        ended.wait(PATIENCE_S)
        return weights, digests, theta

    def founder(name: str) -> Any:
        if name != "a":
            assert first_is_in.wait(PATIENCE_S)

        def until() -> bool:
            admitted = [i for i, outer in enumerate(rounds[name]) if outer.admitted]
            return bool(admitted) and len(rounds[name]) == admitted[0] + 6

        with pccl.Communicator(address) as comm:
            first_is_in.set()
            return follow(name, comm, until)

    def desert() -> None:
        assert first_is_in.wait(PATIENCE_S)
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving: Any = Deserter(comm, "all_reduce_async", 2)
            model = Model(0.5)
            diloco = make(leaving, model, **options)
            leaving.armed = True
            while True:
                train(diloco, model, PROBLEM.targets["c"])

    def join() -> Any:
        assert some_rounds.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            return follow("d", comm, lambda: len(rounds["d"]) == 5)

    a, b, _, d = together(lambda: founder("a"), lambda: founder("b"), desert, join)
    admitted_at = len(rounds["a"]) - 6
    expected = [
        (["a", "b", "c"], []),
        *[(["a", "b"], [])] * (admitted_at - 1),
        (["a", "b"], ["d"]),
        *[(["a", "b", "d"], [])] * 5,
    ]
    places = [np.arange(CUT), np.arange(CUT, N)]
    start = np.full(N, 0.5)
    oracle = diloco_oracle.Streaming(PROBLEM, places, start, 1, 0.0, 0.3, 0.5).run(expected)
    for (weights, _, theta), name in ((a, "a"), (b, "b"), (d, "d")):
        wanted = [of_peers[name] for of_peers in oracle.weights[-len(weights) :]]
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(theta, oracle.whole(), rtol=0, atol=1e-5)
        of_these = expected[-len(weights) :]
        assert [outer.contributors for outer in rounds[name]] == [len(who) for who, _ in of_these]
        fragments = [i % 2 for i in range(len(expected))][-len(weights) :]
        assert [outer.fragment for outer in rounds[name]] == fragments
    assert a[1] == b[1] and d[1].items() <= a[1].items() and len(d[1]) == 5


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_one_fragment_that_waits_and_mixes_nothing_is_sync_to_the_bit(wire: str) -> None:
    seen = []
    for mode in ("sync", "streaming"):

        def body(number: int, mode: str = mode) -> Any:
            model, states = Model(0.5), []
            with pccl.Communicator(master.address) as comm:
                diloco = make(comm, model, mode=mode, wire=wire, min_peers=2, inner_steps=2)
                for k in range(8):
                    model.move(random(100 * number + k))
                    if diloco.step():
                        state = diloco.state_dict()
                        residual = state["averager"].get("residual")
                        of_wire = None if residual is None else residual.tolist()
                        states.append((model.flat().tolist(), diloco.state_digest(), of_wire))
                diloco.finish()
                return states, model.flat().tolist(), diloco.outer_step, diloco.inner_step

        with pccl.MasterNode("127.0.0.1:0") as master:
            seen.append(together(lambda: body(0), lambda: body(1)))
    assert seen[0] == seen[1] and seen[0][0][2:] == (4, 0)


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_end_leaves_nothing_of_a_mixture(address: str, fragments: int) -> None:
    def body(number: int) -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            options = {"mode": "streaming", "fragments": fragments, "alpha": 0.5}
            diloco = make(comm, model, inner_steps=2, min_peers=2, **options)
            for k in range(4):
                model.move(random(100 * number + k))
                diloco.step()
            assert fragments > 1 or not torch.equal(model.flat(), diloco.state_dict()["theta"])
            diloco.finish()
            assert torch.equal(model.flat(), diloco.state_dict()["theta"])

    together(lambda: body(0), lambda: body(1))


@pytest.mark.parametrize(
    ("name", "nth"),
    [("are_peers_pending", 2), ("all_gather_async", 2), ("sync_shared_state", 2)],
)
def test_a_peer_may_be_lost_at_any_point(address: str, name: str, nth: int) -> None:
    """With quantized wires, too: each fragment has its own residual."""
    options = {**STREAMING, **OUTER, "min_peers": 3, "wire": "2bit"}  # always a gather

    def survivor(number: int) -> Any:
        model, seen = Model(), []
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **options)
            while diloco.outer_step < 4:
                model.move(random(number))
                outer = diloco.step()
                if outer:
                    seen.append((outer.contributors, diloco.state_digest()))
        return seen

    def deserter() -> None:
        desert(address, name, nth, by=random(3), **options)

    ours, theirs, _ = together(lambda: survivor(1), lambda: survivor(2), deserter)
    before = 2 if name == "sync_shared_state" else 1
    assert ours == theirs and [who for who, _ in ours] == [3] * before + [2] * (8 - before)


# ---- alone ----


def test_progress_survives_the_loss_of_all_others(address: str) -> None:
    """It stays in the model, and is in the next pseudo-gradient; a newcomer is in phase."""
    launched, left, alone = threading.Event(), threading.Event(), threading.Event()
    leaving = threading.Barrier(2)
    options = {**STREAMING, "outer_momentum": 0.0, "outer_lr": 0.5}

    def veteran() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2, **options)
            for _ in range(2):
                model.move(1.0)
                diloco.step()
            launched.set()
            assert left.wait(PATIENCE_S)
            outers = []
            for moved in range(3, 12):
                model.move(1.0)
                outers.append(diloco.step())
                assert torch.equal(model.flat(), torch.full((N,), -float(moved)))
            assert [(o.contributors, o.fragment, o.outer_step) for o in outers if o] == [
                (1, fragment, 0) for fragment in (0, 1, 0, 1, 0)
            ]
            alone.set()
            last = None
            while last is None or last.contributors < 2:
                model.move(1.0)
                last = diloco.step() or last
            leaving.wait(PATIENCE_S)
            return diloco.state_digest(), last.fragment

    def leaver() -> None:
        events = {"after": launched, "left": left}
        desert(address, "all_reduce_async", by=8.0, **events, min_peers=2, **options)

    def newcomer() -> Any:
        model = Model(9.0)
        assert alone.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **options)
            outer = None
            while outer is None:
                model.move(2.0)
                outer = diloco.step()
            assert outer.contributors == 2
            leaving.wait(PATIENCE_S)
            return diloco.state_digest(), outer.fragment

    ours, _, theirs = together(veteran, leaver, newcomer)
    assert ours == theirs


def test_a_lone_peer_with_alone_step_applies_its_progress(address: str) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        options = {"outer_lr": 0.5, "outer_momentum": 0.0, "alone": "step"}
        diloco = make(comm, model, **{**STREAMING, **options})
        seen = []
        for _ in range(5):
            model.move(1.0)
            outer = diloco.step()
            flat = model.flat().tolist()
            seen.append((flat[0], flat[-1], outer.fragment if outer else None))
        expected = [(-1, -1, None), (-2, -2, None), (-2, -3, 0), (-3, -4, None), (-4, -3, 1)]
        assert seen == expected and diloco.outer_step == 1


def test_a_group_that_waits_takes_no_step_with_fewer(address: str) -> None:
    """The fragment that was under way is left out, and the newcomer is in phase."""
    left = threading.Event()
    options = {**STREAMING, **OUTER, "alone": "wait", "min_peers": 3}

    def survivor() -> Any:
        model, seen = Model(), {}
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **options)
            while diloco.outer_step < 3:
                model.move(1.0)
                outer = diloco.step()
                if outer and outer.contributors == 3:
                    seen[tuple(diloco.state_dict()["clock"][:-1].tolist())] = diloco.state_digest()
                assert outer is None or outer.contributors == 3 or outer.admitted
        return seen

    def leaver() -> None:
        desert(address, "all_reduce_async", 2, left=left, **options)

    def successor() -> Any:
        assert left.wait(PATIENCE_S)
        return survivor()

    ours, theirs, _, new = together(survivor, survivor, leaver, successor)
    assert ours == theirs and new.items() <= ours.items()
    assert [*ours] == [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]


# ---- checkpoints and buffers ----


@pytest.mark.parametrize("peers", [2, 3])
def test_a_run_resumes_from_a_checkpoint_between_fragments(address: str, peers: int) -> None:
    """Also with another number of peers; a mode without fragments takes the same parameters."""

    def body(address: str, seeds: range, state: Any, among: int, **options: Any) -> Any:
        def run() -> Any:
            model, fragments = Model(), []
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, min_peers=among, state=state, **OUTER, **options)
                begin = model.flat()
                for seed in seeds:
                    model.move(random(seed))
                    outer = diloco.step()
                    fragments += [outer.fragment] if outer else []
                return begin, fragments, diloco.state_digest(), diloco.state_dict()

        return run

    saved = together(*[body(address, range(3), None, 2, wire="int4", **STREAMING)] * 2)
    _, fragments, _, state = saved[0]
    assert fragments == [0] and state["clock"][:-1].tolist() == [1, 0]
    residual = state["averager"]["residual"]
    assert residual[:CUT].any() and not residual[CUT:].any()
    with pccl.MasterNode("127.0.0.1:0") as master:
        again = body(master.address, range(3, 8), state, peers, wire="int4", **STREAMING)
        resumed = together(*[again] * peers)
    assert len({digest for _, _, digest, _ in resumed}) == 1
    for begin, fragments, _, _ in resumed:
        assert torch.equal(begin, state["theta"]) and fragments == [1, 0]
    with pccl.MasterNode("127.0.0.1:0") as master:
        begin, _, _, other = body(master.address, range(0), state, 1)()
    assert torch.equal(begin, state["theta"]) and torch.equal(other["velocity"], state["velocity"])
    assert other["clock"][:-1].tolist() == [0]


def test_buffers_are_averaged_with_the_last_fragment(address: str) -> None:
    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, min_peers=2, **STREAMING)
                values = []
                for _ in range(4):
                    model.seen += own
                    model.move(1.0)
                    diloco.step()
                    values.append(model.seen.tolist()[0])
                diloco.finish()
                return values, model.seen.tolist(), diloco.state_digest()

        return run

    ours, theirs = together(body(2), body(4))
    assert ours[0] == [2, 4, 6, 8] and theirs[0] == [4, 8, 12, 16]
    assert ours[1:] == theirs[1:] and ours[1] == [12, 12]


# ---- fragments ----


def named(sizes: dict[str, int]) -> Any:
    return [(name, torch.nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]


def test_layers_stay_together_in_both_patterns() -> None:
    sizes = {"embed.weight": 50}
    for layer in range(4):
        sizes |= {f"blocks.{layer}.attn.weight": 8, f"blocks.{layer}.norm.0.bias": 2}
    layers = named(sizes | {"head.weight": 1, "head.bias": 1})
    assert split(layers, 1, "strided") == [[*range(11)]]
    assert split(layers, 3, "strided") == [[0, 5, 6], [1, 2, 7, 8], [3, 4, 9, 10]]
    assert split(layers, 3, "sequential") == [[0], [1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert split(layers, 6, "sequential") == [[0], [1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert split(layers, 7, "strided") == [[0, 7], [1, 8], [2, 9], [3, 10], [4], [5], [6]]
    assert split(named({"a": 1, "b": 1, "c": 90}), 3, "sequential") == [[0], [1], [2]]
    assert split(named({"a": 90, "b": 1, "c": 1}), 3, "sequential") == [[0], [1], [2]]
    with pytest.raises(ValueError, match=r"fragments=3 are more than .* has parameters: 2"):
        split(named({"a": 1, "b": 1}), 3, "strided")


# ---- what is refused ----


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 5},
        {"fragments": 0},
        {"overlap": 2},
        {"overlap": -1},
        {"alpha": 1.0},
        {"alpha": -0.1},
        {"pattern": "shuffled"},
        {"buffers": "first", "deadline_peers": 2},
        {"mode": "sync"},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        make(None, Model(), **{**STREAMING, **options})  # type: ignore[arg-type]


def test_peers_with_other_fragments_are_refused_by_name(address: str) -> None:
    own = {**STREAMING, "alpha": 0.5}
    refuse(address, r"alpha is 0.0 in the run and 0.5 here$", STREAMING, own)
