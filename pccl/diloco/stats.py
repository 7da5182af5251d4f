"""The report of a round: its outcome, its time and bytes, and the share of each peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pccl import Communicator, PCCLError, ReduceInfo, Result, SharedStateSyncInfo
from pccl.diloco.averaging import Algorithm


@dataclass(frozen=True, slots=True)
class PeerShare:
    """The work of one peer in a round.

    Attributes:
        inner_steps: that it has taken.
        samples: that it has trained on, as `DiLoCo.step` was told.
        compute_s: seconds in which it has trained.
        utilisation: these, as a part of the time from the end of its last round to this one's.
        late: whether it came late to a deadline round, so that its progress is in the next one.
    """

    inner_steps: int
    samples: int
    compute_s: float
    utilisation: float
    late: bool


def gather_shares(comm: Communicator, own: PeerShare) -> tuple[PeerShare, ...]:
    """The shares of all peers, in the order of their ranks.

    It is called again whenever a peer is lost: some may have entered before that, others not.
    """
    row = [own.inner_steps, own.samples, own.compute_s, own.utilisation, own.late]
    sent = torch.tensor(row, dtype=torch.float64)
    while True:
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        try:
            handle = comm.all_gather_async(sent)
            committed, _, _ = handle.wait()
            if committed:
                break
            assert handle.error is not None
            raise handle.error
        except PCCLError as error:
            if error.result is Result.TOO_FEW_PEERS:
                return (own,)
            if error.result is not Result.RANK_CONNECTION_LOST:
                raise
    gathered: Any = handle.result  # a tensor
    rows: list[list[float]] = gathered.tolist()
    return tuple(
        PeerShare(int(steps), int(samples), compute_s, utilisation, bool(late))
        for steps, samples, compute_s, utilisation, late in rows
    )


@dataclass(frozen=True, slots=True)
class OuterRound:
    """The result of one outer round, on this peer.

    Attributes:
        outer_step: k after the round.
        contributors: peers whose pseudo-gradients were averaged. 1 means that this peer was alone:
            no outer step was taken, unless `alone` is "step". With mode="delayed", of the mean that
            was applied in this round; 0: there was none to apply. "eager" is like it in all this.
        retries: attempts of that all-reduce that failed because a peer was lost.
        admitted: whether newcomers were admitted.
        rejoined: whether the run went on without this peer, which was late or not heard of; it has
            joined the run once more, and its progress is in the next round. No mean was applied.
        fragment: with mode="streaming", which fragment of the model was averaged.
        compute_s: seconds of the inner steps, since the last round or the constructor.
        reduce_s: seconds in the all-reduce, including the wait for the slowest peer; with
            mode="delayed" without the time in the background.
        admit_s: seconds to admit newcomers; with alone="wait" also the wait for them.
        sync_s: seconds in the synchronization of the shared state.
        total_s: seconds in the whole round, without compute_s.
        tx_bytes: payload bytes that this peer sent in the all-reduce and the synchronization.
        rx_bytes: payload bytes that this peer received in them.
        algorithm: how this round's progress was, or is being, averaged: "gather" if it was
            quantized and gathered, "two-stage" if owners of parts have added it up and quantized
            the mean, "ring" if it went around the ring in fp32. See `wire`.
        peers: what each peer did in this round, in the order of their ranks, if they may differ
            (inner_seconds, deadline_peers, or weight="samples"); else, and in a round that has
            admitted newcomers, what this peer did.
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
    peers: tuple[PeerShare, ...]

    def flat(self, prefix: str = "diloco/") -> dict[str, float]:
        """All as one dict of floats, as TensorBoard and Weights & Biases take them.

            wandb.log(outer.flat(), step=outer.outer_step)

        `utilisation` is the least of all peers, and `late` how many were late, as far as is known;
        `gathered` says whether `algorithm` is "gather".
        """
        names = [name for name in self.__slots__ if name not in ("algorithm", "peers")]
        found = {f"{prefix}{name}": float(getattr(self, name)) for name in names}
        found[f"{prefix}gathered"] = float(self.algorithm == "gather")
        found[f"{prefix}utilisation"] = min((peer.utilisation for peer in self.peers), default=0.0)
        found[f"{prefix}late"] = float(sum(peer.late for peer in self.peers))
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of a round: the contributors of the mean that it has applied, retries, admission.

    Attributes:
        contributors: peers in the mean that was applied; 0 if there was none.
        retries: failed attempts to average it.
        admitted: whether newcomers were admitted.
        fragment: which part of the model the mean is of.
        rejoined: whether the run has gone on without this peer, which has joined it once more.
    """

    contributors: int
    retries: int
    admitted: bool
    fragment: int = 0
    rejoined: bool = False


class Meter:
    """Counts the bytes of all rounds, and the seconds of the present one by what they went into.

    Attributes:
        tx_bytes: payload bytes that this peer has sent.
        rx_bytes: payload bytes that it has received.
        seconds: of the present round, by "reduce", "admit" and "sync".
        last_reduce: info of the last all-reduce that has committed; None before the first.
    """

    def __init__(self) -> None:
        self.last_reduce: ReduceInfo | None = None
        self.tx_bytes = 0
        self.rx_bytes = 0
        self.seconds: dict[str, float] = {}
        self.begin_round()

    def begin_round(self) -> None:
        """Counts the seconds from 0 again."""
        self.seconds = {"reduce": 0.0, "admit": 0.0, "sync": 0.0}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time in the block."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - began_s

    def count(self, info: ReduceInfo | SharedStateSyncInfo) -> None:
        """Adds the bytes of a call."""
        self.tx_bytes += info.tx_bytes
        self.rx_bytes += info.rx_bytes


class Stopwatch:
    """Finds where the time of a round goes. It may have several parts, with training between."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._round_ended_s = time.monotonic()
        self._inside_s = 0.0
        self._bytes = (0, 0)
        self._begin()

    def _begin(self) -> None:
        self._meter.begin_round()
        self._bytes = self._meter.tx_bytes, self._meter.rx_bytes
        self._round_ended_s, self._inside_s = time.monotonic(), 0.0

    @contextmanager
    def round(self) -> Iterator[None]:
        """The block is the round, or a part of it."""
        began_s = time.monotonic()
        yield
        self._inside_s += time.monotonic() - began_s

    def share(self, inner_steps: int, samples: int, late: bool) -> PeerShare:
        """The share of this peer in the round."""
        return PeerShare(inner_steps, samples, self.compute_s, self._utilisation, late)

    @property
    def compute_s(self) -> float:
        """Seconds of training since the last round."""
        return time.monotonic() - self._round_ended_s - self._inside_s

    @property
    def _utilisation(self) -> float:
        compute_s = self.compute_s
        whole_s = compute_s + self._inside_s
        return compute_s / whole_s if whole_s else 0.0  # of less time than the clock can show

    def report(
        self, outer_step: int, outcome: Outcome, algorithm: Algorithm, peers: tuple[PeerShare, ...]
    ) -> OuterRound:
        """Of the round that has ended."""
        meter = self._meter
        tx_before, rx_before = self._bytes
        report = OuterRound(
            outer_step=outer_step,
            contributors=outcome.contributors,
            retries=outcome.retries,
            admitted=outcome.admitted,
            rejoined=outcome.rejoined,
            fragment=outcome.fragment,
            compute_s=self.compute_s,
            reduce_s=meter.seconds["reduce"],
            admit_s=meter.seconds["admit"],
            sync_s=meter.seconds["sync"],
            total_s=self._inside_s,
            tx_bytes=meter.tx_bytes - tx_before,
            rx_bytes=meter.rx_bytes - rx_before,
            algorithm=algorithm,
            peers=peers,
        )
        self._begin()
        return report
