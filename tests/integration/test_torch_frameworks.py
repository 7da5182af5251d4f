"""Frameworks on pccl, unchanged; each test runs where the framework is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import in_threads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@needs("torchft")
def test_a_group_of_torchft_is_configured_anew_after_a_loss() -> None:
    from pccl.torch.torchft import ProcessGroupPCCL

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    lost = threading.Barrier(3)

    def replica(rank: int) -> float:
        group = ProcessGroupPCCL(timeout=timedelta(seconds=20))
        address = f"localhost:{store.port}"
        group.configure(f"{address}/1", f"replica {rank}", rank, 3)
        one = torch.ones(1)
        group.allreduce([one], dist.AllreduceOptions()).wait()
        assert one.item() == 3
        lost.wait()
        if rank == 0:  # the master is here
            group.abort()
            return 0
        with pytest.raises(RuntimeError, match=r"Connection closed by peer|timed out|master"):
            group.allgather([[torch.ones(1) for _ in range(3)]], [one], None).wait()
        group.configure(f"{address}/2", f"replica {rank}", rank - 1, 2)
        one = torch.ones(1)
        group.allreduce([one], dist.AllreduceOptions()).wait()
        group.shutdown()
        return one.item()

    assert in_threads([lambda r=r: replica(r) for r in range(3)]) == [0, 2, 2]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"


def ended(*commands: list[str], **env: str) -> str:
    """The output of the commands, all of which must succeed."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    texts = [process.communicate(timeout=160)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return "".join(texts)


def launched(script: str, *words: str, **env: str) -> str:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return ended([*run, str(EXAMPLES / script), *words], **env)


@needs("transformers")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    said = launched("transformers_trainer.py", str(tmp_path))
    assert "rank 0 of 2 by pccl" in said and "rank 1 of 2 by pccl" in said


@needs("accelerate")
def test_a_loop_of_accelerate_that_names_no_backend() -> None:
    said = launched("accelerate_loop.py", PCCL_ACCELERATE="1")
    assert len(set(re.findall(r"by pccl, loss (\S+)", said))) == 1


@needs("lightning")
def test_lightning_ddp() -> None:
    said = launched("lightning_ddp.py")
    assert len(set(re.findall(r"by pccl, loss (\S+)", said))) == 1


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_diloco_in_the_trainer_of_a_framework(framework: str, address: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = str(EXAMPLES / f"{framework}_diloco.py")

    def digests(steps: int) -> tuple[set[str], set[str]]:
        """The outer steps, and the shared states, after `steps` steps of each trainer."""
        commands = [[script, str(tmp_path / name), address, str(steps)] for name in ("a", "b")]
        found = re.findall(r"outer steps (\d+): (\S+)", ended(*commands))
        assert len(found) == 2
        return {outer for outer, _ in found}, {digest for _, digest in found}

    outer, states = digests(20)
    assert outer == {"2"} and len(states) == 1
    outer, states = digests(40)  # both go on from their checkpoints
    assert outer == {"4"} and len(states) == 1
