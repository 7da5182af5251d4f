"""The first hour of a new user of this repository, in order.

Each step runs the commands of the README, in the clone's root, in processes. The parts have tests
of their own for everything else.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.waiting import PATIENCE_S

import pccl
from pccl.cli.main import main
from pccl.ext import _core

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what lies here, after the README's first command: its extension is built."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git repository")
    copy = tmp_path_factory.mktemp("clone")
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    shutil.copy(_core.__file__, copy / "pccl" / "ext")
    return copy


@pytest.fixture
def start(clone: Path) -> Iterator[Start]:
    """start(*words, **environment) runs python with these words in the clone's root."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: object, **env: str) -> subprocess.Popen[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("PCCL")}
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=clone,
            env={**known, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    """The stdout of a process that ends with that status and prints nothing to stderr."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (status, ""), out + err
    return out


# ---- the first minutes: the README's commands, where people stand ----


def test_the_installed_package_works_in_the_root_of_the_clone(start: Start, clone: Path) -> None:
    where = start("-c", "import pccl; print(pccl.__file__)")
    helps = [
        start("-m", "pccl.master", "--help"),
        start("stress/wan/bench.py", "--help"),
        start("examples/quantization.py", "--help"),
        start("examples/from_pypccl.py", "--help"),
    ]
    assert output(where) == f"{clone / 'pccl' / '__init__.py'}\n"
    for process in helps:
        assert output(process).startswith("usage: ")


def test_peers_and_a_master_in_three_terminals(start: Start) -> None:
    """Peers may start before the master."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        address = master.address
    patience = {"PCCL_CONNECT_TIMEOUT_S": "60", "PCCL_LOG_LEVEL": "INFO"}
    peers = [start("examples/all_reduce.py", PCCL_MASTER=address, **patience) for _ in range(2)]
    for peer in peers:
        assert peer.stderr is not None
        assert "attempt 1 to reach the master" in peer.stderr.readline()
    master = start("-m", "pccl.master", "--listen-address", address)
    for peer in peers:
        out, err = peer.communicate(timeout=PATIENCE_S)
        assert "the mean over 2 peers is 1.5" in out, err
    master.send_signal(signal.SIGTERM)
    assert output(master) == f"pccl master listening on {address}\n"


IN_A_TERMINAL = """
import runpy, signal
from pccl.runtime import limits
limits.QUIET_S = 0.2  # instead of 5 s
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
runpy.run_path("examples/all_reduce.py")
"""


def test_wait_for_peers_logs_how_many_are_there(start: Start) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        waits = (
            "import sys, pccl\nc = pccl.Communicator(sys.argv[1])\nc.connect(); c.wait_for_peers(5)"
        )
        peer = start("-c", waits, master.address)
        assert peer.stderr is not None
        assert peer.stderr.readline().endswith("; wait_for_peers(5): 1 of 5 are there\n")
        peer.terminate()
        peer.communicate(timeout=PATIENCE_S)


def test_one_terminal_too_few(start: Start) -> None:
    """A peer that waits says so, and names what it waits for; Ctrl-C ends it."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        peer = start("-c", IN_A_TERMINAL, PCCL_MASTER=master.address)
        assert peer.stderr is not None
        assert re.search(
            r"WARN.* another peer must join the run, which has 1", peer.stderr.readline()
        )
        peer.send_signal(signal.SIGINT)
        _, err = peer.communicate(timeout=PATIENCE_S)
        assert err.endswith("\nKeyboardInterrupt\n") and err.count("Traceback") == 1
        assert peer.returncode == -signal.SIGINT


def test_one_of_two_is_killed(start: Start, tmp_path: Path) -> None:
    """The other one waits for it, and goes on with it when it is started again."""
    with pccl.MasterNode("127.0.0.1:0") as master:

        def run(name: str) -> subprocess.Popen[str]:
            file = tmp_path / name
            return start("examples/checkpoint.py", file, "--master-address", master.address)

        run("a")
        dies = run("b")
        assert first_line(dies) == "step 10: 20 contributions\n"
        dies.kill()
        again = run("b")
        assert first_line(again).startswith("loaded revision ")
        assert first_line(again).startswith("step ")


# ---- the first own program ----


def test_the_own_model(tmp_path: Path) -> None:
    """Frozen layers, batch norm, other seeds and orders in memory; and a file to go on from."""
    torch = pytest.importorskip("torch")
    diloco = importlib.import_module("pccl.diloco")

    def train(index: int, comm: pccl.Communicator, state: Path | None) -> tuple[object, ...]:
        torch.manual_seed(index)
        nn = torch.nn
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 1))
        model[0].requires_grad_(False)
        if index:
            model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = diloco.DiLoCo(comm, model, optimizer, inner_steps=2, min_peers=2, state=state)
        for _ in range(4):
            model(torch.randn(8, 3, 6, 6)).square().mean().backward()
            outer = run.step()
        assert outer.contributors == 2 and outer.total_s > 0
        if state is None:
            run.save(tmp_path / str(index))
        held = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        return run.outer_step, run.state_digest(), held

    for state, steps in ((None, 2), (tmp_path / "1", 4)):
        with Cluster(2) as cluster:
            first, second = cluster.each(lambda i, comm, file=state: train(i, comm, file))
        assert first == second
        assert first[0] == steps


def test_the_own_event_loop() -> None:
    async def mean(comm: pccl.Communicator, matrix: np.ndarray) -> int:
        handle = comm.all_reduce_async(matrix.T)  # which lies otherwise in memory
        is_success, _, info = await handle
        assert is_success and handle.done()
        return info.world_size

    def job(index: int, comm: pccl.Communicator) -> None:
        matrix = np.full((2, 3), 1.0 + index)
        comm.broadcast(matrix, root="first")
        assert (matrix == 1).all(), "the one that came first has that index here"
        matrix += index
        assert asyncio.run(mean(comm, matrix)) == 2
        assert (matrix == 1.5).all()

    with Cluster(2) as cluster:
        cluster.each(job)


# ---- mistakes ----

MISTAKES = {
    "master --listen-address nowhere.invalid": "cannot listen on nowhere.invalid:48148",
    "master --listen-address :0": "names no host",
    "master --listen-address 127.0.0.1:99999": "is not a port number",
    "master --listen-address 127.0.0.1:0 --state {directory}": "{directory}",
    "doctor localhost:1": "nothing answers at localhost:1",
    "keys /proc/nope": "/proc/nope",
    "keys {directory} --peers 0": "not a whole number of at least 1",
    "bench all_reduce -J /proc/nope": "cannot write /proc/nope",
    "demo --output /proc/nope.png": "cannot write /proc/nope.png",
    "demo --peers 100000": "too many for this machine",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_at_the_command_line_are_answered_in_a_sentence(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status: object
    try:
        status = main(words.format(directory=tmp_path).split())
    except SystemExit as ended:  # by argparse
        status = ended.code
    said = "".join(capfd.readouterr())
    assert status in (1, 2), said
    assert MISTAKES[words].format(directory=tmp_path) in said
    assert "Traceback" not in said
    assert not any(tmp_path.iterdir())


def test_a_mistake_ends_the_process_with_its_status(start: Start) -> None:
    process = start("-m", "pccl", "keys", "/proc/nope")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert err.startswith("pccl keys: ") and len(err.splitlines()) == 1


def test_a_program_that_hosts_the_master_and_fails_ends(start: Start) -> None:
    program = "import pccl; m = pccl.MasterNode('127.0.0.1:0'); m.run(); raise OSError('mine')"
    process = start("-c", program)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.endswith("OSError: mine\n") and err.count("Traceback") == 1


def test_mistakes_in_a_program_are_answered_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="must be 'h:1' alone"):
        pccl.Communicator("tcp://h:1")
    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            x = np.array([3 + index])
            with pytest.raises(ValueError, match="the value of 'bias': NoneType is neither"):
                comm.all_reduce({"weight": x, "bias": None})  # type: ignore[dict-item]
            info = comm.all_reduce(x)
            assert x[0] == 3, "documented at the call"
            assert "the average of 3 and 4 is 3" in " ".join(
                (comm.all_reduce.__doc__ or "").split()
            )
            assert "world_size=2" in repr(info)
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(comm)

        cluster.each(job)
