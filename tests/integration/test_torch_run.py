"""Programs of torch.distributed in processes of their own, with pccl as their backend."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peers.ports import unused_port
from peers.processes import Report, Reporter
from programs.with_torch import sharded

from pccl.torch.creation import is_possible

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs" / "with_torch"
TOUR = PROGRAMS / "tour.py"
FUNCTIONAL = PROGRAMS / "functional.py"
PATIENCE_S = 100

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 20)]


def reports(text: str) -> list[dict[str, float]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda report: report["rank"])


def check(found: list[dict[str, float]], size: int) -> None:
    assert [report["rank"] for report in found] == list(range(size))
    assert {report["size"] for report in found} == {size}
    assert len({report["weights"] for report in found}) == 1


def ended(processes: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """The reports of the processes, which must all succeed."""
    texts = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return reports("".join(texts))


def by_torchrun(script: Path, size: int, *arguments: str, **env: str) -> str:
    """Runs it, and checks what it reports; what it has written to stderr."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    out = subprocess.run(
        [*run, "--nproc-per-node", str(size), str(script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert out.returncode == 0, out.stderr
    check(reports(out.stdout), size)
    return out.stderr


@pytest.mark.parametrize("own_master", [False, True], ids=["rank 0's master", "PCCL_MASTER"])
def test_under_torchrun(own_master: bool, address: str) -> None:
    by_torchrun(TOUR, 3, **({"PCCL_MASTER": address} if own_master else {}))


def test_a_program_that_destroys_nothing_ends_all_the_same(tmp_path: Path) -> None:
    ending = str(tmp_path / "ending")
    assert "have not left" not in by_torchrun(PROGRAMS / "careless.py", 2, ENDING=ending)


def test_functional_collectives_dtensor_fsdp2_and_hsdp() -> None:
    by_torchrun(FUNCTIONAL, 4)


def test_pipelines_zero_join_and_checkpoints_as_over_gloo(tmp_path: Path) -> None:
    by_torchrun(PROGRAMS / "libraries.py", 2, str(tmp_path))


def test_compiled_functions_and_models() -> None:
    by_torchrun(PROGRAMS / "compiled.py", 2, "pccl")


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_calls_that_do_not_match_are_named_at_every_debug_level(debug: str) -> None:
    by_torchrun(PROGRAMS / "mismatched.py", 2, TORCH_DISTRIBUTED_DEBUG=debug)


def test_a_run_gives_ranks_and_size(address: str) -> None:
    words = [sys.executable, str(TOUR), f"pccl://{address}", "2"]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    check(ended(processes), 2)


def test_replicas_of_ddp_survive_a_kill_and_take_one_in(address: str) -> None:
    """SIGKILL in the middle of a step; the newcomer is in phase; all weights have the same bits."""
    steps = 150
    started: list[Reporter] = []

    def start(peer: int) -> Reporter:
        words = PROGRAMS / "replica.py", address, 2, peer, steps
        started.append(Reporter(*words, patience_s=PATIENCE_S))
        return started[-1]

    try:
        first, second = start(0), start(1)
        first.wait_for(lambda report: report.get("step", 0) > 5)
        third = start(2)
        begun = third.wait_for(lambda report: "begins" in report)
        assert begun["begins"] > 5 and begun["rank"] == 2
        third.wait_for(lambda report: report.get("step", 0) > begun["begins"] + 5)
        second.kill()
        for survivor in (first, third):
            last = survivor.wait_for(lambda report: report.get("step") == steps - 1)
            assert last["size"] == 2 and last["loss"] < 5
            assert survivor.process.wait(PATIENCE_S) == 0
        digests: dict[int, set[str]] = {}
        for replica in started:
            for report in replica.reports:
                if "step" in report:
                    digests.setdefault(report["step"], set()).add(report["digest"])
        assert len(digests) == steps and all(len(each) == 1 for each in digests.values())
        assert {r["size"] for r in first.reports if "size" in r} == {2, 3}
    finally:
        for replica in started:
            replica.kill()


def test_a_program_of_torch_continues_without_a_killed_peer(address: str) -> None:
    """With torch's own DistributedDataParallel: nothing in it knows of pccl but the backend."""
    steps = 60
    words = PROGRAMS / "replica.py", address, 3
    peers = [Reporter(*words, i, steps, "torch", patience_s=PATIENCE_S) for i in range(3)]
    try:
        peers[0].wait_for(lambda report: report.get("step", 0) > 5)
        peers[2].kill()
        for peer in peers[:2]:
            assert peer.wait_for(lambda report: report.get("step") == steps - 1)["size"] == 2
            assert peer.process.wait(PATIENCE_S) == 0
        first, second = ([r["digest"] for r in p.reports if "step" in r] for p in peers[:2])
        assert first == second
    finally:
        for peer in peers:
            peer.kill()


@pytest.mark.parametrize("how", ["killed", "half killed", "half frozen"])
def test_replicas_of_fsdp2_survive_a_loss_and_take_one_in(how: str, address: str) -> None:
    """A replica has two processes, by gloo; when one of them is lost, the other is of no use.

    The losses are those of an undisturbed training by the same replicas, without shards.
    """
    steps = 60
    started: list[list[Reporter]] = []

    def start(replica: int) -> list[Reporter]:
        words = PROGRAMS / "sharded.py", address, 2, replica, steps
        port = unused_port()
        started.append(
            [Reporter(*words, rank, 2, port, patience_s=PATIENCE_S) for rank in range(2)]
        )
        return started[-1]

    try:
        first, second = start(0), start(1)
        first[0].wait_for(lambda report: report.get("step", 0) > 5)
        third = start(2)
        begun = [each.wait_for(lambda report: "begins" in report) for each in third]
        assert begun[0]["begins"] == begun[1]["begins"] > 5
        third[0].wait_for(lambda report: report.get("step", 0) > begun[0]["begins"] + 5)
        if how == "half frozen":
            os.kill(second[1].process.pid, signal.SIGSTOP)
        else:
            for process in second if how == "killed" else second[1:]:
                process.kill()
        for process in (*first, *third):
            last = process.wait_for(lambda report: report.get("step") == steps - 1)
            assert last["size"] == 2
            assert process.process.wait(PATIENCE_S) == 0
        if how == "half killed":
            assert second[0].process.wait(PATIENCE_S) != 0
    finally:
        for replica in started:
            for process in replica:
                process.kill()
    said = [report for replica in started for each in replica for report in each.reports]
    reports = [report for report in said if "step" in report]
    for rank in range(2):
        digests: dict[int, set[str]] = {}
        for report in reports:
            if report["rank"] == rank:
                digests.setdefault(report["step"], set()).add(report["digest"])
        assert len(digests) == steps and all(len(each) == 1 for each in digests.values())
    check_losses(reports)


def check_losses(reports: list[Report]) -> None:
    """The parameters of one process that trains on the data of all replicas."""
    reports = sorted(reports, key=lambda report: report["step"])
    errors = []
    for began_with in (0, 1):
        for layers in range(3):  # of which the lost one has still given the gradients
            losses = undisturbed(reports, began_with, layers)
            errors.append(
                max(
                    abs(r["loss"] / losses[r["step"], r["replica"], r["rank"]] - 1) for r in reports
                )
            )
    assert min(errors) < 1e-4, errors


def undisturbed(
    reports: list[Report], began_with: int, layers: int
) -> dict[tuple[int, int, int], float]:
    """The loss of each step, of the data of each process, in a training without shards."""
    model = sharded.new_model(began_with)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    found: dict[tuple[int, int, int], float] = {}
    before: set[int] = set()
    for step, said in itertools.groupby(reports, key=lambda report: report["step"]):
        present = {report["replica"] for report in said}
        contributors = [present] * (2 - layers) + [present | before] * layers  # the last one first
        before = present
        optimizer.zero_grad()
        for replica in contributors[-1]:
            for rank in range(2):
                loss = sharded.loss_of(model, replica, rank, step)
                found[step, replica, rank] = loss.item()
                for layer, of in zip(model[::2], contributors, strict=True):
                    if replica in of:
                        given = torch.autograd.grad(
                            loss / 2 / len(of), list(layer.parameters()), retain_graph=True
                        )
                        for parameter, gradient in zip(layer.parameters(), given, strict=True):
                            parameter.grad = (
                                gradient if parameter.grad is None else parameter.grad + gradient
                            )
        optimizer.step()
    return found


@pytest.mark.skipif(not is_possible(), reason="torch before 2.14 has no backends in Python")
def test_one_of_several_backends_of_a_group() -> None:
    by_torchrun(PROGRAMS / "mixed.py", 2)


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch before 2.14 does not have it")
def test_torch_s_own_reconfiguration_takes_a_newcomer_in(address: str, tmp_path: Path) -> None:
    """A newcomer has its handle before anybody admits it."""

    def start(number: int, first: int) -> Reporter:
        words = PROGRAMS / "reconfigured.py", address, tmp_path, number, first, 2
        return Reporter(*words, patience_s=PATIENCE_S)

    def ask(uuid: int, members: list[Reporter]) -> list[list[float]]:
        handles = [next(r["handle"] for r in member.reports if "handle" in r) for member in members]
        (tmp_path / "new").write_text(json.dumps(handles))
        (tmp_path / "new").rename(tmp_path / str(uuid))
        return [m.wait_for(lambda r: r.get("uuid") == uuid)["numbers"] for m in members]

    started = [start(0, 1), start(1, 1)]
    try:
        for member in started:
            member.wait_for(lambda report: "handle" in report)
        assert ask(1, started[::-1]) == [[1.0, 0.0]] * 2
        started.append(start(2, 2))
        started[2].wait_for(lambda report: "handle" in report)
        assert ask(2, [started[2], *started[:2]]) == [[2.0, 0.0, 1.0]] * 3
        (tmp_path / "end").touch()
        assert [member.process.wait(PATIENCE_S) for member in started] == [0, 0, 0]
    finally:
        for member in started:
            member.kill()
