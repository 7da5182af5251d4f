"""DiLoCo of sharded replicas: whatever is lost of one, all shards take the same outer steps."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers.waiting import wait_until  # noqa: E402
from training.replicas import Gone, Meeting, Part, Process, Team, in_parts  # noqa: E402, F401
from training.small import PATIENCE_S, Model, N, make, together  # noqa: E402

import pccl  # noqa: E402
from pccl import extension  # noqa: E402
from pccl.data import Ledger  # noqa: E402

pytestmark = pytest.mark.usefixtures("in_parts")

ROUNDS = 4


def move(replica: int, shard: int, k: int) -> Any:
    """The progress of a process in a round: eighths, so that sums of three are exact in fp32."""
    seed = 1000 * replica + 100 * shard + k
    return torch.randint(-8, 8, (N,), generator=torch.Generator().manual_seed(seed)) / 8


def usual(**options: Any) -> dict[str, Any]:
    return {"outer_lr": 0.5, "outer_momentum": 0.5, "min_peers": 2, **options}


def oracle(shard: int, of: list[list[int]]) -> list[Any]:
    """theta of a shard after each outer step, if these replicas are in its means."""
    theta, v, found = np.full(N, 0.25, np.float32), np.zeros(N, np.float32), []
    for k, replicas in enumerate(of):
        mean = np.mean([move(r, shard, k).numpy() for r in replicas], axis=0, dtype=np.float32)
        v = np.float32(0.5) * v + mean
        theta = theta - np.float32(0.5) * (mean + np.float32(0.5) * v)
        found.append(torch.from_numpy(theta))
    return found


def alike(*teams: Team) -> None:
    """In each outer step a shard has the same bits everywhere, and all means had as many parts."""
    for process in (process for team in teams for process in team.processes):
        for k, digest in process.digests.items():
            same = [team.processes[process.index].digests.get(k, digest) for team in teams]
            assert set(same) == {digest}, (k, process.index)
            counted = {p.contributors.get(k) for team in teams for p in team.processes} - {None}
            assert len(counted) == 1, (k, counted)


def test_each_shard_is_a_diloco_of_its_own(address: str) -> None:
    """Bit for bit that of a model which is not sharded."""
    teams = [Team(address, name).start(ROUNDS, move, usual()) for name in range(2)]
    for team in teams:
        team.check()
    alike(*teams)
    for shard in range(2):
        for k, theta in enumerate(oracle(shard, [[0, 1]] * ROUNDS), 1):
            assert torch.equal(teams[0].processes[shard].weights[k], theta)


class Halving:
    """A communicator that leaves instead of its `nth` call of `name`, once that is allowed."""

    def __init__(self, comm: pccl.Communicator, name: str, nth: int) -> None:
        self._comm, self._name, self._left = comm, name, nth
        self.allowed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                assert self.allowed.wait(PATIENCE_S)
                self._comm.close()
        return getattr(self._comm, name)


class Telling:
    """A communicator that tells when it has returned from its `nth` call of `name`."""

    def __init__(self, comm: pccl.Communicator, name: str, nth: int, tell: Any) -> None:
        self._comm, self._name, self._left, self._tell = comm, name, nth, tell

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name != self._name:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                self._tell()
            return result

        return call


def half_dead(address: str, name: int, nth: int) -> Team:
    """A replica that is in the mean of its first shard, and lost before that of its second."""
    halving: list[Halving] = []

    def wrap(comm: pccl.Communicator, index: int) -> Any:
        if index == 1:
            halving.append(Halving(comm, "all_reduce", nth))
            return halving[0]
        return Telling(comm, "all_reduce", nth, lambda: halving[0].allowed.set())

    return Team(address, name, wrap=wrap)


def test_a_replica_that_dies_half_is_in_the_mean_of_no_shard(address: str) -> None:
    """The first shard's mean has committed with it, and is made once more without it."""
    settings = usual(min_peers=3)
    teams = [Team(address, 0), half_dead(address, 1, nth=2), Team(address, 2)]
    for team in teams:
        team.start(ROUNDS, move, settings)
    teams[1].end()
    for team in (teams[0], teams[2]):
        team.check()
    alike(teams[0], teams[2])
    assert [*teams[0].processes[0].contributors.values()] == [3, 2, 2, 2]
    for shard in range(2):
        for k, theta in enumerate(oracle(shard, [[0, 1, 2], [0, 2], [0, 2], [0, 2]]), 1):
            assert torch.allclose(teams[2].processes[shard].weights[k], theta, atol=1e-6)
    with pytest.raises((Gone, pccl.KickedError)):
        teams[1].check()


MODES = {
    "int8": {"wire": "int8"},
    "delayed": {"mode": "delayed", "wire": "sparse"},
    "streaming": {"mode": "streaming", "inner_steps": 4, "fragments": 2, "overlap": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_one_is_lost_and_one_joins_in_every_mode(mode: str, address: str) -> None:
    """The last process of a replica goes in its third inner step; then another replica comes."""
    came, gone = threading.Event(), threading.Event()

    def leave(process: Process, diloco: Any) -> None:
        process.steps += 1
        if process.steps == 3 and process.index == 1:
            process.comm.close()
            gone.set()

    def wait(process: Process, diloco: Any) -> None:
        if gone.is_set() and not came.is_set():
            came.wait(0.01)  # rounds go on

    settings = usual(**MODES[mode])
    first = Team(address, 0, before=wait).start(2 * ROUNDS, move, settings)
    second = Team(address, 1, before=leave).start(2 * ROUNDS, move, settings)
    second.end()
    third = Team(address, 2, before=lambda process, diloco: came.set())
    third.start(2 * ROUNDS, move, usual(**MODES[mode], min_peers=1)).check()
    first.check()
    alike(first, third)
    assert set(first.processes[0].contributors.values()) == {2}
    assert third.processes[0].digests[2 * ROUNDS] == first.processes[0].digests[2 * ROUNDS]


def test_a_run_begins_with_all_shards_or_with_none(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica is lost when one shard has found enough to begin with, and the other has not."""
    begun = threading.Event()
    first, second = Team(address, 0), Team(address, 1)
    doomed = [process.comm for process in second.processes]
    call = extension.synchronize_once

    def halved(comm: Any, *rest: Any) -> Any:
        # if it is alone, it finds too few in any case
        if comm is doomed[1] and doomed[1].world_size > 1:
            assert begun.wait(PATIENCE_S)
            doomed[1].close()
        found = call(comm, *rest)
        if comm is doomed[0]:
            begun.set()  # it has found enough
        return found

    monkeypatch.setattr(extension, "synchronize_once", halved)
    first.start(ROUNDS, move, usual())
    wait_until(lambda: is_in(first.processes[1].comm))  # what it has is what all begin with
    second.start(ROUNDS, move, usual()).end()
    third = Team(address, 2).start(ROUNDS, move, usual())
    for team in (first, third):
        team.check()
    alike(first, third)
    assert [*first.processes[1].contributors.values()] == [2] * ROUNDS


def test_half_a_replica_that_joins_blocks_no_other(address: str) -> None:
    team = secrets.randbits(60) + 1
    half = pccl.Communicator(address, 0, team=team, team_size=2)
    with ThreadPoolExecutor(1) as pool:
        teams = [Team(address, name).start(ROUNDS, move, usual()) for name in range(2)]
        joining = pool.submit(half.connect)
        for one in teams:
            one.check()
        alike(*teams)
        assert not joining.done()
        other = pccl.Communicator(address, 1, team=team, team_size=2)
        other.connect()
        joining.result(PATIENCE_S)
    other.close()
    wait_until(lambda: kicked(half))


def is_in(comm: pccl.Communicator) -> bool:
    try:
        return comm.world_size > 0
    except pccl.PCCLError:
        return False


def kicked(comm: pccl.Communicator) -> bool:
    try:
        return comm.world_size < 0
    except pccl.KickedError:
        return True


def test_communicators_that_are_no_team_are_refused(address: str) -> None:
    why = "must be one team of as many peer groups"
    model = Model()
    model.part = Part(Meeting(2), 0)
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match=why):
        make(comm, model)  # its partner is not admitted yet, and so cannot make it

    def join(index: int, meeting: Meeting) -> None:
        model = Model()
        model.part = Part(meeting, index)
        with pccl.Communicator(address, 7, team=7, team_size=2) as comm:
            make(comm, model)

    meeting = Meeting(2)
    with pytest.raises(ValueError, match=why):
        together(lambda: join(0, meeting), lambda: join(1, meeting))


def test_options_for_unsharded_models_are_refused(address: str) -> None:
    model = Model()
    model.part = Part(Meeting(2), 0)
    with pccl.Communicator(address) as comm:
        for refused in ({"inner_steps": 2, "deadline_peers": 1}, {"ledger": Ledger(10, share=1)}):
            with pytest.raises(ValueError, match="cannot be used with a sharded model"):
                make(comm, model, **refused)
