"""The compressed mean in two stages: against an oracle to the bit, and that nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from oracles import diloco as diloco_oracle

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Left, together  # noqa: E402

import pccl  # noqa: E402
from pccl import extension, kernels  # noqa: E402
from pccl.data import Ledger  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402
from pccl.diloco.averaging import CODECS  # noqa: E402

N = 5000  # five blocks: of four peers, one adds two
TWO_STAGE = [wire for wire, codec in CODECS.items() if codec.two_stage]


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(N))


def move(peer: int, k: int) -> Any:
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * peer + k))


def make(comm: Any, model: torch.nn.Module, **options: Any) -> DiLoCo:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    usual = {"inner_steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9, "min_peers": 4}
    return DiLoCo(comm, model, optimizer, **{**usual, "wire": "int4", **options})


def step(diloco: DiLoCo, model: Wide, by: Any, **given: Any) -> Any:
    """One step, which is a round."""
    model.weight.grad = by
    outer = diloco.step(**given)
    assert outer is not None
    return outer


@pytest.mark.parametrize(
    ("mode", "wire"), [*(("sync", wire) for wire in TWO_STAGE), ("delayed", "int4")]
)
def test_theta_and_residuals_equal_the_oracle(address: str, mode: str, wire: str) -> None:
    rounds, ranks = 4, {}

    def peer(number: int) -> Callable[[], Any]:
        def body() -> Any:
            model, states, received = Wide(), [], []
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, wire=wire, mode=mode)
                ranks[number] = comm.rank
                for k in range(rounds):
                    outer = step(diloco, model, move(number, k))
                    states.append(diloco.state_dict())  # waits for what is under way
                    assert diloco.last_reduce is not None
                    received.append((outer.algorithm, diloco.last_reduce.rx_bytes))
            return states, received

        return body

    found = together(*map(peer, range(4)))
    order = sorted(ranks, key=ranks.__getitem__)
    moves = [{number: move(number, k).numpy() for number in order} for k in range(rounds)]
    lag = int(mode == "delayed")
    oracle = diloco_oracle.Quantizing(wire, lag=lag)
    oracle.run(np.zeros(N, np.float32), moves)
    for number, (states, _) in enumerate(found):
        for k, state in enumerate(states):
            assert state["theta"].numpy().tobytes() == oracle.thetas[k].tobytes()
            own = state["averager"]["residual"].numpy()
            np.testing.assert_array_equal(own, oracle.residuals[k][number])
    size = kernels.quantized_size(wire, N)
    for _, received in found:
        first, *others = received
        assert first == ("gather", 3 * size)
        assert {algorithm for algorithm, _ in others[lag:]} == {"two-stage"}
    # parts differ by a block, and each is received by its owner and by all others
    total = sum(received[-1][1] for _, received in found)
    assert total == pytest.approx(2 * 3 * size, rel=0.02)


def test_a_peer_sends_a_byte_for_a_parameter_however_many_there_are(address: str) -> None:
    count, rounds = 200_000, 3

    def peer() -> tuple[list[str], int]:
        model = torch.nn.Linear(count, 1, bias=False)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=8)
            taken = []
            for _ in range(rounds):
                model.weight.grad = torch.randn(1, count)
                outer = diloco.step()
                assert outer is not None
                taken.append((outer.algorithm, outer.tx_bytes))
        return [algorithm for algorithm, _ in taken], taken[-1][1]

    found = together(*[peer] * 8)
    assert {algorithm for chosen, _ in found for algorithm in chosen[1:]} == {"two-stage"}
    sent = sum(tx_bytes for _, tx_bytes in found) / (8 * count)
    assert sent == pytest.approx(0.5625 * 2 * 7 / 8, rel=0.05)


@pytest.mark.parametrize("rounds", [200, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_nothing_is_lost_over_many_rounds(
    address: str, mode: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The applied means and residuals sum to the progress, while peers leave in either stage and
    others join. All peers hold the same bits.
    """
    founders, every = 5, rounds // 8
    launch = extension.launch
    leaving: dict[Any, str] = {}

    def leave(comm: Any, name: str, *rest: Any, **named: Any) -> Any:
        if leaving.get(comm) == name:
            raise Left
        return launch(comm, name, *rest, **named)

    monkeypatch.setattr(extension, "launch", leave)
    digests: dict[int, set[str]] = {}
    contributors: dict[int, int] = {}
    thetas: dict[int, Any] = {}
    algorithms: set[str] = set()
    progress: dict[int, dict[int, Any]] = {}  # of each round that a peer has ended, by peer
    residuals: dict[int, Any] = {}  # of each peer, at its end
    pool = ThreadPoolExecutor(founders + rounds // every)
    started = []
    lock = threading.Lock()

    def train(number: int, last: int) -> None:
        model = Wide()
        name = "all_gather" if number % 2 else "all_to_all"
        with pccl.Communicator(address) as comm:
            plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
            diloco = make(comm, model, mode=mode, min_peers=1 if number >= founders else 5, **plain)
            while diloco.outer_step < rounds:
                k = diloco.outer_step
                if mode == "sync":
                    residuals[number] = diloco.state_dict()["averager"]["residual"]
                if k >= last:
                    leaving[comm] = name
                    with lock:
                        fresh = founders + len(started)
                        started.append(pool.submit(train, fresh, last + every * founders))
                before = model.weight.detach().clone()
                try:
                    outer = step(diloco, model, move(number, k))
                except Left:
                    return
                own = before - (before - move(number, k))
                with lock:
                    progress.setdefault(diloco.outer_step, {})[number] = own
                    algorithms.add(outer.algorithm)
                    digests.setdefault(diloco.outer_step, set()).add(diloco.state_digest())
                    if outer.contributors > 1:
                        contributors[diloco.outer_step] = outer.contributors
                    if mode == "sync":
                        thetas[diloco.outer_step] = diloco.state_dict()["theta"]
            residuals[number] = diloco.state_dict()["averager"]["residual"]

    ours = [pool.submit(train, number, every * (number + 1)) for number in range(founders)]
    for one in ours:
        one.result(PATIENCE_S * 3)
    for one in started:
        one.result(PATIENCE_S)
    assert len(started) >= 6
    assert "two-stage" in algorithms
    assert all(len(each) == 1 for each in digests.values())
    if mode == "sync":
        applied = torch.zeros(N, dtype=torch.float64)
        for k in range(1, rounds + 1):
            before = thetas[k - 1] if k > 1 else torch.zeros(N)
            applied += contributors[k] * (before.double() - thetas[k].double())
            assert len(progress[k]) == contributors[k]
        total = sum(each.double() for one in progress.values() for each in one.values())
        kept = sum(each.double() for each in residuals.values())
        torch.testing.assert_close(applied + kept, total, rtol=0, atol=5e-3)
        assert float(total.norm()) > 1000


def test_weights_are_numbers_of_samples(address: str) -> None:
    """Nothing is lost with peers that train on different numbers of samples, either."""
    rounds, samples = 30, (1, 2, 5, 9)

    def peer(number: int) -> Callable[[], Any]:
        def body() -> Any:
            model = Wide()
            with pccl.Communicator(address) as comm:
                plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
                diloco = make(comm, model, weight="samples", **plain)
                for k in range(rounds):
                    outer = step(diloco, model, move(number, k), samples=samples[number])
                assert outer.algorithm == "two-stage"
                state = diloco.state_dict()
                return state["theta"], state["averager"]["residual"]

        return body

    found = together(*map(peer, range(4)))
    progress = sum(w * move(p, k) for p, w in enumerate(samples) for k in range(rounds))
    kept = sum(w * residual for w, (_, residual) in zip(samples, found, strict=True))
    for theta, _ in found:
        torch.testing.assert_close(kept - sum(samples) * theta, progress, rtol=0, atol=2e-2)


def test_buffers_and_samples_travel_beside(address: str) -> None:
    def peer(number: int) -> Callable[[], Any]:
        def body() -> Any:
            model, mine = Wide(), []
            model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
            model.register_buffer("wide", torch.zeros(3, dtype=torch.float64))
            ledger = Ledger(60, share=5)
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, ledger=ledger)
                while not ledger.finished:
                    mine += [sample for part in ledger.share for sample in part]
                    model.seen += number
                    model.wide += number / 3
                    outer = step(diloco, model, move(number, diloco.outer_step))
                assert outer.algorithm == "two-stage"
                seen = model.seen.tolist(), model.wide.tolist()
                return mine, seen, diloco.outer_step, diloco.state_digest()

        return body

    found = together(*map(peer, range(1, 5)))
    assert sorted(sample for mine, *_ in found for sample in mine) == list(range(60))
    ((_, (seen, wide), rounds, _), *_) = found
    assert all(each[1:] == found[0][1:] for each in found)
    assert seen == [rounds * (10 // 4)] * 2
    assert wide == pytest.approx([rounds * 10 / 3 / 4] * 3)


def test_parts_are_whole_blocks_of_all_formats() -> None:
    values = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    for format in TWO_STAGE:
        whole = np.empty(kernels.quantized_size(format, N), np.uint8)
        kernels.quantize(whole, values, format)
        pieces = []
        for part in diloco_oracle.parts(N, 7):
            size = kernels.quantized_size(format, part.stop - part.start)
            piece = np.empty(size, np.uint8)
            if size:
                kernels.quantize(piece, values[part], format)
            pieces.append(piece)
        assert np.concatenate(pieces).tobytes() == whole.tobytes()
