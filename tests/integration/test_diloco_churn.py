"""Random schedules of peers that leave anywhere in a round of DiLoCo, and of others that join."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import combinations
import pytest

torch = pytest.importorskip("torch")

from peers.injected import Injected, Tracer  # noqa: E402
from training.samples import BATCH, Shares  # noqa: E402
from training.samples import make as with_samples  # noqa: E402
from training.small import (  # noqa: E402
    PATIENCE_S,
    Deserter,
    Left,
    Model,
    Places,
    compute,
    make,
    together,
)
from training.small import random as numbers  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import Checkpoints  # noqa: E402

FOUNDERS = 4
CALLS = [
    "all_reduce",
    "all_reduce_async",
    "all_gather",
    "all_gather_async",
    "are_peers_pending",
    "update_topology",
    "sync_shared_state",
]

WIRES = ["fp32", "int4", "sparse"]

pytestmark = pytest.mark.timeout(600)


class Schedule:
    """The peers that train, when each leaves, and what they have seen of their runs."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.draw = random.Random(seed)
        self.options = options
        self.steps = self.draw.randint(6, 10)
        self.begun = threading.Event()
        self.digests: dict[tuple[int, ...], set[bytes]] = {}
        self.lock = threading.Lock()

    def see(self, diloco: Any) -> None:
        # The steps of each fragment, and the run: who comes when all have ended begins another.
        state = diloco.state_dict()
        shared = b"".join(state[name].numpy().tobytes() for name in ("theta", "velocity"))
        with self.lock:
            self.digests.setdefault(tuple(state["clock"].tolist()), set()).add(shared)

    def peer(self, address: str, number: int, leaves: tuple[str, int] | None) -> None:
        founder = number < FOUNDERS
        assert founder or self.begun.wait(PATIENCE_S)
        model = Model(float(number))
        # No run begins without all founders, so none of them can come when it has ended and wait.
        least = FOUNDERS if founder else 1
        try:
            with pccl.Communicator(address) as comm:
                leaving: Any = Deserter(comm, *(leaves or ("", 0)))
                diloco = make(leaving, model, min_peers=least, alone="step", **self.options)
                self.begun.set()
                leaving.armed = leaves is not None
                self.see(diloco)
                while diloco.outer_step < self.steps:
                    model.move(numbers(1000 * number + diloco.outer_step))
                    if self.options["mode"] == "decoupled":
                        compute()
                    if diloco.step(samples=1 + number):
                        self.see(diloco)
                diloco.finish()
        except Left:
            pass
        except pccl.KickedError:  # it has come back in vain three times, and is gone for good
            if "deadline_peers" not in self.options and self.options["mode"] != "decoupled":
                raise

    def run(self) -> None:
        with (
            pccl.MasterNode("127.0.0.1:0") as master,
            tempfile.TemporaryDirectory() as directory,
        ):
            if self.options.pop("saves", False):
                self.options["checkpoints"] = Checkpoints(directory, every=1, keep=99)
            bodies = []
            for number in range(FOUNDERS + self.draw.randint(1, 3)):
                may_leave = number >= 2 and self.draw.random() < 0.6
                leaves = (self.draw.choice(CALLS), self.draw.randint(1, 4)) if may_leave else None
                bodies.append(lambda n=number, who=leaves: self.peer(master.address, n, who))
            together(*bodies)
            latest = Checkpoints(directory).latest()
            if latest is not None:
                self.resume(latest)

    def resume(self, path: Path) -> None:
        """A checkpoint holds the state that all peers had when it began."""
        options = {**self.options, "checkpoints": None}
        with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
            self.see(make(comm, Model(), alone="step", state=path, **options))


MODES: dict[str, dict[str, Any]] = {
    **combinations.MODES,
    "weighted": {"mode": "sync", "inner_steps": 2, "weight": "samples"},
    "quarantine": {"mode": "sync", "inner_steps": 2, "quarantine": 9},
    "checkpoints": {"mode": "sync", "inner_steps": 2, "saves": True},
    "checkpoints, decoupled": {
        "mode": "decoupled",
        "inner_steps": 4,
        "fragments": 2,
        "saves": True,
    },
    "deadlines": {"mode": "sync", "inner_steps": 3, "deadline_peers": 1},
    "deadlines, delayed": {"mode": "delayed", "inner_steps": 3, "deadline_peers": 1},
    "deadlines, streaming": {
        "mode": "streaming",
        "inner_steps": 6,
        "fragments": 2,
        "overlap": 1,
        "deadline_peers": 1,
    },
}


def hold_the_same_bits(mode: str, wire: str, seed: int) -> None:
    options = {"outer_lr": 0.3, "outer_momentum": 0.5, "mode": mode, **MODES[mode]}
    schedule = Schedule(seed, wire=wire, **options)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    assert all(len(digests) == 1 for digests in schedule.digests.values()), seed


@pytest.mark.parametrize("mode", MODES)
def test_peers_hold_the_same_bits_while_others_join_and_leave(mode: str) -> None:
    """One schedule of each mode, with one of the wires."""
    number = [*MODES].index(mode)
    hold_the_same_bits(mode, WIRES[number % len(WIRES)], number)


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("mode", MODES)
def test_so_they_do_in_many_schedules(mode: str, wire: str) -> None:
    # With deadlines, graces are a millisecond: peers are dropped, and join again, all the time.
    for seed in range(30 if "deadlines" in mode else 100):
        hold_the_same_bits(mode, wire, seed)


# ---- an exception that the program catches, out of a step ----

STEPS = 2000  # of a peer, at most
TRACED = range(4, 10)  # two rounds
OUTER_STEPS = 6
SAMPLES = 6  # of the lines in those steps, where not all of them are tried
NEVER = 10**9  # a line that no peer comes to


@dataclass
class Steps(Tracer):
    """Follows the steps of a peer, those in TRACED, or until it has raised all its exceptions."""

    ends: list[int] = field(default_factory=list)  # the lines at the end of each of them

    def follows(self, taken: int) -> bool:
        last = max(self.at, default=None)
        return taken in TRACED if last is None else taken >= TRACED[0] and self.lines < last


def step(diloco: Any, number: int, taken: int, tracer: Steps, **options: Any) -> None:
    """A step, of the first peer under the tracer, which catches what that raises."""
    if number or not tracer.follows(taken):
        diloco.step(**options)
        return
    with contextlib.suppress(Injected), tracer.tracing():
        diloco.step(**options)
    tracer.ends.append(tracer.lines)


def trains(number: int, comm: pccl.Communicator, tracer: Steps, mode: str) -> Any:
    """Trains. Each step of each peer has its effect once; one peer may lose those of a round."""
    model, taken = Places(2, STEPS), 0
    options = {"min_peers": 2, "outer_lr": 1.0, "outer_momentum": 0.0, **CAUGHT[mode]}
    diloco = make(comm, model, **options)  # type: ignore[arg-type]
    while diloco.outer_step < OUTER_STEPS:
        model.move(number, min(taken, STEPS - 1))
        step(diloco, number, taken, tracer)
        taken += 1
    found = diloco.state_digest(), model.steps(-diloco.state_dict()["theta"])
    diloco.finish()
    halves = found[1][:, : STEPS - 1]
    assert (((halves - 0.5).abs() < 1e-6) | (halves == 0)).all(), halves
    assert (halves[1, : max(0, taken - 10)] > 0).all()
    return found[0]


def trains_samples(number: int, comm: pccl.Communicator, tracer: Steps, mode: str) -> Any:
    """Trains on each sample of a ledger once, but for those of a step that was not taken."""
    model, ledger, diloco = with_samples(comm, min_peers=2, **CAUGHT[mode])
    taken = 0
    while not ledger.finished:
        for places in diloco.round_of(Shares(ledger)):
            model.learn(places)
            step(diloco, number, taken, tracer, samples=BATCH)
            taken += 1
    diloco.finish()
    theta = diloco.state_dict()["theta"]
    allowed = torch.tensor([0, 1 / 2, 1])
    assert ((theta[:, None] - allowed).abs().min(dim=1).values < 1e-6).all(), theta
    assert (theta == 0).sum() <= BATCH * len(tracer.at), theta
    return diloco.state_digest()


CAUGHT: dict[str, dict[str, Any]] = {
    "sync": {"inner_steps": 3},
    "delayed": {"mode": "delayed", "inner_steps": 3},
    "streaming": {"mode": "streaming", "inner_steps": 6, "fragments": 2, "overlap": 1},
    "ledger": {"inner_steps": 3},
}


def inject(mode: str, *at: int) -> Steps:
    """Two peers train; one catches exceptions at those lines of its steps. Returns its tracer."""
    tracer = Steps(frozenset(at))

    def peer(number: int) -> Any:
        with pccl.Communicator(master.address) as comm:
            train = trains_samples if mode == "ledger" else trains
            return train(number, comm, tracer, mode)

    with pccl.MasterNode("127.0.0.1:0") as master:
        try:
            ours, theirs = together(lambda: peer(0), lambda: peer(1))
        except BaseException as error:
            error.add_note(f"{mode}, {at}")
            raise
    assert ours == theirs, (mode, at)
    return tracer


def some(lines: range, step: int | None) -> range:
    return lines[:: step or max(1, len(lines) // SAMPLES)]


def caught(mode: str, step: int | None) -> None:
    for line in some(range(1, inject(mode).lines), step):
        inject(mode, line)


@pytest.mark.parametrize("mode", CAUGHT)
def test_an_exception_that_a_program_catches_costs_the_others_nothing(mode: str) -> None:
    caught(mode, None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", CAUGHT)
def test_so_it_is_at_each_line(mode: str) -> None:
    caught(mode, 7)


def caught_again(mode: str, first: int, step: int | None) -> None:
    """A second exception while the peer rejoins after the one at line `first`."""
    ends = inject(mode, first, NEVER).ends
    begins, end = [end for end in ends if end >= first][:2]
    for line in some(range(begins + 1, end), step):
        inject(mode, first, line)


@pytest.mark.parametrize("mode", CAUGHT)
def test_a_second_exception_while_the_peer_rejoins_costs_no_more(mode: str) -> None:
    caught_again(mode, inject(mode).lines // 2, None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", CAUGHT)
def test_so_it_is_at_each_line_of_a_rejoin(mode: str) -> None:
    for first in some(range(1, inject(mode).lines), None):
        caught_again(mode, first, 7)


@pytest.mark.parametrize("mode", ["sync", "delayed", "streaming"])
def test_a_program_that_catches_an_exception_may_save_and_finish(mode: str) -> None:
    """As after Ctrl-C. It waits for nobody, and the other peer goes on."""

    def stops() -> Any:
        with pccl.Communicator(master.address) as comm:
            leaving: Any = Deserter(comm, "sync_shared_state", 2)
            diloco = make(leaving, model := Model(), min_peers=2, **CAUGHT[mode])
            leaving.armed = True
            with pytest.raises(Left):
                while True:
                    model.move(1.0)
                    diloco.step()
            state = diloco.state_dict()
            diloco.finish()
            return state

    def goes_on() -> None:
        with pccl.Communicator(master.address) as comm:
            diloco = make(comm, model := Model(), min_peers=2, alone="step", **CAUGHT[mode])
            while diloco.outer_step < OUTER_STEPS:
                model.move(1.0)
                diloco.step()
            diloco.finish()

    with pccl.MasterNode("127.0.0.1:0") as master:
        state, _ = together(stops, goes_on)
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        resumed = make(comm, Model(), state=state, alone="step", **CAUGHT[mode])
        assert torch.equal(resumed.state_dict()["theta"], state["theta"])
