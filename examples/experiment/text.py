"""The samples: windows of a text, the same at every step whatever the number of peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pccl.cli.demo.model import source_files

_BLOCK_BYTES = 64 << 10
_HELD_OUT_EVERY = 20  # one block of this many is for validation
_VALIDATION_SAMPLES = 1024


class Text:
    """Samples by number: sample i is the same on all peers, and in all runs of one seed.

    Args:
        files: what is read; none: the source code of the standard library.
        context: bytes of a sample, and one more to predict.
        samples: how many there are.
        seed: of their places.

    Raises:
        OSError: a file cannot be read.
        ValueError: the text is too short.
    """

    def __init__(self, files: Sequence[Path], *, context: int, samples: int, seed: int) -> None:
        text = _read(files or source_files())
        block = min(_BLOCK_BYTES, len(text) // (2 * _HELD_OUT_EVERY))
        if block <= context:
            raise ValueError(
                f"{len(text)} bytes of text are too few: it takes "
                f"{2 * _HELD_OUT_EVERY * (context + 1)}"
            )
        blocks = torch.split(text, block)
        self._training = torch.cat([b for i, b in enumerate(blocks) if i % _HELD_OUT_EVERY])
        self._held_out = torch.cat(blocks[::_HELD_OUT_EVERY])
        self._window = torch.arange(context + 1)
        generator = torch.Generator().manual_seed(seed)
        last = len(self._training) - context
        self._starts = torch.randint(last, (samples,), generator=generator)

    def samples(self, numbers: Sequence[int]) -> torch.Tensor:
        """Those of these numbers: (len(numbers), context + 1) int64 bytes."""
        return self._training[self._starts[list(numbers), None] + self._window].long()

    def validation(self) -> torch.Tensor:
        """Always the same, spread evenly over what no sample is of."""
        last = len(self._held_out) - len(self._window)
        starts = torch.linspace(0, last, min(_VALIDATION_SAMPLES, last)).long()
        return self._held_out[starts[:, None] + self._window].long()


def _read(files: Sequence[Path]) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )
