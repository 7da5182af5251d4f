"""Programs of torch, transformers, accelerate and Lightning, unmodified but for their backend.

A process is killed in the middle, and what happens then runs to its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from peers.ports import unused_port
from peers.waiting import Gate, wait_until

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs" / "with_torch"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE_S = 110

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]

Report = dict[str, Any]


class Launched:
    """A launcher, and what the programs that it starts report, one after the other."""

    def __init__(self, *words: object, reports: queue.Queue[Report] | None = None, **env: str):
        self.reports: queue.Queue[Report] = reports or queue.Queue()
        self.seen: list[Report] = []
        self._process = subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at = line.find('{"pid"')  # a launcher may write the number of the process before it
            if at >= 0:
                report = json.loads(line[at:])
                self.seen.append(report)
                self.reports.put(report)

    def wait_for(self, wanted: Callable[[Report], bool]) -> Report:
        while not wanted(report := self.reports.get(timeout=PATIENCE_S)):
            pass
        return report

    def ended(self) -> int:
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """The launcher, and all that it has started."""
        self._process.kill()
        self._process.wait()
        for pid in {report["pid"] for report in self.seen}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends whatever is left."""
        self._process.terminate()  # so that it ends those that have reported nothing yet
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self.kill()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*words: object, **more: Any) -> Launched:
        started.append(Launched(*words, **more))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[str], Gate]]:
    """Makes gates, by name."""
    with ExitStack() as made:

        def make(name: str) -> Gate:
            gate = Gate(tmp_path / name)
            made.callback(gate.open)
            return gate

        yield make


def after(gates: dict[int, Gate]) -> dict[str, str]:
    """The environment of programs that wait at gates after these epochs."""
    return {"GATES": json.dumps({str(epoch): str(gate.path) for epoch, gate in gates.items()})}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the program needs {package}")


@pytest.mark.parametrize(
    "program",
    [
        "ddp",
        "fsdp2",
        pytest.param("hf_trainer", marks=needs("transformers")),
        pytest.param("accelerated", marks=needs("accelerate")),
        pytest.param("lightning_fit", marks=needs("lightning")),
    ],
)
def test_torchrun_starts_all_again_from_the_snapshot(
    program: str,
    launch: Callable[..., Launched],
    gate: Callable[[str], Gate],
    tmp_path: Path,
) -> None:
    """They find the new master, though torchrun's store still names the one before."""
    steps, save = 30, 5
    last, saved = 2 * save + 1, gate("saved twice")
    words = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 2]
    script = PROGRAMS / f"{program}.py"
    words += [script, steps, save, tmp_path / "saved"]
    launched = launch(*TORCHRUN, *words, **after({last: saved}))
    begun = [launched.wait_for(lambda report: "begins" in report)["begins"] for _ in range(2)]
    assert begun == [0, 0]
    doomed = launched.wait_for(lambda r: r.get("epoch") == last and r["rank"] == 1)
    os.kill(doomed["pid"], signal.SIGKILL)
    saved.open()
    again = [launched.wait_for(lambda report: "begins" in report)["begins"] for _ in range(2)]
    assert again[0] == again[1] >= 2 * save
    assert launched.ended() == 0
    ends = [report for report in launched.seen if report.get("epoch") == steps - 1]
    assert {report["rank"] for report in ends[-2:]} == {0, 1}
    assert len({report["digest"] for report in ends[-2:] if "digest" in report}) < 2
    assert {report["size"] for report in ends[-2:]} == {2}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_elastic_torchrun_survives_a_loss_and_takes_a_new_node(
    launch: Callable[..., Launched], gate: Callable[[str], Gate], tmp_path: Path
) -> None:
    """One is killed: the others go on in the same step. One joins: all begin from the snapshot."""
    epochs, save, reports, port = 30, 5, queue.Queue[Report](), unused_port()
    one_is_lost, one_has_joined = gate("one is lost"), gate("one has joined")
    waits = after({save + 1: one_is_lost, 4 * save: one_has_joined})
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options = ["--nnodes", "2:3", "--nproc-per-node", 1, "--max-restarts", 2, *rendezvous]
    options += ["--rdzv-conf", "last_call_timeout=3", "--local-addr", "127.0.0.1"]
    words = [*TORCHRUN, *options, PROGRAMS / "ddp.py", epochs, save, tmp_path / "saved"]

    def node() -> Launched:
        shared = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # with it, torch 2.13 takes no node in
        return launch(*words, reports=reports, **waits, **{shared: "1"})

    nodes = [node()]
    wait_until(lambda: listens(port))
    nodes += [node() for _ in range(2)]

    def may_be_lost(report: Report) -> bool:
        """Neither torchrun's rendezvous nor the group's master is there."""
        where = {each["pid"] for each in nodes[0].seen}
        return report.get("epoch", 0) > save and report["rank"] > 0 and report["pid"] not in where

    doomed = nodes[0].wait_for(may_be_lost)
    (lost,) = [each for each in nodes if doomed["pid"] in {r["pid"] for r in each.seen}]
    lost.kill()
    one_is_lost.open()
    alone = nodes[0].wait_for(lambda report: "epoch" in report and report["size"] == 2)
    assert alone["epoch"] <= doomed["epoch"] + 2
    nodes.remove(lost)
    nodes.append(node())
    begun = nodes[0].wait_for(lambda report: "begins" in report and report["begins"] > 0)
    one_has_joined.open()
    assert begun["size"] == 3 and begun["begins"] > doomed["epoch"] - save
    assert [each.ended() for each in nodes] == [0, 0, 0]
    last = [r for each in nodes for r in each.seen if r.get("epoch") == epochs - 1]
    assert len(last) == 3 and len({report["digest"] for report in last}) == 1


def test_pccl_run_continues_without_a_copy(
    launch: Callable[..., Launched], gate: Callable[[str], Gate], tmp_path: Path
) -> None:
    """torch's own class admits no newcomers, so the copy is not started again."""
    epochs, one_is_lost = 20, gate("one is lost")
    script = PROGRAMS / "ddp.py", epochs, 5, tmp_path / "saved"
    run = [sys.executable, "-m", "pccl", "run", "-n", 3, "--restarts", 0, "--", sys.executable]
    launched = launch(*run, *script, BEGIN="3", **after({6: one_is_lost}))
    doomed = launched.wait_for(lambda report: report.get("epoch") == 6 and report["rank"] == 2)
    os.kill(doomed["pid"], signal.SIGKILL)
    one_is_lost.open()
    assert launched.ended() == 128 + signal.SIGKILL
    last = [report for report in launched.seen if report.get("epoch") == epochs - 1]
    assert [report["size"] for report in last] == [2, 2]
    assert len({report["digest"] for report in last}) == 1
    assert doomed["pid"] not in {report["pid"] for report in last}


def test_a_replica_of_hsdp_continues_without_the_other(
    launch: Callable[..., Launched], gate: Callable[[str], Gate], tmp_path: Path
) -> None:
    """A mesh of 2 x 2; no launcher, which would end the others. They wait for it in a step."""
    steps, reports, port = 20, queue.Queue[Report](), unused_port()
    where = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, PROGRAMS / "fsdp2.py", steps, steps + 1, tmp_path / "saved", "gloo"]
    never = after({6: gate("until they are killed")})
    processes = [
        launch(*words, reports=reports, RANK=str(rank), **where, **(never if rank > 1 else {}))
        for rank in range(4)
    ]
    processes[0].wait_for(lambda report: report.get("epoch") == 6 and report["rank"] == 3)
    for lost in processes[2:]:
        lost.kill()
    assert [each.ended() for each in processes[:2]] == [0, 0]
    for rank in range(2):  # as long as both were there, their shards were equal
        mine, others = (
            {r["epoch"]: r["shard"] for r in processes[i].seen if "shard" in r}
            for i in (rank, rank + 2)
        )
        assert len(mine) == steps and len(others) > 5
        assert [mine[epoch] for epoch in others] == list(others.values())
