"""The report of a round: its outcome, time, bytes, and the work of each peer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from pccl import Communicator, ReduceInfo, SharedStateSyncInfo, extension
from pccl.diloco.averaging import Algorithm


class Work(NamedTuple):
    steps: int = 0
    samples: int = 0

    def plus(self, steps: int, samples: int) -> Work:
        return Work(self.steps + steps, self.samples + samples)


@dataclass(frozen=True, slots=True)
class PeerShare:
    """The work of one peer in a round.

    >>> share = PeerShare(inner_steps=30, samples=480, compute_s=12.0, utilisation=0.8, late=False)
    >>> f"{share.samples / share.compute_s:.0f} samples a second"
    '40 samples a second'

    Attributes:
        inner_steps: inner steps of this peer.
        samples: samples that it passed to `DiLoCo.step`.
        compute_s: seconds of training.
        utilisation: `compute_s` divided by the time from the end of its last round to this one's.
        late: whether it came late to a deadline round; its progress then counts in the next one.
    """

    inner_steps: int
    samples: int
    compute_s: float
    utilisation: float
    late: bool


def gather_shares(
    comm: Communicator, own: PeerShare, ends: bool
) -> tuple[tuple[PeerShare, ...], bool]:
    row = [own.inner_steps, own.samples, own.compute_s, own.utilisation, own.late, ends]
    rows = gather_row(comm, row)
    shares = [
        PeerShare(int(steps), int(samples), compute_s, utilisation, bool(late))
        for steps, samples, compute_s, utilisation, late, _ in rows
    ]
    return tuple(shares), all(row[-1] for row in rows)


def gather_row(comm: Communicator, own: Sequence[float]) -> list[list[float]]:
    """The rows of all peers in the order of ranks; after a loss, those of the survivors."""
    sent = torch.tensor(own, dtype=torch.float64)
    rows: list[list[float]] = extension.gather(comm, sent).tolist()
    return rows


@dataclass(frozen=True, slots=True)
class OuterRound:
    """The result of an outer round on this peer, returned by the last `DiLoCo.step` of the round.

    >>> outer = OuterRound(
    ...     outer_step=7, contributors=4, retries=0, admitted=False, rejoined=False, fragment=0,
    ...     compute_s=27.0, reduce_s=2.5, admit_s=0.0, sync_s=0.5, total_s=3.0,
    ...     tx_bytes=6_000_000, rx_bytes=6_000_000, algorithm="two-stage", excluded=(), peers=(),
    ... )
    >>> f"round {outer.outer_step}, {outer.contributors} peers, {outer.tx_bytes / 1e6:.0f} MB sent"
    'round 7, 4 peers, 6 MB sent'
    >>> f"{outer.total_s / (outer.compute_s + outer.total_s):.0%} of the time is not training"
    '10% of the time is not training'

    Attributes:
        outer_step: k after the round.
        contributors: peers whose pseudo-gradients were averaged. 1: this peer was alone. 0, with
            mode="delayed": there was no mean to apply.
        retries: failed attempts of that all-reduce, because a peer was lost.
        admitted: whether newcomers were admitted.
        rejoined: whether this peer has rejoined, because the run had continued without it while it
            was late or silent. No mean was applied; its progress counts in the next round.
        fragment: the averaged fragment of the model, with mode="streaming" or "decoupled".
        compute_s: seconds of the inner steps, since the last round or the constructor; with
            mode="decoupled" all seconds, because training goes on during a round.
        reduce_s: seconds in the averaging, including the wait for the slowest peer, but not the
            time in the background.
        admit_s: seconds to admit newcomers; with alone="wait" also the wait for them.
        sync_s: seconds in the synchronization of the shared state.
        total_s: seconds in the whole round, without those of the inner steps.
        tx_bytes: payload bytes that this peer sent in the all-reduce and the synchronization.
        rx_bytes: payload bytes that this peer received in them.
        algorithm: how this round's progress was, or is being, averaged: "gather", "two-stage" or
            "ring"; see docs/howto/diloco.md, "Fewer bytes".
        excluded: the peers whose pseudo-gradients were left out of the mean, by `quarantine`.
        peers: the work of each peer in this round, in the order of their ranks, if peers may differ
            (inner_seconds, deadline_peers, or weight="samples"). Otherwise, and in a round that has
            admitted newcomers, the work of this peer alone.
    """

    outer_step: int
    contributors: int
    retries: int
    admitted: bool
    rejoined: bool
    fragment: int
    compute_s: float
    reduce_s: float
    admit_s: float
    sync_s: float
    total_s: float
    tx_bytes: int
    rx_bytes: int
    algorithm: Algorithm
    excluded: tuple[str, ...]
    peers: tuple[PeerShare, ...]

    def flat(self, prefix: str = "diloco/") -> dict[str, float]:
        """All numbers as one dict of floats, as TensorBoard and Weights & Biases take them.

            wandb.log(outer.flat(), step=outer.outer_step)

        `utilisation` is the minimum over `peers`, `late` the number of late peers, `excluded` the
        number of excluded peers, and `gathered` is 1 if `algorithm` is "gather".
        """
        special = ("algorithm", "excluded", "peers")
        names = [name for name in self.__slots__ if name not in special]
        found = {f"{prefix}{name}": float(getattr(self, name)) for name in names}
        found[f"{prefix}excluded"] = float(len(self.excluded))
        found[f"{prefix}gathered"] = float(self.algorithm == "gather")
        found[f"{prefix}utilisation"] = min((peer.utilisation for peer in self.peers), default=0.0)
        found[f"{prefix}late"] = float(sum(peer.late for peer in self.peers))
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mode's report on a round: see `OuterRound`."""

    contributors: int
    retries: int
    admitted: bool
    fragment: int = 0
    rejoined: bool = False


class Meter:
    """Counts bytes, and measures training and rounds; a round may have several parts, with training
    between them.

    `beside`: training goes on during a round.
    """

    def __init__(self, beside: bool) -> None:
        self.last_reduce: ReduceInfo | None = None  # the last committed one
        self.tx_bytes = self.rx_bytes = 0
        self._beside = beside
        self._inside_s = 0.0  # rounds, in all
        self.begin()

    def begin(self) -> None:
        """Begins to measure the first round."""
        self._shared = self._now()
        self._begin_round()

    def _begin_round(self) -> None:
        self._seconds: dict[str, Any] = {"reduce_s": 0.0, "admit_s": 0.0, "sync_s": 0.0}
        self._bytes = self.tx_bytes, self.rx_bytes
        self._began = self._now()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[f"{what}_s"] += time.monotonic() - began_s

    def count(self, info: ReduceInfo | SharedStateSyncInfo) -> None:
        self.tx_bytes += info.tx_bytes
        self.rx_bytes += info.rx_bytes

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._inside_s

    def _since(self, begin: tuple[float, float]) -> tuple[float, float]:
        """Seconds of training, and seconds of rounds that paused it."""
        now_s, inside_s = self._now()
        paused_s = 0.0 if self._beside else inside_s - begin[1]
        return now_s - begin[0] - paused_s, paused_s

    @contextmanager
    def round(self) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._inside_s += time.monotonic() - began_s

    def share(self, inner_steps: int, samples: int, late: bool, idle_s: float) -> PeerShare:
        trained_s, paused_s = self._since(self._shared)
        self._shared = self._now()
        compute_s, whole_s = max(0.0, trained_s - idle_s), trained_s + paused_s
        utilisation = compute_s / whole_s if whole_s else 0.0  # the clock did not advance
        return PeerShare(inner_steps, samples, compute_s, utilisation, late)

    def report(
        self,
        outer_step: int,
        outcome: Outcome,
        algorithm: Algorithm,
        excluded: tuple[str, ...],
        peers: tuple[PeerShare, ...],
    ) -> OuterRound:
        """The report of the round that has ended; starts the next one."""
        tx_before, rx_before = self._bytes
        report = OuterRound(
            outer_step=outer_step,
            **asdict(outcome),
            compute_s=self._since(self._began)[0],
            **self._seconds,
            total_s=self._inside_s - self._began[1],
            tx_bytes=self.tx_bytes - tx_before,
            rx_bytes=self.rx_bytes - rx_before,
            algorithm=algorithm,
            excluded=excluded,
            peers=peers,
        )
        self._begin_round()
        return report
