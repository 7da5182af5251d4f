"""The examples that train on a text: each between two peers, which are threads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

import pccl

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAST = ("shared state: ", "weights ")


@pytest.fixture
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """The example of this name, and not its neighbors under names that others may have."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(request.param, EXAMPLES / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.main
    sys.modules.pop("language", None)


def both(main: Callable, *words: list[str]) -> None:
    """Two peers; the first error of either."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(main, own) for own in words]:
            done.result(PATIENCE_S)


SMALL = {
    "data_parallel": ["--samples", "900", "--batch", "32"],
    "delayed": ["--steps", "3", "--inner-steps", "3"],
    "heterogeneous": ["--steps", "3", "--inner-seconds", "0.05"],
    "sparse": ["--steps", "3", "--inner-steps", "3"],
    "streaming": ["--steps", "2", "--inner-steps", "9", "--overlap", "1"],
}


@pytest.mark.parametrize("main", SMALL, indirect=True)
def test_both_peers_end_with_the_same_bits(
    main: Callable,
    address: str,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    words = ["--master-address", address, *SMALL[request.node.callspec.params["main"]]]
    both(main, [*words, "--seed", "1"], [*words, "--seed", "2"])
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LAST)]
    assert len(last) == 2 and last[0] == last[1]


@pytest.mark.parametrize("main", ["resume"], indirect=True)
def test_a_run_resumes_from_its_files(
    main: Callable, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def words(number: int) -> list[str]:
        return [str(tmp_path / str(number)), "--seed", str(number), "--inner-steps", "2"]

    for steps in ("2", "4"):
        with pccl.MasterNode("127.0.0.1:0") as master:  # a finished run has no other one after it
            rest = ["--master-address", master.address, "--steps", steps, "--save-every", "2"]
            both(main, [*words(1), *rest], [*words(2), *rest])
    said = capsys.readouterr().out.splitlines()
    begins = [line for line in said if line.startswith("begins")]
    assert begins == [f"begins at outer step {step}" for step in (0, 0, 2, 2)]


@pytest.mark.parametrize("main", ["fsdp2"], indirect=True)
def test_a_sharded_model_resumes_from_its_checkpoint(
    main: Callable,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine of one process, which is alone."""
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    words = ["--inner-steps", "2", "--min-peers", "1"]
    words += ["--save-every", "2", "--checkpoints", str(tmp_path)]
    for steps in ("2", "4"):
        with pccl.MasterNode("127.0.0.1:0") as master:
            main([*words, "--master-address", master.address, "--steps", steps])
    said = capsys.readouterr().out.splitlines()
    steps = [line.partition(":")[0] for line in said if line.startswith("outer step")]
    assert steps == [f"outer step {step}" for step in (1, 2, 3, 4)]


@pytest.mark.slow
def test_machines_with_sharded_models_end_with_the_same_bits(address: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(EXAMPLES / "fsdp2.py"), "--master-address", address, "--steps", "3"]
    machines = [
        subprocess.Popen(
            [*run, *words, "--inner-steps", "3", "--seed", seed],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for seed in "12"
    ]
    texts = [machine.communicate(timeout=100)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    shards = [{line for line in text.splitlines() if line.startswith("shard")} for text in texts]
    assert shards[0] == shards[1] and len(shards[0]) == 2


@pytest.mark.parametrize("main", ["weights"], indirect=True)
def test_a_follower_has_the_weights_of_its_trainer(
    main: Callable, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--master-address", address, "--steps", "3"]
    both(main, [*words, "--train", "--seconds", "0.3"], words)
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LAST)]
    assert len(last) == 2 and last[0] == last[1]
