"""The directories in which engines listen for peers of their own machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster

from pccl.runtime.client import engine
from pccl.runtime.filelock import FileLock

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there is no ipc here")

HOLDER = """
import sys
from pccl.runtime.client import engine
directory = engine.Directory()
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_killed_process_leaves_a_directory_that_the_next_one_removes(scratch: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip()).parent
        beside = engine.Directory()
        assert left.is_dir(), "somebody is alive in it"
        process.kill()
    after = engine.Directory()
    assert not left.exists()
    assert {Path(each.path).parent for each in (beside, after)} == set(scratch.iterdir())
    for each in (beside, after):
        each.remove()
    assert not list(scratch.iterdir())


def test_foreign_files_stay(scratch: Path) -> None:
    (scratch / f"{engine.PREFIX}of-a-user").mkdir()  # without a lock: somebody is about to make it
    (scratch / f"{engine.PREFIX}file").touch()
    (scratch / f"{engine.PREFIX}link").symlink_to(scratch)
    names = set(scratch.iterdir())
    engine.Directory().remove()
    assert set(scratch.iterdir()) == names


@pytest.mark.parametrize("moment", ["before the lock", "after the lock"])
def test_one_that_is_removed_while_it_is_made_is_made_again(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    class Late(FileLock):
        """Takes the lock of the first directory when another process has been there."""

        def __init__(self, path: Path) -> None:
            first = not made
            made.append(path.parent)
            if first and moment == "before the lock":
                FileLock(path).close()
                path.unlink()
                path.parent.rmdir()
            super().__init__(path)
            if first and moment == "after the lock":
                path.unlink()
                path.parent.rmdir()

    monkeypatch.setattr(engine, "FileLock", Late)
    directory = engine.Directory()
    assert len(made) == 2 and Path(directory.path).parent == made[1]
    directory.remove()


def test_without_a_place_for_files_peers_are_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", none)
    with Cluster(2) as cluster:
        infos = cluster.each(lambda _, comm: comm.all_reduce(np.ones(100_000)))
    assert [info.local_world_size for info in infos] == [2, 2]
    assert "are reached over TCP, not ipc: [Errno 2] No usable temporary directory" in caplog.text
