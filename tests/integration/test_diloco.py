"""DiLoCo: its formulas, and that peers may vanish and appear at any point of a round."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import scripts

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Model, N, desert, make, random, refuse, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import Checkpoints, DiLoCo  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "diloco.py"


# ---- formulas ----


def train(address: str, moves: list[Any], **options: Any) -> Callable[[], Any]:
    """A peer of two that moves by one of `moves` in each round. Gives back theta and the digest."""

    def body() -> Any:
        model = Model(0.5)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2, **options)
            for move in moves:
                model.move(move)
                outer = diloco.step()
                assert outer is not None and outer.contributors == 2
            return model.flat(), diloco.state_digest()

    return body


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_equal_the_formula(address: str, nesterov: bool) -> None:
    a = [random(seed) for seed in range(4)]
    b = [random(seed) for seed in range(100, 104)]
    (ours, digest), (theirs, other_digest) = together(
        train(address, a, nesterov=nesterov), train(address, b, nesterov=nesterov)
    )

    theta, v = np.full(N, 0.5), np.zeros(N)
    for i in range(4):
        mean = (a[i].double().numpy() + b[i].double().numpy()) / 2
        v = 0.9 * v + mean
        theta = theta - 0.7 * (mean + 0.9 * v if nesterov else v)
    np.testing.assert_allclose(ours.numpy(), theta, rtol=0, atol=2e-6)
    assert torch.equal(ours, theirs) and digest == other_digest


def test_without_momentum_and_at_rate_one_it_is_federated_averaging(address: str) -> None:
    a, b = random(1), random(2)
    (ours, _), _ = together(
        train(address, [a], outer_lr=1.0, outer_momentum=0.0),
        train(address, [b], outer_lr=1.0, outer_momentum=0.0),
    )
    mean_of_models = ((0.5 - a) + (0.5 - b)) / 2
    torch.testing.assert_close(ours, mean_of_models, rtol=0, atol=1e-6)


def test_inner_steps_add_up_to_one_pseudo_gradient(address: str) -> None:
    def body() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, inner_steps=3, min_peers=2, outer_lr=1.0, outer_momentum=0.0)
            outcomes = []
            for by in (1.0, 2.0, 4.0):
                model.move(by)
                outcomes.append(diloco.step())
                assert model.weight.grad is None
            assert outcomes[:2] == [None, None] and outcomes[2].outer_step == 1
            assert diloco.inner_step == 0 and diloco.outer_step == 1
            return model.flat()

    for flat in together(body, body):
        assert torch.equal(flat, torch.full((N,), -7.0))


def test_rounding_to_bf16_does_not_pull_theta_onto_its_grid(address: str) -> None:
    def body() -> Any:
        model = Model(1.0, torch.bfloat16)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2, outer_momentum=0.0)
            model.move(0.25)
            diloco.step()
            moved = diloco.state_dict()["theta"]
            for _ in range(3):
                model.move(0.0)
                diloco.step()
            assert torch.equal(model.flat(), moved.to(torch.bfloat16))
            return moved, diloco.state_dict()["theta"]

    for moved, at_last in together(body, body):
        assert not torch.equal(moved.to(torch.bfloat16).float(), moved)
        assert torch.equal(moved, at_last)


def test_parameters_are_not_replaced(address: str) -> None:
    def body() -> None:
        model = Model()
        places = model.weight.data_ptr(), model.bias.data_ptr()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2)
            model.move(1.0)
            diloco.step()
        assert (model.weight.data_ptr(), model.bias.data_ptr()) == places

    together(body, body)


# ---- who comes and goes ----


def test_fresh_peers_begin_with_the_weights_of_the_first(address: str) -> None:
    first_is_in = threading.Event()

    def first() -> Any:
        model = Model(1.0)
        with pccl.Communicator(address) as comm:
            first_is_in.set()
            make(comm, model, min_peers=3)
        return model.flat()

    def other(value: float) -> Any:
        model = Model(value)
        assert first_is_in.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            make(comm, model, min_peers=3)
        return model.flat()

    for flat in together(first, lambda: other(2.0), lambda: other(2.0)):
        assert torch.equal(flat, torch.full((N,), 1.0))


def test_a_newcomer_is_in_phase_and_its_first_pseudo_gradient_counts_in_full(address: str) -> None:
    ready = threading.Event()

    def incumbent() -> Any:
        model = Model(1.0)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2, outer_momentum=0.0)
            ready.set()
            contributors = 2
            while contributors == 2:
                model.move(0.0)
                outer = diloco.step()
                contributors = outer.contributors if outer else 0
            return model.flat(), diloco.state_digest(), diloco.outer_step

    def newcomer() -> Any:
        model = Model(-5.0)
        assert ready.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2, outer_momentum=0.0)
            assert torch.equal(model.flat(), torch.full((N,), 1.0))
            assert diloco.outer_step > 0
            model.move(3.0)
            diloco.step()
            return model.flat(), diloco.state_digest(), diloco.outer_step

    results = together(incumbent, incumbent, newcomer)
    assert len({(digest, step) for _, digest, step in results}) == 1
    for flat, _, _ in results:
        torch.testing.assert_close(flat, torch.full((N,), 1.0 - 0.7 * 3.0 / 3))


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("name", ["all_reduce", "are_peers_pending", "sync_shared_state"])
def test_a_peer_may_be_lost_at_any_point_of_a_round(address: str, name: str, nth: int) -> None:
    def survivor() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=3)
            contributors = []
            while diloco.outer_step < 5:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                contributors.append(outer.contributors)
            return diloco.state_digest(), contributors

    ours, theirs, _ = together(survivor, survivor, lambda: desert(address, name, nth, min_peers=3))
    assert ours == theirs
    rounds_with_three = nth - 1 if name == "all_reduce" else nth
    assert ours[1] == [3] * rounds_with_three + [2] * (5 - rounds_with_three)


def test_a_newcomer_may_be_lost_before_it_has_received_anything(address: str) -> None:
    def incumbent() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2)
            ready.set()
            admitted_at = None
            while admitted_at is None or diloco.outer_step < admitted_at + 2:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None and outer.contributors == 2
                if outer.admitted:
                    admitted_at = outer.outer_step
            return diloco.state_digest()

    def fugitive() -> None:
        assert ready.wait(PATIENCE_S)
        with pccl.Communicator(address):
            pass

    ready = threading.Event()
    ours, theirs, _ = together(incumbent, incumbent, fugitive)
    assert ours == theirs


def test_a_peer_alone_trains_on_without_outer_steps_and_lets_a_newcomer_in(address: str) -> None:
    alone = threading.Event()

    def veteran() -> Any:
        model = Model(1.0)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, outer_momentum=0.0)
            moved = 0
            while True:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                moved += 1
                if outer.contributors == 2:
                    return model.flat(), diloco.state_digest(), moved
                assert outer.outer_step == 0
                assert torch.equal(model.flat(), torch.full((N,), 1.0 - moved))
                alone.set()

    def newcomer() -> Any:
        model = Model(9.0)
        assert alone.wait(PATIENCE_S)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, outer_momentum=0.0)
            assert torch.equal(model.flat(), torch.full((N,), 1.0))
            model.move(1.0)
            diloco.step()
            return model.flat(), diloco.state_digest()

    (flat, digest, moved), (_, other_digest) = together(veteran, newcomer)
    assert digest == other_digest
    # What the veteran learned alone is not lost: it is in the first pseudo-gradient that it shares.
    torch.testing.assert_close(
        flat, torch.full((N,), 1.0 - 0.7 * (moved + 1) / 2), rtol=1e-5, atol=0
    )


def test_a_second_diloco_of_a_communicator_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm:
        diloco, model = make(comm, Model()), Model()
        with pytest.raises(ValueError, match="connect another Communicator for each DiLoCo"):
            make(comm, model)
        diloco.finish()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: torch.nn.Linear(2, 2, device="meta"), "'weight' has no content yet"),
        (lambda: torch.nn.LazyLinear(2), "'weight' has no content yet"),
        (lambda: torch.nn.Linear(2, 2, dtype=torch.complex64), "'weight' is of torch.complex64"),
        (lambda: torch.nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a grad"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    address: str, model: Callable[[], Any], why: str
) -> None:
    given = model()
    with pccl.Communicator(address) as comm:
        optimizer = torch.optim.SGD(given.parameters(), 0.1)
        with pytest.raises(ValueError, match=why):
            DiLoCo(comm, given, optimizer, inner_steps=1)


def test_settings_may_be_numbers_of_numpy(address: str, tmp_path: Path) -> None:
    """Peers compare them as other numbers."""
    counts = {"deadline_peers": 2, "inner_steps": 2, "min_peers": 2}
    numbers = {**counts, "outer_lr": 0.5, "grace": 1, "late_decay": 1, "weight": "samples"}

    def peer(kind: Callable[[Any], Any]) -> Callable[[], int]:
        def body() -> int:
            model, given = Model(), {name: kind(value) for name, value in numbers.items()}
            given["checkpoints"] = Checkpoints(tmp_path, every=kind(100))
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, **given)
                for k in range(4):
                    model.move(random(k))
                    diloco.step(samples=kind(3))
                return diloco.outer_step

        return body

    assert together(peer(lambda value: value), peer(lambda value: np.array(value)[()])) == [2, 2]
    with pccl.Communicator(address) as comm:
        with pytest.raises(TypeError, match=r"^inner_steps is 2\.5: it must be a whole number"):
            make(comm, Model(), inner_steps=2.5)
        diloco = make(comm, Model())
        with pytest.raises(TypeError, match=r"^samples is 1\.5: it must be a whole number"):
            diloco.step(samples=1.5)  # type: ignore[arg-type]


def test_other_settings_are_refused_by_name(address: str) -> None:
    why = r"inner_steps is 2 in the run and 7 here$"
    refuse(address, why, {"inner_steps": 2}, {"inner_steps": 7})


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 0},
        {"min_peers": 0},
        {"outer_lr": 0.0},
        {"outer_momentum": 1.0},
        {"outer_momentum": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(address: str, options: dict[str, Any]) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match=next(iter(options))):
        make(comm, Model(), **options)


def test_a_run_resumes_from_its_checkpoint_with_the_same_bits(address: str) -> None:
    def body(first: int, last: int, state: Any) -> Callable[[], Any]:
        def run() -> Any:
            model = Model()
            with pccl.Communicator(address) as comm:
                diloco = make(comm, model, min_peers=2, state=state)
                for seed in range(first, last):
                    model.move(random(seed))
                    diloco.step()
                return diloco.outer_step, diloco.state_digest(), diloco.state_dict()

        return run

    uninterrupted, _ = together(body(0, 4, None), body(0, 4, None))
    saved, _ = together(body(0, 2, None), body(0, 2, None))
    resumed, _ = together(body(2, 4, saved[2]), body(2, 4, saved[2]))
    assert resumed[:2] == uninterrupted[:2]
    assert resumed[0] == 4


def test_a_checkpoint_of_another_model_is_refused(address: str) -> None:
    with pccl.Communicator(address) as comm:
        state = make(comm, Model()).state_dict()
        other = torch.nn.Linear(3, 3)
        with pytest.raises(ValueError, match="another model") as refused:
            make(comm, other, state=state)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "the state belongs to another model: "
        "parameter 'weight' has shape [250, 3] in the state and [3, 3] here; "
        "parameter 'bias' has shape [250] in the state and [3] here"
    )


@pytest.fixture(scope="module")
def checkpoints() -> dict[int, tuple[str, dict[str, Any]]]:
    """The digest and the state of one run after some outer steps."""
    found = {}

    def body() -> None:
        with pccl.Communicator(master.address) as comm:
            model = Model()
            diloco = make(comm, model, min_peers=2)
            for seed in range(3):
                model.move(random(seed))
                diloco.step()
                found[diloco.outer_step] = diloco.state_digest(), diloco.state_dict()

    with pccl.MasterNode("127.0.0.1:0") as master:
        together(body, body)
    return found


@pytest.mark.parametrize("ages", list(itertools.permutations((1, 2, 3))))
def test_a_restart_resumes_from_the_latest_checkpoint_in_any_order(
    address: str, checkpoints: dict[int, tuple[str, dict[str, Any]]], ages: tuple[int, ...]
) -> None:
    is_in = [threading.Event() for _ in range(4)]
    is_in[0].set()

    def peer(place: int) -> Callable[[], Any]:
        def body() -> Any:
            model = Model(float(place))
            assert is_in[place].wait(PATIENCE_S)
            with pccl.Communicator(address) as comm:
                is_in[place + 1].set()
                diloco = make(comm, model, min_peers=3, state=checkpoints[ages[place]][1])
                begun = diloco.outer_step, diloco.state_digest()
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None and outer.contributors == 3
                return begun, diloco.state_digest()

        return body

    results = together(*(peer(place) for place in range(3)))
    assert {begun for begun, _ in results} == {(3, checkpoints[3][0])}
    assert len({digest for _, digest in results}) == 1


def goes_on_without(address: str, newcomer: Callable[[pccl.Communicator], None]) -> None:
    """Two peers train, a newcomer tries to join and fails, and both go on as if it never came."""
    ready, refused = threading.Event(), threading.Event()
    last: list[int] = []  # the outer step after which both end: of who sees first that it is time

    def incumbent() -> str:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=2)
            ready.set()
            while not last or diloco.outer_step < last[0]:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None and outer.contributors == 2
                if refused.is_set():
                    last.append(diloco.outer_step + 3)
            return diloco.state_digest()

    def other() -> None:
        assert ready.wait(PATIENCE_S)
        try:
            with pccl.Communicator(address) as comm:
                newcomer(comm)
        finally:
            refused.set()

    ours, theirs, _ = together(incumbent, incumbent, other)
    assert ours == theirs


def test_a_newcomer_with_a_later_checkpoint_is_refused_alone(
    address: str, checkpoints: dict[int, tuple[str, dict[str, Any]]]
) -> None:
    later = {**checkpoints[3][1], "revision": 1 << 40}

    def newcomer(comm: pccl.Communicator) -> None:
        with pytest.raises(pccl.PCCLError, match=f"this peer offers revision {1 << 40}") as caught:
            make(comm, Model(), state=later)
        assert caught.value.result is pccl.Result.INVALID_ARGUMENT

    goes_on_without(address, newcomer)


def test_a_newcomer_with_another_model_is_refused_alone(address: str) -> None:
    def newcomer(comm: pccl.Communicator) -> None:
        with pytest.raises(pccl.KickedError, match=r"'diloco.theta'.*has element count 1000 there"):
            make(comm, torch.nn.Linear(3, 3))  # type: ignore[arg-type]

    goes_on_without(address, newcomer)


# ---- real processes ----


class Process:
    """A process that trains, and the lines that it prints."""

    def __init__(self, process: Any) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.strip())
                self._news.notify_all()

    def wait_for(self, line: str) -> None:
        with self._news:
            found = self._news.wait_for(lambda: line in self.lines, PATIENCE_S)
        assert found, f"{line!r} is not in {self.lines}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def last_line(self) -> str:
        assert self._process.wait(PATIENCE_S) == 0
        self._reader.join()
        return self.lines[-1]


@pytest.fixture
def watch() -> Iterator[Callable[..., Process]]:
    """watch(process): what it prints; it is killed in the end."""
    processes: list[Process] = []

    def one(process: Any) -> Process:
        processes.append(Process(process))
        return processes[-1]

    yield one
    for process in processes:
        process.kill()


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--mode", "delayed", "--wire", "int8"], marks=pytest.mark.slow),
    ],
)
def test_the_example_has_the_same_bits_for_any_number_of_threads(
    address: str, watch: Callable[..., Process], options: list[str]
) -> None:
    words = ["--master-address", address, *options, "--steps", "3", "--inner-steps", "4"]

    def peer(threads: int) -> Process:
        own = [*words, "--seed", str(threads)]
        return watch(scripts.start(__file__, "example", threads, *own))

    peers = [peer(1), peer(2)]
    ours, theirs = (peer.last_line() for peer in peers)
    assert ours.startswith("shared state: ") and ours == theirs


@pytest.mark.timeout(6 * PATIENCE_S)
def test_a_process_is_killed_and_another_joins(address: str, watch: Callable[..., Process]) -> None:
    def train(role: str, threads: int) -> Process:
        return watch(scripts.start(__file__, address, role, threads))

    founders = [train("founder", 1) for _ in range(3)]
    founders[0].wait_for("mean of 3")
    founders[2].kill()
    founders[0].wait_for("mean of 2")
    newcomer = train("newcomer", 2)
    digests = {process.last_line() for process in (*founders[:2], newcomer)}
    assert len(digests) == 1 and len(digests.pop()) == 32


def train_until_replaced(address: str, role: str, threads: str) -> None:
    """Trains until three peers were averaged, for a founder: again, after a time with fewer."""
    torch.set_num_threads(int(threads))
    model = Model(os.getpid() % 7)
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, min_peers=3)
        seen = [2] if role == "newcomer" else []
        while not (2 in seen and seen[-1] == 3):
            model.move(random(os.getpid() + diloco.outer_step) * 1e-3)
            outer = diloco.step()
            assert outer is not None
            if seen[-1:] != [outer.contributors]:
                seen.append(outer.contributors)
                print(f"mean of {outer.contributors}", flush=True)
        print(diloco.state_digest(), flush=True)


def run_example(threads: str, *words: str) -> None:
    """The example, as its own file is run."""
    torch.set_num_threads(int(threads))
    sys.argv[:] = [str(EXAMPLE), *words]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "example":
        run_example(*sys.argv[2:])
    else:
        train_until_replaced(*sys.argv[1:])
