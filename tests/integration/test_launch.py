"""Files for schedulers in examples/launch/: they are valid, and a run survives there."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peers.ports import unused_port
from peers.waiting import wait_until

import pccl
from pccl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
CLUSTER = LAUNCH / "kubernetes"
MANIFESTS = [path for path in sorted(CLUSTER.glob("*.yaml")) if path.stem != "kustomization"]
PATIENCE_S = 100.0
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
STEPS = 200  # of 0.1 s: longer than it takes to start a peer again

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_train", LAUNCH / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_peers_end_alike_and_go_on_from_a_file(
    train: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seconds", "0", "--min-peers", "2"]
    files = [tmp_path / "1", tmp_path / "2"]
    for steps in ("10", "20"):
        with pccl.MasterNode("127.0.0.1:0") as master, ThreadPoolExecutor(2) as pool:
            whole = [*words, "--master-address", master.address, "--steps", steps]
            own = [[*whole, "--checkpoint", str(file)] for file in files]
            for done in [pool.submit(train.main, each) for each in own]:
                done.result(PATIENCE_S)
        files[0].unlink()  # one of them is enough
    said = capsys.readouterr().out.splitlines()
    assert sorted(line for line in said if line.startswith("done")) == [
        *["done: 10 steps, weights 10.0"] * 2,
        *["done: 20 steps, weights 20.0"] * 2,
    ]
    assert said.count("step 11: 2 peers") == 2 and said.count("step 1: 2 peers") == 2


# ---- what can be read ----


WORDS = re.compile(r"^(?:ExecStart=|srun |#     docker run )(.*)$", re.MULTILINE)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The words that come after `pccl` in manifests, the unit, and the scripts."""
    for path in MANIFESTS:
        for args in re.findall(r"^ *args: (\[.*\])$", path.read_text(), re.MULTILINE):
            yield path.name, json.loads(args)
    for path in LAUNCH.iterdir():
        text = "" if path.is_dir() or path.suffix == ".py" else path.read_text()
        for line in re.findall(
            r"^(?:ExecStart|srun|#     docker run) ?=?(.*)$", text, re.MULTILINE
        ):
            words = line.replace('"', "").partition("pccl ")[2].split()
            yield path.name, ["1" if word.startswith("$") else word for word in words]


def test_the_commands_of_the_recipes_are_right(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(LAUNCH)
    found = list(commands())
    assert {name for name, _ in found} == {
        *("master.yaml", "peers.yaml", "pccl-master.service", "slurm.sh", "Dockerfile")
    }
    for name, words in found:
        args = cli.parser(words[0]).parse_args(words)
        if words[0] == "run":
            program = args.command_line[args.command_line.index("python") + 1 :]
            assert program[0] in ("train.py", "1"), name


def test_the_settings_of_the_recipes_exist() -> None:
    listed = set(re.findall(r"`(PCCL_\w+)`", (ROOT / "docs" / "howto" / "tuning.md").read_text()))
    used = {
        name
        for path in LAUNCH.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        for name in re.findall(r"\bPCCL_[A-Z_]+\b", path.read_text())
    }
    assert len(used) > 4
    assert used - listed == {"PCCL_ATTEMPTS"}  # slurm.sh's own


def installed(program: str, path: str | None = None) -> str:
    """Where it is; without it, the test is skipped."""
    found = shutil.which(program, path=path)
    if found is None:
        pytest.skip(f"no {program} here")
    return found


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_scripts(script: Path) -> None:
    subprocess.run([installed("bash"), "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.slow
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_schema(manifest: Path) -> None:
    validate: Any = pytest.importorskip("kubernetes_validate")
    yaml: Any = pytest.importorskip("yaml")
    kinds = []
    for document in yaml.safe_load_all(manifest.read_text()):
        for version in ("1.33", "1.34"):
            validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert kinds


@pytest.mark.slow
def test_the_kustomization_has_all_of_it_and_the_keys(tmp_path: Path) -> None:
    kubectl = installed("kubectl")
    home = tmp_path / "kubernetes"
    shutil.copytree(CLUSTER, home)
    assert cli.main(["keys", str(home / "keys")]) == 0
    made = subprocess.run(
        [kubectl, "kustomize", home], check=True, capture_output=True, text=True
    ).stdout
    kinds = re.findall(r"^kind: (\w+)$", made, re.MULTILINE)
    assert sorted(kinds) == [
        *("Job", "NetworkPolicy", "NetworkPolicy", "Secret", "Secret", "Service", "StatefulSet")
    ]
    secrets = re.findall(r"^  name: (pccl-\w+-keys-\w+)$", made, re.MULTILINE)
    used = re.findall(r"^ *secretName: (\S+)$", made, re.MULTILINE)
    assert sorted(secrets) == sorted(used)
    for secret in secrets:  # of its own only
        block = made[: made.index(f"  name: {secret}\n")].rpartition("---\n")[2]
        assert ("master.secret" in block) == ("master" in secret)


@pytest.mark.slow
def test_the_unit_is_one(tmp_path: Path) -> None:
    analyze = installed("systemd-analyze")
    unit = tmp_path / "pccl-master.service"
    text = (LAUNCH / unit.name).read_text().replace("/opt/pccl/bin/pccl", "/bin/true")
    unit.write_text(text.replace("User=pccl", "User=root"))
    ended = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert ended.returncode == 0 and unit.name not in ended.stderr, ended.stderr


# ---- what is run, with a peer killed ----


def sizes(master: pccl.MasterNode) -> int:
    """How many accepted peers a run has."""
    return sum(peer.accepted for peer in master.status().peers)


def workers(marker: str) -> list[int]:
    """The processes that run train.py with that among their words; not those that start them."""
    found = []
    for home in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (home / "cmdline").read_bytes().decode(errors="replace").split("\0")
            program = [Path(word).name for word in words[:3]]
            if marker in words and "train.py" in program and "python" in program[0]:
                found.append(int(home.name))
    return found


def survive(master: pccl.MasterNode, kill: Callable[[], object]) -> None:
    """Two peers train, one is killed, the run goes on, and another one takes its place."""
    wait_until(lambda: sizes(master) == 2, PATIENCE_S)
    kill()
    wait_until(lambda: sizes(master) == 1, PATIENCE_S)
    wait_until(lambda: sizes(master) == 2, PATIENCE_S)


@pytest.mark.slow
@needs_linux
def test_torchrun_starts_a_peer_again_that_was_killed(master: pccl.MasterNode) -> None:
    pytest.importorskip("torch")
    words = [LAUNCH / "train.py", "--master-address", master.address, "--steps", str(STEPS)]
    with subprocess.Popen(
        [LAUNCH / "torchrun.sh", "2", *words, "--min-peers", "2"],
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            survive(master, lambda: os.kill(workers(master.address)[0], signal.SIGKILL))
            said, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.terminate()
    assert launcher.returncode == 0
    assert said.count(f"done: {STEPS} steps, weights {STEPS}.0") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_linux
def test_ray_starts_an_actor_again_that_was_killed(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray: Any = pytest.importorskip("ray")
    monkeypatch.syspath_prepend(str(LAUNCH))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LAUNCH), *filter(None, sys.path)]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    actors_of = importlib.import_module("ray_actors")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actors, answers = actors_of.start(master.address, STEPS, 2)
        wait_until(lambda: sizes(master) == 2, PATIENCE_S)
        victim = ray.get(actors[0].process.remote(), timeout=60)
        survive(master, lambda: os.kill(victim, signal.SIGKILL))
        assert ray.get(answers, timeout=PATIENCE_S) == ["done", "done"]
        assert ray.get(actors[0].process.remote(), timeout=60) != victim
    finally:
        ray.shutdown()
        for name in ("train", "ray_actors"):
            sys.modules.pop(name, None)


SLURM = """
ClusterName=pccl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
SlurmUser=root
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for commands of a cluster of one node, without munge."""
    daemons = [installed(name, PATH) for name in ("slurmctld", "slurmd")]  # and slurm-client
    if os.geteuid():
        pytest.skip("Slurm's daemons run as root")
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    ports = [unused_port(), unused_port()]
    conf = tmp_path / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(SLURM.format(host=host, home=tmp_path, ports=ports))
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": PATH}
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([str(daemon), "-D"], env=env, **nowhere) for daemon in daemons]
    try:
        idle = ["sinfo", "--noheader", "--format=%t"]
        wait_until(lambda: subprocess.check_output(idle, env=env).strip() == b"idle", PATIENCE_S)
        yield env
    finally:
        subprocess.run(["scancel", "--user=root", "--full"], env=env)
        wait_until(lambda: not subprocess.check_output(["squeue", "-h"], env=env), 30)
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(PATIENCE_S)


@pytest.mark.slow
@needs_linux
def test_slurm_requeues_a_killed_peer(
    master: pccl.MasterNode, slurm: dict[str, str], tmp_path: Path
) -> None:
    submit = ["sbatch", "--array=0-1", "--export=ALL", f"--chdir={tmp_path}"]
    words = [str(LAUNCH / "train.py"), "--master-address", master.address]
    words += ["--steps", "400", "--min-peers", "2"]
    env = {**slurm, "PCCL_MASTER": master.address}
    subprocess.run([*submit, str(LAUNCH / "slurm.sh"), *words], env=env, check=True)

    def kill_a_step() -> None:
        """`pccl run` and its program at once: nothing on the node starts it again."""
        victim = workers(master.address)[0]
        parent = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{victim}/status").read_text())[0])
        for process in (parent, victim):
            os.kill(process, signal.SIGKILL)

    survive(master, kill_a_step)
    wait_until(lambda: not subprocess.check_output(["squeue", "-h"], env=slurm), PATIENCE_S)
    logs = "".join(file.read_text() for file in tmp_path.glob("pccl-*.log"))
    assert logs.count("done: 400 steps, weights 400.0") == 2, logs
    assert "ended with status 137" in logs and "queued again" in logs
