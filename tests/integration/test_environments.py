"""With numpy alone and with torch alone, each in a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"numpy": "numpy>=1.26", "torch": "torch==2.13.0"}

# What a program does with its one library: all of the API that takes arrays, and the commands.
PROGRAM = """
import importlib.util, subprocess, sys, threading, warnings
warnings.simplefilter("ignore")  # torch's own, that numpy is missing
import pccl
library, other = sys.argv[1:]
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert importlib.util.find_spec(other) is None, f"{other} is installed"
if library == "torch":
    import torch as xp
    make, info = lambda value: xp.full((1000,), value), pccl.TensorInfo.from_torch
    describe = pccl.ReduceOpDescriptor.from_torch
else:
    import numpy as xp
    make, info = lambda value: xp.full(1000, value, xp.float32), pccl.TensorInfo.from_numpy
    describe = pccl.ReduceOpDescriptor.from_numpy

def peer(comm, value, ends):
    x, small = make(value), make(value)[:10]
    comm.all_reduce(x, op="sum")
    comm.all_reduce([small, make(value)], quantization="int8")
    assert (x == 3).all() and abs(float(small[0]) - 1.5) < 0.1
    assert (comm.all_gather(make(value)).sum() == 3000).all()
    assert (comm.reduce_scatter(make(value), op="sum") == 3).all()
    comm.broadcast(x)
    y = make(value)
    operand = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
    work = pccl.ReduceDescriptor(1000, pccl.ReduceOp.AVG, 0, operand, None)
    comm.all_reduce_multiple_with_retry([describe(y, y, work)])
    assert (y == 1.5).all()
    state = make(value)
    shared = pccl.SharedState([info(state, "state")])
    comm.sync_shared_state(shared)
    shared.save(f"state-{value}")
    shared.load(f"state-{value}")
    ends.append(float(state[0]))

with pccl.MasterNode("127.0.0.1:0") as master:
    comms = [pccl.Communicator(master.address) for _ in range(2)]
    comms[0].connect()
    joining = threading.Thread(target=comms[1].connect)
    joining.start()
    while comms[0].world_size < 2:
        if comms[0].are_peers_pending():
            comms[0].update_topology()
    joining.join()
    ends = []
    threads = [threading.Thread(target=peer, args=(c, v, ends)) for c, v in zip(comms, (1.0, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [1.0, 1.0], ends
    subprocess.run([sys.executable, "-m", "pccl", "doctor", master.address], check=True)
    for comm in comms:
        comm.close()
subprocess.run([sys.executable, "-m", "pccl", "master", "--help"], check=True)
print("it works")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("library", "other"), [("numpy", "torch"), ("torch", "numpy")])
def test_one_library_is_enough(library: str, other: str, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"

    def pip(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    brought = pip("install", "-q", PACKAGES[library])
    if brought.returncode:
        pytest.skip(f"{library} cannot be installed here: {brought.stderr[-300:]}")
    built = pip("install", "-q", str(ROOT))
    assert built.returncode == 0, built.stderr
    if library == "torch":  # pccl's own requirement, without which it must work all the same
        gone = pip("uninstall", "-q", "-y", "numpy")
        assert gone.returncode == 0, gone.stderr
    ended = subprocess.run(
        [str(python), "-c", PROGRAM, library, other],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("it works\n"), ended.stdout + ended.stderr
