"""Keeps pseudo-gradients out of the mean that are not finite, or far larger than all others."""

from __future__ import annotations

import logging
import math
import struct
from collections import Counter
from dataclasses import dataclass, field

import torch

from pccl import Communicator, KickedError, Result, extension
from pccl.diloco.model import Replica
from pccl.diloco.settings import Outliers
from pccl.diloco.stats import gather_row

_FAR = 10.0  # times the median norm
_ENOUGH = 3  # norms: the median of fewer does not say what is usual

_log = logging.getLogger("pccl.diloco")


@dataclass(eq=False)
class Quarantine:
    """Compares the norms of all peers' pseudo-gradients before each mean."""

    _comm: Communicator
    _replica: Replica
    _rounds: int  # for which a peer may be left out, one after the other, before it is dropped
    _outliers: Outliers
    names: tuple[str, ...] = ()  # of the peers that were left out the last time
    _times: Counter[int] = field(default_factory=Counter)  # in a row, by the peer's number
    _why: str = ""  # this peer was left out

    def factor(self, delta: torch.Tensor) -> float:
        """What this peer's pseudo-gradient is multiplied by: 0 if it is left out."""
        number = extension.member(self._comm).number
        rows = gather_row(self._comm, [number, self._norm(delta)])
        norms = {int(peer): norm for peer, norm in rows}
        finite = sorted(norm for norm in norms.values() if math.isfinite(norm))
        usual = finite[(len(finite) - 1) // 2] if finite else 0.0
        clips = self._outliers == "clip"
        most = _FAR * usual if len(finite) >= _ENOUGH and usual and not clips else math.inf
        bad = {peer: norm for peer, norm in norms.items() if not norm <= most or norm == math.inf}
        self._times = Counter({peer: self._times[peer] + 1 for peer in bad})
        self.names = self._named(bad, usual)
        out = not self._replica.all(number not in bad)  # by any of its shards
        if out:
            self._why = _why(norms[number], usual)
            return 0.0
        norm = norms[number]
        return usual / norm if clips and norm > usual > 0 else 1.0

    def _norm(self, delta: torch.Tensor) -> float:
        """The norm over all shards; infinity if it is not finite."""
        square = float(delta.double().square().sum())
        (bits,) = struct.unpack("<q", struct.pack("<d", square))
        said = [struct.pack("<q", row[0]) for row in self._replica.exchange([bits])]
        whole: float = sum(struct.unpack("<d", each)[0] for each in said)
        return math.sqrt(whole) if math.isfinite(whole) else math.inf

    def _named(self, bad: dict[int, float], usual: float) -> tuple[str, ...]:
        members = extension.names(self._comm) if bad else {}
        names = []
        for peer, norm in sorted(bad.items()):
            names.append(members.get(peer, f"peer {peer}"))
            _log.warning(
                "%s is left out of this mean, for the %d. time in a row: its pseudo-gradient is %s",
                names[-1],
                self._times[peer],
                _why(norm, usual),
            )
        return tuple(names)

    def check(self) -> None:
        """Ends this peer's part in the run, with KickedError, if it was left out too often."""
        number = extension.member(self._comm).number
        if self._times[number] >= self._rounds:
            self._comm.close()
            raise KickedError(
                Result.INVALID_ARGUMENT,
                "DiLoCo.step",
                f"quarantine: in {self._rounds} rounds in a row this peer's pseudo-gradient was "
                f"{self._why}; look for the cause in its data, its device or its inner optimizer",
            )


def _why(norm: float, usual: float) -> str:
    if not math.isfinite(norm):
        return "not finite"
    return f"too large: its norm is {norm:.3g}, and the median of all peers {usual:.3g}"
