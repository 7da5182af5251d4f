"""The training text: the source code of Python's standard library, which is always available."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT_EVERY = 20  # one file in so many is for validation
_SHARD_BYTES_MAX = 4 << 20


class Corpus:
    """One peer's shard of the training files, and the validation files, which all peers share.

    Args:
        shard: which part of the files this peer trains on, below `shards`.
        shards: in how many disjoint parts the files are dealt.
        seed: of the order in which windows are drawn.

    Raises:
        FileNotFoundError: this Python comes without the source of its standard library.
    """

    def __init__(self, *, shard: int, shards: int, seed: int) -> None:
        files = source_files()
        training = [file for i, file in enumerate(files) if i % _HELD_OUT_EVERY]
        self._training = _read(training[shard::shards])
        self._validation = _read(files[::_HELD_OUT_EVERY])
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int, length: int) -> torch.Tensor:
        """Random windows of the shard: (size, length) int64 bytes."""
        starts = torch.randint(len(self._training) - length, (size,), generator=self._generator)
        return _windows(self._training, starts, length)

    def validation(self, size: int, length: int) -> torch.Tensor:
        """Always the same windows, spread evenly: (size, length) int64 bytes."""
        starts = torch.linspace(0, len(self._validation) - length, size).long()
        return _windows(self._validation, starts, length)


def source_files() -> list[Path]:
    """The files of the standard library in an order that is the same everywhere, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (file.relative_to(root).as_posix(), file)
        for file in root.rglob("*.py")
        if not _LEFT_OUT & set(file.relative_to(root).parts)
    )
    if len(files) < 2 * _HELD_OUT_EVERY:
        raise FileNotFoundError(f"the standard library's source code is not in {root}")
    return [file for _, file in files]


def _read(files: list[Path]) -> torch.Tensor:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= _SHARD_BYTES_MAX:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()
