"""DiLoCo that quantizes what it sends, against an oracle in numpy, to the bit."""

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
    Lost,
    Model,
    N,
    Watched,
    come_and_go,
    desert,
    make,
    random,
    refuse,
    together,
)

import pccl  # noqa: E402
from pccl import kernels  # noqa: E402

WIRES = list(diloco_oracle.CODECS)
MODES_OF_WIRES = [("sync", wire) for wire in WIRES] + [("delayed", "int4"), ("delayed", "sparse")]


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


def residual(diloco: Any) -> Any:
    return diloco.state_dict()["averager"]["residual"]


def expected(
    wire: str, mode: str, rounds: int, resumes: int | None = None
) -> diloco_oracle.Quantizing:
    """Two peers; each moves by random(100 * its number + round)."""
    moves = [{peer: random(100 * peer + k).numpy() for peer in (0, 1)} for k in range(rounds)]
    oracle = diloco_oracle.Quantizing(wire, lag=int(mode == "delayed"))
    return oracle.run(np.full(N, 0.5, np.float32), moves, resumes)


@pytest.mark.parametrize(("mode", "wire"), MODES_OF_WIRES)
def test_theta_and_residuals_equal_the_oracle(address: str, wire: str, mode: str) -> None:
    """Also over a restart, with each peer's own state."""
    wanted = expected(wire, mode, 4, resumes=3)

    def peer(number: int, address: str, rounds: range, state: Any) -> Callable[[], Any]:
        def body() -> Any:
            model = Model(0.5)
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, wire=wire, mode=mode, min_peers=2, state=state)
                for k in rounds:
                    model.move(random(100 * number + k))
                    outer = diloco.step()
                    assert outer is not None
                    now = diloco.state_dict()
                    assert now["theta"].numpy().tobytes() == wanted.thetas[k].tobytes()
                    own = now["averager"]["residual"].numpy()
                    assert own.tobytes() == wanted.residuals[k][number].tobytes()
                assert diloco.last_reduce is not None
                assert diloco.last_reduce.rx_bytes == kernels.quantized_size(wire, N)
                return now

        return body

    states = together(*(peer(number, address, range(3), None) for number in (0, 1)))
    with pccl.MasterNode("127.0.0.1:0") as master:
        together(*(peer(n, master.address, range(3, 4), states[n]) for n in (0, 1)))


@pytest.mark.parametrize(("mode", "wire"), MODES_OF_WIRES)
def test_a_retry_sends_the_same_bytes_and_feeds_back_once(
    address: str, mode: str, wire: str
) -> None:
    wanted = expected(wire, mode, 3)

    def peer(number: int) -> Callable[[], Any]:
        def body() -> None:
            sent: list[bytes] = []
            model = Model(0.5)
            with pccl.Communicator(address) as comm:

                def gather(send: Any, tag: int) -> Any:
                    sent.append(send[0].numpy().tobytes())
                    if len(sent) % 2 == 1:  # the first attempt of each round
                        return Lost()
                    return comm.all_gather_async(send, tag=tag)

                watched: Any = Watched(comm)
                watched.all_gather_async = gather
                diloco = make(watched, model, wire=wire, mode=mode, min_peers=2)
                for k in range(3):
                    model.move(random(100 * number + k))
                    diloco.step()
                    own = residual(diloco).numpy()
                    assert own.tobytes() == wanted.residuals[k][number].tobytes()
                    assert model.flat().numpy().tobytes() == wanted.begins[k][number].tobytes()
            assert len(sent) == 6 and sent[::2] == sent[1::2]

        return body

    together(peer(0), peer(1))


@pytest.mark.parametrize("alone", ["continue", "step"])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_the_residual_of_a_lone_peer_stays(address: str, mode: str, alone: str) -> None:
    call = "all_gather_async"

    def survivor() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, wire="int4", mode=mode, min_peers=2, alone=alone)
            model.move(random(1))
            diloco.step()
            before = residual(diloco)
            assert before.abs().max() > 0.1
            for seed in (2, 3, 4):
                model.move(random(seed))
                diloco.step()
                assert torch.equal(residual(diloco), before)

    def leaver() -> None:
        desert(address, call, 2, wire="int4", mode=mode, min_peers=2, alone=alone)

    together(survivor, leaver)


def test_a_mean_of_too_few_changes_no_residual(address: str) -> None:
    """Two of three average, and wait for a third one: then they send the same bytes once more.

    They do so a third time if they had begun to send when the third one was lost.
    """
    left = threading.Event()

    def survivor() -> list[bytes]:
        sent: list[bytes] = []
        model = Model()
        with pccl.Communicator(address) as comm:

            def gather(send: Any, tag: int) -> Any:
                sent.append(send[0].numpy().tobytes())
                return comm.all_gather_async(send, tag=tag)

            watched: Any = Watched(comm)
            watched.all_gather_async = gather
            diloco = make(watched, model, wire="2bit", min_peers=3, alone="wait")
            while diloco.outer_step < 2:
                model.move(random(diloco.outer_step))
                diloco.step()
        return sent

    def leaver() -> None:
        options = {"wire": "2bit", "min_peers": 3, "alone": "wait"}  # a gather of any number
        desert(address, "all_gather_async", 2, by=random(0), left=left, **options)

    def successor() -> None:
        assert left.wait(PATIENCE_S)
        survivor()

    ours, theirs, _, _ = together(survivor, survivor, leaver, successor)
    assert ours == theirs and len(ours) >= 3
    assert ours[0] != ours[1] and set(ours[1:]) == {ours[1]}


@pytest.mark.parametrize("wire", ["2bit", "sparse"])
def test_theta_is_that_of_the_oracle_while_one_is_lost_and_one_joins(
    address: str, wire: str
) -> None:
    """With wires that are gathered from any number of peers; see test_diloco_two_stage.py."""
    ranks: dict[int, dict[int, int]] = {}  # by round, who took part in its mean, and its rank
    founders = 3

    def train(number: int, ready: threading.Event) -> Any:
        model, seen = Model(0.5), {}
        with pccl.Communicator(address) as comm:
            leaving: Any = Deserter(comm, "all_gather_async", 3)
            leaving.armed = number == 2

            def gather(send: Any, tag: int) -> Any:
                handle = leaving.all_gather_async(send, tag=tag)
                ranks.setdefault(diloco.outer_step, {})[number] = comm.rank
                return handle

            watched: Any = Watched(comm)
            watched.all_gather_async = gather
            diloco = make(watched, model, wire=wire, min_peers=founders)
            last = diloco.outer_step + 3 if number == founders else None
            while last is None or diloco.outer_step < last:
                model.move(random(100 * number + diloco.outer_step))
                outer = diloco.step()
                assert outer is not None
                ready.set()
                if outer.admitted:
                    last = diloco.outer_step + 3
                seen[diloco.outer_step] = outer.contributors, diloco.state_dict()
        return seen

    *_, seen = come_and_go(train)
    members = [ranks[k] for k in range(max(seen))]
    assert founders in members[-1] and founders not in members[0]
    moves = [
        {p: random(100 * p + k).numpy() for p in sorted(each, key=each.__getitem__)}
        for k, each in enumerate(members)
    ]
    oracle = diloco_oracle.Quantizing(wire, lag=0).run(np.full(N, 0.5, np.float32), moves)
    for k, (contributors, state) in seen.items():
        assert contributors == len(members[k - 1])
        assert state["theta"].numpy().tobytes() == oracle.thetas[k - 1].tobytes()
        own = state["averager"]["residual"].numpy()
        assert own.tobytes() == oracle.residuals[k - 1][founders].tobytes()


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_peers_that_quantize_are_equal_while_one_is_lost_and_one_joins(
    address: str, mode: str
) -> None:
    def train(number: int, ready: threading.Event) -> dict[int, str]:
        model, seen = Model(float(number)), {}
        with pccl.Communicator(address) as comm:
            leaving: Any = Deserter(comm, "are_peers_pending", 3)
            diloco = make(leaving, model, wire="int4", mode=mode, min_peers=3)
            if number == 3:
                assert not residual(diloco).any()
            leaving.armed = number == 2
            last = diloco.outer_step + 3 if number == 3 else None
            while last is None or diloco.outer_step < last:
                model.move(random(100 * number + diloco.outer_step))
                outer = diloco.step()
                assert outer is not None
                seen[diloco.outer_step] = diloco.state_digest()
                ready.set()
                if outer.admitted:
                    last = diloco.outer_step + 3
        return seen

    ours, theirs, new = come_and_go(train)
    assert ours == theirs and new.items() <= ours.items() and len(new) >= 3


def test_the_sender_of_a_malformed_payload_is_named_on_all_peers(address: str) -> None:
    ranks: list[int] = []

    def body(number: int) -> Callable[[], Any]:
        def run() -> str:
            model = Model()
            with pccl.Communicator(address) as comm:

                def gather(send: Any, tag: int) -> Any:
                    if number == 1:
                        ranks.append(comm.rank)
                        send[0][16:] = 0  # places that do not increase
                    return comm.all_gather_async(send, tag=tag)

                watched: Any = Watched(comm)
                watched.all_gather_async = gather
                diloco = make(watched, model, wire="sparse", min_peers=2)
                model.move(random(number))
                with pytest.raises(
                    ValueError, match="has sent an invalid pseudo-gradient"
                ) as caught:
                    diloco.step()
                return str(caught.value)

        return run

    for text in together(body(0), body(1)):
        assert text.startswith(f"rank {ranks[0]} of 2 has sent an invalid pseudo-gradient")
        assert text.endswith("are not bytes of numbers quantized as sparse")


def test_rounding_errors_are_fed_back(address: str) -> None:
    """Means of 4 bits add up to the true ones, but for one residual: the error does not grow."""
    rounds = 30

    def body(number: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            with pccl.Communicator(address) as comm:
                options = {"outer_lr": 1.0, "outer_momentum": 0.0, "min_peers": 2}
                diloco = make(comm, model, wire="int4", **options)
                for _ in range(rounds):
                    model.move(random(number))
                    diloco.step()
                return model.flat(), residual(diloco)

        return run

    (ours, first), (_, second) = together(body(0), body(1))
    true = -rounds * (random(0) + random(1)) / 2
    torch.testing.assert_close(ours - (first + second) / 2, true, rtol=1e-5, atol=1e-4)
    assert (first + second).abs().max() / 2 < 0.5 < (ours.abs() / rounds).max()


def test_buffers_are_sent_unencoded(address: str) -> None:
    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            model.register_buffer("wide", torch.zeros(3, dtype=torch.float64))
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, wire="int8", min_peers=2)
                model.seen -= own
                model.wide += own / 3
                model.move(1.0)
                diloco.step()
                return model.seen.tolist(), model.wide.tolist(), diloco.state_digest()

        return run

    ours, theirs = together(body(2), body(5))
    assert ours == theirs
    assert ours[:2] == ([-3, -3], [(2 / 3 + 5 / 3) / 2] * 3)


def test_a_peer_with_another_wire_is_refused_by_name(address: str) -> None:
    refuse(address, r"wire is 'fp32' in the run and 'int8' here$", {}, {"wire": "int8"})


def test_an_unknown_wire_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match="wire='int3' must be"):
        make(comm, Model(), wire="int3")
