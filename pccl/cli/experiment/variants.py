"""The runs of an experiment: how the peers train, and how many of them there are."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace


class Churn(msgspec.Struct, frozen=True):
    """Peers that are killed, each of which another one replaces at once.

    Attributes:
        every_rounds: a kill in each of so many outer rounds; 0: none.
        every_s: a kill in so many seconds; 0: none.
    """

    every_rounds: int = 0
    every_s: float = 0.0


class Variant(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        name: of the row in the table, and of the file.
        peers: M.
        options: of `DiLoCo`; None: data parallel, an all-reduce of the gradients in each step.
        muon: whether the inner optimizer is Muon, for the matrices inside the model.
        churn: which peers are lost.
        pace_s: seconds that each inner step takes at least, as on a machine of its own, so that
            peers that share one processor do not get faster when one of them is lost.
        rounds: outer steps, if not as many as the settings say.
    """

    name: str
    peers: int
    options: dict[str, Any] | None
    muon: bool = False
    churn: Churn = Churn()
    pace_s: float = 0.0
    rounds: int | None = None

    @property
    def is_accounted(self) -> bool:
        """Whether a ledger of samples makes up for what is lost with a peer."""
        return self.churn.every_rounds > 0

    @property
    def is_timed(self) -> bool:
        """Whether this run measures time, and not the loss."""
        return self.pace_s > 0


# Best eta for Nesterov's momentum of 0.9 at H = 30, by the number of peers (arXiv 2503.09799).
ETA = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}

BASELINE = "data-parallel"


def _diloco(name: str, peers: int, eta: float | None = None, **options: Any) -> Variant:
    chosen = {"outer_lr": eta or ETA[peers], "outer_momentum": 0.9, **options}
    return Variant(name, peers, chosen)


def _streaming(wire: str) -> Variant:
    """Two fragments, overlap and mixing as in arXiv 2501.18512."""
    options = {"mode": "streaming", "fragments": 2, "overlap": 5, "alpha": 0.5, "wire": wire}
    return _diloco(f"streaming-4-{wire}", 4, eta=0.4, **options)


# What `pccl.diloco.sparseloco()` and `muloco(4)` say, for this module needs no torch.
_SPARSELOCO = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "wire": "sparse"}
_MULOCO = {"outer_lr": 0.833, "outer_momentum": 0.733, "nesterov": True, "wire": "int4"}

VARIANTS = (
    Variant(BASELINE, 2, None),  # their number makes no difference to the loss
    *(_diloco(f"sync-{peers}", peers) for peers in ETA),
    _diloco("sync-4-int8", 4, wire="int8"),
    _diloco("sync-4-int4", 4, wire="int4"),
    _diloco("sync-4-e3m0", 4, wire="e3m0"),
    _diloco("delayed-4", 4, mode="delayed", eta=0.7, outer_momentum=0.0),
    _diloco("eager-4", 4, mode="eager", eta=1.0, outer_momentum=0.0),
    _streaming("int4"),
    _streaming("e3m0"),
    Variant("sparseloco-4", 4, _SPARSELOCO),
    Variant("muloco-4", 4, _MULOCO, muon=True),
    replace(_diloco("sync-4-churn", 4), churn=Churn(every_rounds=5)),
    replace(_diloco("calm", 4), pace_s=0.05, rounds=40),
    replace(_diloco("failures", 4), pace_s=0.05, rounds=40, churn=Churn(every_s=15.0)),
)
