"""Layers of imports, and the modules that `import pccl` loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def test_imports_go_downward_only() -> None:
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed; pip install -e .[dev] brings it")
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    ended = subprocess.run(
        [*lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_importing_pccl_imports_only_the_needs_of_a_peer(tmp_path: Path) -> None:
    """Modules of a master, or for the version, are loaded when they are needed."""
    program = """
import sys, pccl
needless = {"torch", "numpy", "asyncio", "ssl", "sqlite3", "http", "email", "subprocess", "hashlib"}
needless |= {"concurrent.futures", "importlib.metadata", "pccl.runtime.server", "pccl.cli"}
assert not needless & sys.modules.keys(), needless & sys.modules.keys()
assert "MasterNode" in dir(pccl) and pccl.__version__
with pccl.MasterNode("127.0.0.1:0"):
    assert "pccl.runtime.server" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_one_library_is_enough(missing: str) -> None:
    """With the other one missing from the machine, which None among the modules makes it."""
    present = {"torch": "numpy", "numpy": "torch"}[missing]
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")  # torch's own, that numpy is missing
sys.modules[{missing!r}] = None
import pccl, {present} as library
from pccl.tensors import pair
from pccl.shared_state import SharedState
x = library.zeros(3)
send, recv = pair(x, library.ones(3))
assert send.count == 3 and send.nbytes == 3 * send.dtype.itemsize
assert SharedState.from_tensors({{"x": x}}).tensor_infos[0].numel == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
