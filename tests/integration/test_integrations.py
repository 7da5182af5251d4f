"""The recipes of examples/integrations, with the real packages where these are installed.

With RECORD_RUNS=1, what has been run goes into docs/howto/integrations.json, of which
docs/generate.py makes the table of the page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from peers.cluster import Cluster
from peers.waiting import wait_until

import pccl

PATIENCE_S = 300
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
RECORD = ROOT / "docs" / "howto" / "integrations.json"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


def record(packages: str, run: str, result: str, change: str) -> None:
    """Notes a run that has succeeded, with the versions of the packages, for the documentation."""
    if os.environ.get("RECORD_RUNS") == "1":
        rows = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        clients = ", ".join(f"{name} {version(name)}" for name in packages.split())
        rows[run] = [clients, result, change]
        RECORD.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")


class Program:
    """A program in a process group of its own, and the lines that it has printed."""

    def __init__(self, *words: object, **env: str) -> None:
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._told:
                self.lines.append(line)
                self._told.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that has this; of a program that has ended before, an error."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._told:
            self._told.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE_S)
            match = found()
        assert match is not None, "".join(self.lines)
        return match

    def ended(self) -> str:
        """All that it has printed, when it has ended well."""
        assert self._process.wait(PATIENCE_S) == 0, "".join(self.lines)
        self._reader.join(PATIENCE_S)
        return "".join(self.lines)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._reader.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, which ends with the test at the latest."""
    with ExitStack() as stack:

        def one(*words: object, **env: str) -> Program:
            program = Program(*words, **env)
            stack.callback(program.close)
            return program

        yield one


def kill(found: re.Match[str]) -> None:
    """Kills the process with the number in the first group of a match."""
    os.kill(int(found[1]), signal.SIGKILL)


# ---- data parallel, by the backend ----


@needs("transformers", "accelerate")
def test_the_trainer_of_transformers(start: Start, tmp_path: Path) -> None:
    said = start(*TORCHRUN, EXAMPLES / "transformers_trainer.py", tmp_path).ended()
    assert "rank 0 of 2 by pccl" in said and "rank 1 of 2 by pccl" in said
    record(
        "transformers",
        "[a Trainer](../../examples/integrations/transformers_trainer.py), 2 processes by torchrun",
        "trains, logs, saves",
        '`ddp_backend="pccl"`, `pccl.torch.use_with_accelerate()`',
    )


@needs("accelerate")
def test_a_loop_of_accelerate_that_names_no_backend(start: Start) -> None:
    said = start(*TORCHRUN, EXAMPLES / "accelerate_loop.py", PCCL_ACCELERATE="1").ended()
    assert len(set(re.findall(r"by pccl, loss (\S+)", said))) == 1
    record(
        "accelerate",
        "[a loop](../../examples/integrations/accelerate_loop.py), 2 processes by torchrun",
        "same loss on both",
        "`PCCL_ACCELERATE=1` in the environment",
    )


@needs("lightning")
def test_lightning_ddp(start: Start) -> None:
    said = start(*TORCHRUN, EXAMPLES / "lightning_ddp.py").ended()
    assert len(set(re.findall(r"by pccl, loss (\S+)", said))) == 1
    record(
        "lightning",
        "[a Trainer](../../examples/integrations/lightning_ddp.py) with `DDPStrategy`, "
        "2 processes by torchrun",
        "same loss on both",
        '`process_group_backend="pccl"`',
    )


def test_a_script_in_the_style_of_nanogpt(start: Start, tmp_path: Path) -> None:
    script = EXAMPLES / "nanogpt_style.py"
    run = start(*TORCHRUN, "--max-restarts", "3", script, tmp_path)
    kill(run.wait_for("rank 1, pid ([0-9]+): iter 12,"))
    said = run.ended()
    steps = re.findall("rank 0, pid ([0-9]+): iter ([0-9]+),", said)
    before, after = ([int(step) for by, step in steps if by == pid] for pid in dict(steps))
    assert before[0] == 1 and before[-1] >= 11
    assert after[0] % 10 == 1 and after[0] > 1 and after[-1] == 60  # every tenth is saved
    record(
        "torch",
        "[a script in the style of nanoGPT](../../examples/integrations/nanogpt_style.py), "
        "2 processes by torchrun, of which one is killed",
        "goes on from its checkpoint",
        '`backend = "pccl"`',
    )


@needs("torchtitan")
def test_torchtitan(start: Start, tmp_path: Path) -> None:
    words = ["--training.seq_len", 64, "--training.steps", 10, "--job.dump_folder", tmp_path]
    said = start(*TORCHRUN, EXAMPLES / "torchtitan_cpu.py", *words).ended()
    weights = re.findall(r"by pccl, step 10, weights (\S+)", said)
    assert len(weights) == 2 and len(set(weights)) == 1
    record(
        "torchtitan",
        "[its Trainer](../../examples/integrations/torchtitan_cpu.py) on CPUs, with FSDP2, "
        "2 processes by torchrun",
        "trains; same weights on both",
        '`default_device_backend_map["cpu"] = "pccl"`; what the example adds to torch.cpu',
    )


@needs("ray")
def test_ray_train(start: Start, tmp_path: Path) -> None:
    run = start(EXAMPLES / "ray_train.py", tmp_path, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    kill(run.wait_for("([0-9]+): step 5 by pccl, weights"))
    said = run.ended()
    assert "step 20 by pccl" in said and "'loss': " in said
    assert len(set(re.findall("([0-9]+): step [0-9]+ by pccl", said))) == 4  # two, and two again
    record(
        "ray",
        "[Ray Train](../../examples/integrations/ray_train.py), 2 workers, of which one is killed",
        "Ray starts both again, from the checkpoint",
        '`TorchConfig(backend="pccl")`',
    )


@needs("torchft")
def test_a_manager_of_torchft(start: Start) -> None:
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    script = EXAMPLES / "torchft_manager.py"
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000)
    env = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    try:
        stays, goes = start(script, 0, **env), start(script, 1, **env)
        goes.wait_for("step 5, 2 replicas")
        goes.kill()
        comes = start(script, 1, **env)
        said = [program.ended() for program in (stays, comes)]
    finally:
        lighthouse.shutdown()
    weights = [dict(re.findall(r"step (\d+), 2 replicas, weights (\S+)", each)) for each in said]
    assert "5" in weights[0] and "5" not in weights[1]  # it has received the state of the other
    both = weights[0].keys() & weights[1].keys()
    assert "50" in both and all(weights[0][step] == weights[1][step] for step in both)
    record(
        "torchft",
        "[a Manager](../../examples/integrations/torchft_manager.py), 2 replicas, of which one is "
        "killed and started again",
        "the replica receives the weights; same weights on both",
        "`pg=ProcessGroupPCCL(...)`",
    )


# ---- DiLoCo in trainers ----


def scalars(folder: Path) -> set[float]:
    """The contributors of the outer rounds in the event files of TensorBoard below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = set()
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            if tag.endswith("diloco/contributors"):
                found |= {event.value for event in events.Scalars(tag)}
    return found


@needs("tensorboard")
@pytest.mark.parametrize(
    ("framework", "mode", "wire"),
    [
        ("transformers", "sync", "int8"),
        ("lightning", "delayed", "int4"),
        ("accelerate", "eager", "fp32"),
    ],
)
def test_diloco_in_a_trainer(
    framework: str, mode: str, wire: str, address: str, start: Start, tmp_path: Path
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = EXAMPLES / f"{framework}_diloco.py"

    def digests(steps: int) -> tuple[set[str], set[str]]:
        """The outer steps, and the shared states, after `steps` steps of each trainer."""
        options = ["--steps", steps, "--mode", mode, "--wire", wire]
        both = [start(script, tmp_path / name, address, *options) for name in "ab"]
        found = [re.search(r"outer steps (\d+): (\S+)", program.ended()) for program in both]
        assert all(found)
        return {match[1] for match in found if match}, {match[2] for match in found if match}

    outer, states = digests(20)
    assert outer == {"2"} and len(states) == 1
    outer, states = digests(40)  # both go on from their checkpoints
    assert outer == {"4"} and len(states) == 1
    assert 2.0 in scalars(tmp_path / "a")
    record(
        framework,
        f"[DiLoCo](../../examples/integrations/{framework}_diloco.py), "
        f'`mode="{mode}"`, `wire="{wire}"`, 2 trainers, from checkpoints too',
        "same state on both, to the last bit; outer rounds in TensorBoard",
        "`register_for_checkpointing`" if framework == "accelerate" else "the callback",
    )


# ---- JAX ----


@needs("jax", "optax")
@pytest.mark.parametrize(("script", "steps"), [("jax_data_parallel", 4000), ("jax_diloco", 400)])
def test_loops_of_jax(script: str, steps: int, address: str, start: Start) -> None:
    def peer() -> Program:
        return start(EXAMPLES / f"{script}.py", steps, PCCL_MASTER=address)

    stay, goes = [peer(), peer()], peer()
    goes.wait_for("step .*, 3 peers")
    goes.kill()
    stay.append(peer())
    last = [program.ended().splitlines()[-1] for program in stay]
    assert len(set(last)) == 1 and last[0].startswith("weights "), last
    record(
        "jax optax",
        f"[{script.replace('_', ' ')}](../../examples/integrations/{script}.py), 3 peers, of which "
        "one is killed and started again",
        "same weights on all",
        "the loop",
    )


# ---- metrics ----


def rounds(log_metrics: Callable[[dict[str, Any], int], object]) -> None:
    """Three outer rounds of two peers; the first logs metrics."""
    import torch

    from pccl.diloco import DiLoCo

    with Cluster(2) as cluster:

        def job(index: int, comm: pccl.Communicator) -> None:
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            log = None if index else log_metrics
            diloco = DiLoCo(comm, model, optimizer, inner_steps=2, log_metrics=log)
            while diloco.outer_step < 3:
                model(torch.rand(8, 4)).pow(2).mean().backward()
                diloco.step()

        cluster.each(job)


def noted(packages: str, call: str) -> None:
    run = "three outer rounds of DiLoCo, [metrics](../../examples/integrations/metrics.py)"
    record(packages, f"{run} by {call}", "the metrics of all rounds", f"`log_metrics={call}`")


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("metrics")


@needs("tensorboard")
def test_metrics_in_tensorboard(metrics: Any, tmp_path: Path) -> None:
    rounds(metrics.tensorboard(str(tmp_path)))
    assert scalars(tmp_path) == {2.0}
    noted("tensorboard", 'tensorboard("runs/1")')


@needs("prometheus_client")
def test_metrics_in_prometheus(metrics: Any) -> None:
    from prometheus_client import REGISTRY  # type: ignore[import-not-found]

    rounds(metrics.prometheus(0))
    assert REGISTRY.get_sample_value("diloco_contributors") == 2
    assert REGISTRY.get_sample_value("pccl_step") == 3
    noted("prometheus-client", "prometheus(8000)")


@needs("opentelemetry")
def test_metrics_in_opentelemetry(metrics: Any) -> None:
    from opentelemetry.metrics import set_meter_provider  # type: ignore[import-not-found]
    from opentelemetry.sdk.metrics import MeterProvider  # type: ignore[import-not-found]
    from opentelemetry.sdk.metrics.export import (  # type: ignore[import-not-found]
        InMemoryMetricReader,
    )

    reader = InMemoryMetricReader()
    set_meter_provider(MeterProvider([reader]))
    rounds(metrics.opentelemetry())
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {one.name: one.data.data_points[0].value for one in resource.scope_metrics[0].metrics}
    assert found["diloco.contributors"] == 2 and found["pccl.step"] == 3
    noted("opentelemetry-sdk", "opentelemetry()")


@needs("wandb")
def test_metrics_in_wandb(tmp_path: Path) -> None:
    import wandb  # type: ignore[import-not-found]

    with wandb.init(mode="offline", dir=tmp_path, project="pccl") as run:
        rounds(run.log)
        run.log({"done": 1}, 4)  # the next step completes the row of the last round
        wait_until(lambda: run.summary.get("diloco/outer_step") == 3)
        assert run.summary["diloco/contributors"] == 2
    noted("wandb", "wandb.log")
