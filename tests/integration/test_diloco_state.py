"""DiLoCo: what is not trained, being alone, checkpoints in files, and the times of a round."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.small import PATIENCE_S, Deserter, Left, Model, make, together  # noqa: E402

import pccl  # noqa: E402
from pccl import extension  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402
from pccl.diloco.pace import Reminder  # noqa: E402
from pccl.protocol import messages as m  # noqa: E402
from pccl.protocol.master import inputs  # noqa: E402
from pccl.protocol.master.eventlog import Line  # noqa: E402
from pccl.runtime.server.eventlog import read  # noqa: E402


class Net(torch.nn.Module):
    """A frozen layer, some of it where no entry can be, batch norm, and other buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.turned = torch.nn.Parameter(torch.randn(3, 2).t(), requires_grad=False)
        self.flags = torch.nn.Parameter(torch.rand(5) > 0.5, requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("peak", torch.tensor([-torch.inf, 0.1]))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.base(x)))

    def learn(self, seed: int) -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) + seed
        self(x).pow(2).sum().backward()

    def frozen(self) -> list[Any]:
        return [self.base.weight, self.base.bias, self.turned, self.flags]

    def persistent(self) -> dict[str, Any]:
        found = {n: b.clone() for n, b in self.named_buffers() if n != "cache"}
        assert len(found) == 7
        return found


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def join(comm: pccl.Communicator, model: Any, **options: Any) -> DiLoCo:
    return DiLoCo(comm, model, optimizer_of(model), **{"inner_steps": 1, **options})


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- what is not trained ----


@pytest.mark.parametrize("mode", ["mean", "first", "local"])
def test_a_newcomer_gets_frozen_parameters_and_buffers(address: str, mode: str) -> None:
    """Frozen parameters in any case; local buffers are those of one that was there."""
    alone = threading.Event()

    def veteran() -> Any:
        model = Net(1)
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model, buffers=mode)
            while True:
                model.learn(1)
                before = model.persistent()
                outer = diloco.step()
                assert outer is not None
                alone.set()
                if outer.admitted:
                    offered.append(before if mode == "local" else Net(1).persistent())
                if outer.contributors == 2:
                    return model, diloco.state_digest()

    def newcomer() -> Any:
        assert alone.wait(PATIENCE_S)
        model = Net(2)
        cache = model.cache.clone()
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model, buffers=mode)
            received.append(model.persistent())
            model.learn(2)
            outer = diloco.step()
            assert outer is not None and outer.contributors == 2
            assert torch.equal(model.cache, cache)
            return model, diloco.state_digest()

    offered: list[Any] = []
    received: list[Any] = []
    (ours, digest), (theirs, other_digest) = together(veteran, newcomer)
    assert digest == other_digest
    assert same(received[0], offered[0])
    for mine, own, first in zip(ours.frozen(), theirs.frozen(), Net(1).frozen(), strict=True):
        assert torch.equal(mine, first) and torch.equal(own, first)
    assert same(ours.persistent(), theirs.persistent()) is (mode != "local")


@pytest.mark.parametrize("what", ["base.weight", "turned", "flags", "norm.running_var", "seen"])
def test_the_digest_covers_frozen_parameters_and_buffers(address: str, what: str) -> None:
    digests = []
    for change in (False, True):
        model = Net(1)
        if change:
            target = model.state_dict()[what]
            target.copy_(~target if target.dtype == torch.bool else target + 1)
        with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
            digests.append(join(comm, model).state_digest())
    assert digests[0] != digests[1]


def test_a_changed_frozen_parameter_is_found_when_a_peer_joins(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And in no other round, since hashing it costs time."""
    ready, changed = threading.Barrier(2), threading.Event()

    def incumbent(changes: bool) -> Callable[[], Any]:
        def body() -> Any:
            model = Net(1)
            with pccl.Communicator(address) as comm:
                diloco = join(comm, model, min_peers=2)
                if changes:
                    model.base.weight.data += 1
                ready.wait(PATIENCE_S)
                changed.set()
                while True:
                    model.learn(1)
                    outer = diloco.step()
                    assert outer is not None
                    if outer.contributors == 3:
                        return model

        return body

    def newcomer() -> Any:
        assert changed.wait(PATIENCE_S)
        model = Net(1)
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model)
            model.learn(1)
            diloco.step()
            return model

    pccl_logger = logging.getLogger("pccl")
    pccl_logger.addHandler(caplog.handler)
    try:
        models = together(incumbent(False), incumbent(True), newcomer)
    finally:
        pccl_logger.removeHandler(caplog.handler)
    assert all(torch.equal(m.base.weight, models[2].base.weight) for m in models)
    assert "'diloco.frozen.base.weight'" in caplog.text


def test_buffers_are_averaged_and_constants_keep_their_bits(address: str) -> None:
    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Net(1)
            with pccl.Communicator(address) as comm:
                diloco = join(comm, model, min_peers=3)
                first.append(model.persistent())
                model.norm.running_mean.fill_(own)
                model.norm.num_batches_tracked.fill_(5 + own)
                model.peak[0] = own
                model.wave = model.wave + own  # another tensor in its place
                model.seen.fill_(True)
                model.learn(1)
                model.norm.running_mean.fill_(own)
                diloco.step()
                return model.persistent(), diloco.shared_state.tensor_infos

        return run

    first: list[Any] = []
    results = together(*(body(own) for own in (1, 2, 6)))
    for found, entries in results:
        assert same(found, results[0][0])
        assert torch.equal(found["norm.running_mean"], torch.full((4,), 3.0))
        assert found["norm.num_batches_tracked"] == 5 + 3 + 1
        assert found["peak"][0] == 3.0
        assert torch.equal(found["wave"], first[0]["wave"] + 3)
        assert found["seen"]
        assert torch.equal(found["wide"], first[0]["wide"])
        assert torch.equal(found["peak"][1], first[0]["peak"][1])
        assert not any("frozen" in entry.name for entry in entries)


@pytest.mark.parametrize("mode", ["first", "local"])
def test_buffers_of_the_first_or_of_each(address: str, mode: str) -> None:
    def body(own: int) -> Callable[[], Any]:
        def run() -> Any:
            model = Net(1)
            with pccl.Communicator(address) as comm:
                diloco = join(comm, model, min_peers=2, buffers=mode)
                model.learn(own)
                model.norm.running_mean.fill_(own)
                diloco.step()
                return model.norm.running_mean[0].item(), diloco.state_digest()

        return run

    (ours, digest), (theirs, other_digest) = together(body(1), body(2))
    assert digest == other_digest
    assert (ours, theirs) == (1, 2) if mode == "local" else ours == theirs in (1, 2)


@pytest.mark.parametrize(
    ("mode", "call"), [("mean", "all_reduce"), ("first", "all_reduce"), ("first", "broadcast")]
)
def test_a_peer_may_be_lost_where_buffers_are_shared(address: str, mode: str, call: str) -> None:
    def survivor() -> Any:
        model = Net(1)
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model, min_peers=3, buffers=mode)
            while diloco.outer_step < 3:
                model.learn(id(model) % 7)
                diloco.step()
            return diloco.state_digest(), model.persistent()

    def deserter() -> None:
        model = Net(1)
        with pytest.raises(Left), pccl.Communicator(address) as comm:
            leaving = Deserter(comm, call, 2)
            diloco = join(leaving, model, min_peers=3, buffers=mode)  # type: ignore[arg-type]
            leaving.armed = True
            while True:
                model.learn(3)
                diloco.step()

    ours, theirs, _ = together(survivor, survivor, deserter)
    assert ours[0] == theirs[0] and same(ours[1], theirs[1])


def test_a_buffer_that_changes_its_size_is_named(address: str) -> None:
    model = Net(1)
    with pccl.Communicator(address) as comm:
        diloco = join(comm, model)
        model.peak = torch.zeros(3)
        model.learn(1)
        with pytest.raises(ValueError, match=r"'peak' is of shape \[3\], and was of shape \[2\]"):
            diloco.step()


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ({"buffers": "mean"}, {"buffers": "first"}, "diloco.buffers.mean.float32"),
        ({"buffers": "mean"}, {"buffers": "local"}, "diloco.buffers.mean.float32"),
        ({}, {"alone": "wait"}, "peers_to_go_on is 1 in the run and 2 here"),
    ],
)
def test_peers_that_disagree_about_it_are_refused(
    address: str, ours: dict[str, Any], theirs: dict[str, Any], why: str
) -> None:
    ready, refused = threading.Event(), threading.Event()

    def incumbent() -> None:
        model = Net(1)
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model, **ours)
            ready.set()
            while not refused.is_set():
                model.learn(1)
                diloco.step()

    def misfit() -> None:
        assert ready.wait(PATIENCE_S)
        try:
            with (
                pccl.Communicator(address) as comm,
                pytest.raises((ValueError, pccl.KickedError), match=why),
            ):
                join(comm, Net(1), **theirs)
        finally:
            refused.set()

    together(incumbent, misfit)


@pytest.mark.parametrize("options", [{"buffers": "median"}, {"alone": "give up"}])
def test_other_words_are_refused(address: str, options: dict[str, Any]) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match=next(iter(options))):
        join(comm, Net(1), **options)


# ---- alone ----


def test_a_lone_peer_with_alone_step_ends(address: str, warnings: list[str]) -> None:
    model = Model(1.0)
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, outer_momentum=0.0, alone="step")
        while diloco.outer_step < 2:
            model.move(1.0)
            outer = diloco.step()
            assert outer is not None and outer.contributors == 1
    torch.testing.assert_close(model.flat(), torch.full_like(model.flat(), 1 - 2 * 0.7))
    (said,) = warnings
    assert "alone='step'" in said and "only its own pseudo-gradient" in said


def test_a_lone_peer_that_trains_on_logs_it_once(address: str, warnings: list[str]) -> None:
    model = Model()
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model)
        for _ in range(3):
            model.move(1.0)
            diloco.step()
        assert diloco.outer_step == 0
    (said,) = warnings
    assert "is alone in its group at outer step 0" in said and "until another peer joins" in said


def test_a_group_that_waits_takes_no_step_with_fewer(address: str, warnings: list[str]) -> None:
    """Three begin, one leaves: the two that are left are no less than they want to be with it."""
    left = threading.Event()

    def survivor() -> Any:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=3, alone="wait")
            outers = []
            while diloco.outer_step < 3:
                model.move(1.0)
                outers.append(diloco.step())
            return [outer.contributors for outer in outers], diloco.state_digest()

    def leaver() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=3, alone="wait")
            model.move(1.0)
            diloco.step()
        left.set()

    def successor() -> Any:
        assert left.wait(PATIENCE_S)
        model = Model(7.0)
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, min_peers=3, alone="wait")
            contributors = []
            while diloco.outer_step < 3:
                model.move(1.0)
                outer = diloco.step()
                assert outer is not None
                contributors.append(outer.contributors)
            return contributors, diloco.state_digest()

    ours, theirs, _, newcomers = together(survivor, survivor, leaver, successor)
    assert ours == theirs and ours[0] == [3, 3, 3]
    assert newcomers == ([3, 3], ours[1])
    said = [text for text in warnings if "waits for others before" in text]
    assert said and "it has 2 peers and needs 3" in said[0]


def test_waiting_for_others_does_not_poll(tmp_path: Path) -> None:
    """It asks once whether others are there, before it begins and when it is alone."""
    log, left = tmp_path / "events", threading.Event()

    def peer(steps: int) -> int:
        model = Model()
        with pccl.Communicator(master.address) as comm:
            diloco = make(comm, model, min_peers=2, alone="wait")
            for _ in range(steps):
                model.move(1.0)
                diloco.step()
            return extension.member(comm).number

    def later(job: Callable[[], object]) -> None:
        threading.Event().wait(0.5)  # in which whoever polls does it again and again
        job()

    def leaver() -> None:
        peer(1)
        left.set()

    def successor() -> None:
        assert left.wait(PATIENCE_S)
        later(lambda: peer(1))

    with pccl.MasterNode("127.0.0.1:0", event_log=log) as master:
        number, _, _ = together(lambda: peer(2), lambda: later(leaver), successor)
    heard = [line for _, line in read(log) if isinstance(line, Line) and line.peer == number]
    said = [line.input.message for line in heard if isinstance(line.input, inputs.Received)]
    asked = [message for message in said if isinstance(message, m.PendingVote)]
    assert 0 < len(asked) <= 6  # two waits, and once in each of two rounds


def test_waiting_for_the_first_peers_is_logged(
    address: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.runtime.limits.QUIET_S", 0.1)

    def first() -> None:
        with pccl.Communicator(address) as comm:
            make(comm, Model(), min_peers=2)

    def second() -> None:
        wait_until(lambda: bool(warnings))
        first()

    together(first, second)
    assert warnings[0].endswith("; min_peers is 2 (or more, for another peer), 1 here")


def test_reminders_come_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pccl.diloco.pace.time.monotonic", lambda: now[0])
    said = []
    log = logging.Logger("test")
    log.addFilter(lambda record: said.append(now[0]) is None)
    reminder = Reminder(log)
    for _ in range(100):
        reminder.warn("late")
        now[0] += 1
    assert said == [100, 105, 115, 135, 175]
    reminder.reset()
    reminder.warn("late again")
    assert len(said) == 6


# ---- the times of a round ----


def test_a_round_reports_where_its_time_went(address: str) -> None:
    def body() -> None:
        model = Net(1)
        with pccl.Communicator(address) as comm:
            diloco = join(comm, model, min_peers=2)
            for _ in range(2):
                threading.Event().wait(0.05)  # so that there is something to measure
                model.learn(1)
                outer = diloco.step()
                assert outer is not None
                parts = outer.reduce_s, outer.admit_s, outer.sync_s
                assert all(seconds > 0 for seconds in parts)
                assert sum(parts) <= outer.total_s
                assert outer.compute_s > 0.05

    together(body, body)


# ---- files ----


def test_a_state_file_is_enough_to_resume_a_run(address: str, tmp_path: Path) -> None:
    path = tmp_path / "state"

    def fresh(seed: int, **options: Any) -> tuple[Net, DiLoCo]:
        model = Net(seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        return model, DiLoCo(comm, model, optimizer, inner_steps=1, alone="step", **options)

    with pccl.Communicator(address) as comm:
        model, diloco = fresh(1)
        for seed in range(4):
            if seed == 2:
                diloco.save(path)
            model.learn(seed)
            diloco.step()
        uninterrupted = diloco.outer_step, diloco.state_digest()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]

    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        model, diloco = fresh(2, state=path)
        for seed in range(2, 4):
            model.learn(seed)
            diloco.step()
        assert (diloco.outer_step, diloco.state_digest()) == uninterrupted


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size")
def test_a_file_that_cannot_be_written_leaves_the_old_one(address: str, tmp_path: Path) -> None:
    import resource

    path = tmp_path / "state"
    with pccl.Communicator(address) as comm:
        diloco = make(comm, Model())
        diloco.save(path)
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            with pytest.raises(OSError, match=f"too large: '{path}'"):
                diloco.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "state"
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        join(comm, Net(1)).save(path)
    return path


def test_a_damaged_file_is_refused(address: str, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    theta = whole.index(Net(1).head.weight.detach().numpy().tobytes())
    flipped = bytearray(whole)
    flipped[theta] ^= 1
    path = tmp_path / "state"
    with pccl.Communicator(address) as comm:
        for content in (b"", whole[: len(whole) // 2], b"no file of ours" * 9, bytes(flipped)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="state is damaged, or was not written by"):
                join(comm, Net(1), state=path)
        with pytest.raises(FileNotFoundError):
            join(comm, Net(1), state=tmp_path / "nothing")
        torch.save({"theta": torch.zeros(3)}, path)
        with pytest.raises(ValueError, match="it has no 'buffers'"):
            join(comm, Net(1), state=path)


def test_a_file_of_something_else_is_refused_by_name(address: str, saved: Path) -> None:
    class Taller(Net):
        def __init__(self) -> None:
            super().__init__(1)
            self.turned = torch.nn.Parameter(torch.zeros(5, 2), requires_grad=False)

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__(1)
            self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    class Without(Net):
        def __init__(self) -> None:
            super().__init__(1)
            del self.flags

    with pccl.Communicator(address) as comm:
        for model, why in (
            (Taller(), r"'turned' has shape \[2, 3\] in the state and \[5, 2\] here"),
            (Counting(), r"'int64' has shape \[2\] in the state and \[5\] here"),
            (Without(), "'flags' is only in the state"),
        ):
            with pytest.raises(ValueError, match=why):
                join(comm, model, state=saved)
        model = Net(3)
        before = model.persistent()
        adam = torch.optim.AdamW(model.head.parameters())
        with pytest.raises(ValueError, match="the inner optimizer SGD, and this peer's is AdamW"):
            DiLoCo(comm, model, adam, inner_steps=1, state=saved)
        fewer = torch.optim.SGD(model.head.parameters(), lr=0.01)
        with pytest.raises(ValueError, match="optimizer of the state does not fit"):
            DiLoCo(comm, model, fewer, inner_steps=1, state=saved)
        assert same(model.persistent(), before)
        anew = {**torch.load(saved), "optimizer": None}
        DiLoCo(comm, model, adam, inner_steps=1, state=anew)
        assert all(map(torch.equal, model.frozen(), Net(1).frozen()))


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in nested dicts and lists anything is, containers included."""
    if path:
        yield path
    children: Any = ()
    if isinstance(state, dict):
        children = state.items()
    elif isinstance(state, list):
        children = enumerate(state)
    for key, child in children:
        yield from leaves(child, (*path, key))


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


def wrongs(value: Any) -> list[Any]:
    """A value of a type that no state has."""
    if not torch.is_tensor(value):
        return [object(), "?", torch.zeros(2), *([-1] if isinstance(value, int) else [])]
    if value.dtype == torch.uint8:
        return [None, "?", {}, value[1:], torch.zeros(5, dtype=torch.uint8)]
    grown = torch.cat([value.flatten(), value.flatten()[:1]])
    return [None, "?", {}, 3, grown, value.flatten()[:-1], value[None, None]]


@pytest.mark.parametrize("options", [{}, {"mode": "delayed", "wire": "int8"}], ids=str)
def test_a_state_with_anything_wrong_in_it_is_refused_and_changes_nothing(
    address: str, options: dict[str, Any]
) -> None:
    def place(state: Any, path: tuple[Any, ...]) -> Any:
        for key in path[:-1]:
            state = state[key]
        return state

    with pccl.Communicator(address) as comm:
        model = Net(1)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        diloco = DiLoCo(comm, model, optimizer, inner_steps=1, alone="step", **options)
        for seed in range(3):
            model.learn(seed)
            diloco.step()
        state, accepted = diloco.state_dict(), []
        for path in leaves(state):
            if path[:2] == ("optimizer", "state") and len(path) > 2:
                continue  # torch's own, which it does not check
            for wrong in wrongs(place(state, path)[path[-1]]):
                if path == ("clock",) and getattr(wrong, "numel", int)() > 2:
                    continue  # that of a run with more fragments
                broken, other = copy.deepcopy(state), Net(2)
                place(broken, path)[path[-1]] = wrong
                inner = optimizer_of(other)
                before = copy.deepcopy((other.state_dict(), inner.state_dict()))
                try:
                    DiLoCo(comm, other, inner, inner_steps=1, state=broken, **options)
                except ValueError:
                    assert alike([other.state_dict(), inner.state_dict()], [*before]), path
                else:
                    accepted.append((path, wrong))
        assert not accepted


# ---- loss scaling ----


def test_a_scaler_steps_and_a_step_that_it_skips_counts(address: str) -> None:
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pccl.Communicator(address) as comm:
        diloco = make(comm, model, inner_steps=3)
        for grad in (4.0, torch.inf, 2.0):
            scaler.scale(torch.zeros(()))
            model.move(grad)
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()  # unscaling is in place
            outer = diloco.step(scaler)
        assert outer is not None and diloco.inner_step == 0
    assert torch.equal(model.flat(), torch.full_like(model.flat(), -2.0))
    assert scaler.get_scale() == 2.0
