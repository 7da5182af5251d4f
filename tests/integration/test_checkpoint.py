"""Shared state in files, and a run that goes on from them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pccl

ROOT = Path(__file__).resolve().parents[2]


def tensors(fill: float) -> dict[str, np.ndarray]:
    return {
        "weights": np.full((3, 5), fill, np.float32),
        "none": np.empty(0, np.int64),
        "scalar": np.array(fill, np.float64),
        "half": np.full(7, fill, np.float16),
        'odd "näme"': np.full(3, fill, np.uint8),
    }


def test_a_saved_state_is_loaded(tmp_path: Path) -> None:
    saved, path = pccl.SharedState.from_tensors(tensors(3)), tmp_path / "state.safetensors"
    saved.revision = (1 << 64) - 1
    saved.save(path)
    arrays = tensors(0)
    loaded = pccl.SharedState.from_tensors(arrays)
    loaded.load(path)
    assert loaded.revision == (1 << 64) - 1
    assert all((array == 3).all() for array in arrays.values())
    assert os.listdir(tmp_path) == [path.name]


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    """By the format's definition, which asks for data without gaps."""
    pccl.SharedState.from_tensors(tensors(3)).save(tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    assert header["weights"] == {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}
    end = 0
    for entry in header.values():
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert 8 + size + end == len(data)
    assert data[8 + size : 8 + size + 60] == np.full(15, 3, np.float32).tobytes()


@pytest.mark.parametrize("dtype", list(pccl.DataType), ids=lambda dtype: dtype.name)
def test_every_element_type_at_an_odd_address(dtype: pccl.DataType, tmp_path: Path) -> None:
    memory = np.arange(1 + 5 * dtype.itemsize, dtype=np.uint8)
    before = memory.copy()
    info = pccl.TensorInfo(
        "x",
        memory.ctypes.data + 1,
        numel=5,
        dtype=dtype,
        device_type=pccl.DeviceType.CPU,
        allow_content_inequality=False,
    )
    shared = pccl.SharedState([info])
    shared.save(tmp_path / "f")
    memory[:] = 0
    shared.load(tmp_path / "f")
    np.testing.assert_array_equal(memory[1:], before[1:])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a": np.zeros(4, np.float32)}, r"no entry 'a'"),
        ({"x": np.zeros(5, np.float32)}, r"'x' is F32 \[4\] there and F32 \[5\] here"),
        ({"x": np.zeros(4, np.int32)}, r"'x' is F32 \[4\] there and I32 \[4\] here"),
        ({"x": np.zeros(4, np.float32), "y": np.zeros(1)}, r"no entry 'y'"),
    ],
)
def test_other_entries(other: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    saved = pccl.SharedState.from_tensors({"x": np.ones(4, np.float32)})
    saved.save(tmp_path / "f")
    with pytest.raises(ValueError, match=words):
        pccl.SharedState.from_tensors(other).load(tmp_path / "f")
    saved = pccl.SharedState.from_tensors({"x": np.ones(4, np.float32), "z": np.ones(4)})
    saved.save(tmp_path / "f")
    with pytest.raises(ValueError, match=r"an entry 'z' that is not wanted|entry"):
        pccl.SharedState.from_tensors(other).load(tmp_path / "f")


def test_damaged_files_leave_the_memory_alone(tmp_path: Path) -> None:
    """Every byte of a file matters, and every length but the whole."""
    path = tmp_path / "f"
    first, second = np.ones(2, np.float32), np.ones(3, np.uint8)
    shared = pccl.SharedState.from_tensors({"first": first, "second": second})
    shared.revision = 5
    shared.save(path)
    whole = path.read_bytes()
    first[:], second[:], shared.revision = 8, 8, 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated|not a shared state|f: "):
            shared.load(path)
    for place in range(len(whole) - 11, len(whole)):  # the data; the header's spaces do not matter
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            shared.load(path)
    assert (first == 8).all() and (second == 8).all() and shared.revision == 0
    path.write_bytes(whole)
    shared.load(path)
    assert (first == 1).all() and (second == 1).all() and shared.revision == 5


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "7",
        '{"x": 7}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": []}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        ' "__metadata__": {"revision": "-1", "digests": "{}"}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        ' "__metadata__": {"revision": "1", "digests": "[]"}}',
    ],
)
def test_impossible_headers(header: str, tmp_path: Path) -> None:
    encoded = header.encode()
    (tmp_path / "f").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(4))
    shared = pccl.SharedState.from_tensors({"x": np.ones(1, np.float32)})
    with pytest.raises(ValueError, match="f"):
        shared.load(tmp_path / "f")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    pccl.SharedState.from_tensors({"x": np.ones(4)}).save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="__metadata__"):
        pccl.SharedState.from_tensors({"__metadata__": np.ones(4)}).save(path)
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):  # noqa: PT011, it differs between systems
        pccl.SharedState.from_tensors({"x": np.zeros(4)}).save(tmp_path / "directory")
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["directory", "f"]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_the_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    pccl.SharedState.from_tensors({"x": np.ones(4)}).save(tmp_path / "f")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("f", "other")}
    assert len(modes) == 1


def test_a_run_resumes_after_the_loss_of_all_peers(tmp_path: Path) -> None:
    """The example, twice: all peers are killed in between, and one has lost its file."""
    files = [tmp_path / "first", tmp_path / "second"]

    def peers(address: str) -> list[subprocess.Popen[str]]:
        program = [sys.executable, str(ROOT / "examples" / "checkpoint.py")]
        program += ["--master-address", address]
        return [
            subprocess.Popen([*program, str(file)], stdout=subprocess.PIPE, text=True)
            for file in files
        ]

    def read(peer: subprocess.Popen[str], pattern: str) -> re.Match[str]:
        assert peer.stdout is not None
        for line in peer.stdout:
            found = re.match(pattern, line)
            if found:
                return found
        raise AssertionError(f"it ended without saying {pattern}")

    with pccl.MasterNode("127.0.0.1:0") as master:
        running: list[subprocess.Popen[str]] = []
        try:
            running = peers(master.address)
            for peer in running:
                read(peer, "step 20:")
            for peer in running:
                peer.kill()
                peer.communicate()
            files[0].unlink()
            running = peers(master.address)
            revision = int(read(running[1], r"loaded revision (\d+)")[1])
            assert revision >= 20 and revision % 10 == 0
            for peer in running:  # who has no file goes on from the file of the other
                for steps in (revision, revision + 10):
                    step = read(peer, r"step (\d+): (\d+) contributions")
                    assert (int(step[1]), int(step[2])) == (steps, 2 * steps)
        finally:
            for peer in running:
                peer.kill()
                peer.communicate()
