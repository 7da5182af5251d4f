"""The settings of a DiLoCo run, as an entry of the shared state; and the files of `DiLoCo.save`."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from typing import Any

import torch
import xxhash

from pccl.diloco.model_state import memory

_CONFIG_BYTES = 512


def layout_digest(layout: list[tuple[str, list[int]]]) -> str:
    """Of names and shapes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())


def encode(config: dict[str, Any]) -> torch.Tensor:
    """Settings as bytes of a fixed number."""
    text = json.dumps(config, sort_keys=True).encode()
    assert len(text) <= _CONFIG_BYTES
    return torch.frombuffer(bytearray(text.ljust(_CONFIG_BYTES)), dtype=torch.uint8)


def decode(encoded: torch.Tensor) -> dict[str, Any]:
    """The settings that were encoded."""
    settings: dict[str, Any] = json.loads(bytes(memory(encoded)))
    return settings


def describe_mismatch(*, run: torch.Tensor, own: torch.Tensor) -> str:
    """Says which settings of this peer are not those of the run."""
    theirs, ours = decode(run), decode(own)
    differences = ", ".join(
        f"{key} is {theirs.get(key)!r} in the run and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    )
    return f"this peer's DiLoCo settings are not those of the run: {differences}"


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file, checked as a whole: torch itself ignores the file's checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} in it is not what was written")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (
        ValueError,
        RuntimeError,
        EOFError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{os.fspath(path)} is damaged, or no file that DiLoCo.save() has written: {error}"
        ) from error
    return state
