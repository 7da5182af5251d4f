"""The settings of a DiLoCo run, as an entry of the shared state; and the files of `DiLoCo.save`."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import xxhash

from pccl.diloco.exchange import WeightBy
from pccl.diloco.model_state import MODES, BufferMode, memory
from pccl.diloco.outer import PATTERNS, Mode, Pattern, Rate
from pccl.diloco.pace import Deadline, Pace, Seconds, Steps
from pccl.diloco.wires import Wire
from pccl.extension import GRACE_MAX_S

_CONFIG_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What must be the same on all peers; `DiLoCo` describes each."""

    inner_steps: int | None
    inner_seconds: float | None
    deadline_peers: int | None
    grace: float | None
    late_decay: float
    weight: WeightBy
    outer_lr: Rate | None
    outer_momentum: Rate
    nesterov: bool
    buffers: BufferMode
    mode: Mode
    wire: Wire
    fragments: int
    pattern: Pattern
    overlap: int
    alpha: float

    def check(self, ledger: bool) -> None:
        """Raises ValueError for what is out of range, or does not go with a ledger."""
        words = {
            "buffers": MODES,
            "mode": get_args(Mode),
            "wire": get_args(Wire),
            "pattern": PATTERNS,
            "weight": get_args(WeightBy),
        }
        for name, known in words.items():
            check_word(name, getattr(self, name), known)
        if (self.inner_steps is None) == (self.inner_seconds is None):
            raise ValueError("give inner_steps or inner_seconds")
        if self.inner_steps is not None and self.inner_steps < 1:
            raise ValueError(f"inner_steps={self.inner_steps} must be at least 1")
        self._check_times()
        self._check_streaming()
        if ledger and self.mode == "streaming":
            raise ValueError(
                'a ledger needs rounds that are applied as a whole, and with mode="streaming" each '
                "fragment is applied by itself: of who is lost between two, one part of the model "
                "has learnt from samples and another has not"
            )

    def check_sharded(self, ledger: bool) -> None:
        """Raises ValueError for what does not go with a model that is sharded."""
        if self.deadline_peers is not None or ledger:
            what = "a ledger" if ledger else "deadline_peers"
            raise ValueError(
                f"{what} does not go with a sharded model: it is for peers of one process each"
            )

    def _check_times(self) -> None:
        if self.inner_seconds is not None and self.inner_seconds <= 0:
            raise ValueError(f"inner_seconds={self.inner_seconds} must be positive")
        if (self.grace is not None and not 0 <= self.grace <= GRACE_MAX_S) or not (
            0 <= self.late_decay <= 1
        ):
            raise ValueError(
                f"grace={self.grace} must be in [0, {GRACE_MAX_S}] seconds, and "
                f"late_decay={self.late_decay} in [0, 1]"
            )
        if self.deadline_peers is None:
            if self.late_decay != 1 or (self.grace is not None and self.inner_seconds is None):
                raise ValueError(
                    "grace is for inner_seconds, and both it and late_decay for deadline_peers"
                )
        elif self.deadline_peers < 1:
            raise ValueError(f"deadline_peers={self.deadline_peers} must be at least 1")
        elif self.inner_seconds is not None and self.grace is None:
            raise ValueError("deadline_peers with inner_seconds needs a grace")
        elif self.mode == "streaming":
            raise ValueError(
                'deadline_peers is not for mode="streaming": its fragments are due at fixed inner '
                "steps, so a slow peer would be late for all of them"
            )
        if self.weight != "peers" and self.mode == "eager":
            raise ValueError(f'weight={self.weight!r} is not for mode="eager"')

    def _check_streaming(self) -> None:
        if self.mode != "streaming":
            if (self.fragments, self.overlap, self.alpha) != (1, 0, 0.0):
                raise ValueError(
                    f"fragments={self.fragments}, overlap={self.overlap} and alpha={self.alpha} "
                    f'are for mode="streaming", and mode={self.mode!r}'
                )
            return
        if self.inner_steps is None:
            raise ValueError('mode="streaming" needs inner_steps')
        if not 1 <= self.fragments <= self.inner_steps:
            raise ValueError(f"fragments={self.fragments} must be from 1 to inner_steps")
        between = self.inner_steps // self.fragments
        if not 0 <= self.overlap < between:
            raise ValueError(
                f"overlap={self.overlap} must be at least 0 and less than the inner steps from one "
                f"fragment to the next: {self.inner_steps} // {self.fragments} = {between}"
            )
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must be in [0, 1)")

    @property
    def unlike(self) -> bool:
        """Whether peers may train on more or less than others."""
        return self.ends_early or self.weight != "peers"

    @property
    def ends_early(self) -> bool:
        """Whether a round may end before a peer has taken so many inner steps."""
        return self.inner_seconds is not None or self.deadline_peers is not None

    def pace(self) -> Pace:
        """When a round is due, in modes without fragments."""
        if self.inner_steps is None:
            assert self.inner_seconds is not None
            return Seconds(self.inner_seconds, self.grace or 0.0, self.deadline_peers)
        if self.deadline_peers is not None:
            return Deadline(self.inner_steps, self.deadline_peers, self.grace)
        return Steps(self.inner_steps)

    def to_dict(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    """Raises ValueError for a word that is unknown."""
    if word not in known:
        raise ValueError(f"{name}={word!r} must be one of {known}")


def layout_digest(layout: list[tuple[str, list[int]]]) -> str:
    """Of names and shapes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())


def encode(config: dict[str, Any]) -> torch.Tensor:
    """Settings as bytes of a fixed number."""
    text = json.dumps(config, sort_keys=True).encode()
    if len(text) > _CONFIG_BYTES:
        raise ValueError(
            f"the settings have {len(text)} bytes, more than {_CONFIG_BYTES}: {text!r}"
        )
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
