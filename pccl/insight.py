"""The cost of a peer's calls, and the limits of its collectives.

Nothing is measured here: all functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from pccl.support import duration_text
from pccl.types import TRAITS, CollectiveKind

BUSY = 0.8  # a link or processor that is busy for at least this share of the time is the limit
NEGLIGIBLE = 0.03  # smaller shares of the time are omitted
# called with metrics by name and the number of the step, as are wandb.log and Lightning's loggers
LogMetrics: TypeAlias = Callable[[dict[str, Any], int], object]


@dataclass(frozen=True, slots=True)
class Stats:
    """The cost of a peer's calls since it joined the run.

    >>> stats = Stats(collectives={"all_reduce": 12}, tx_bytes=48_000)
    >>> stats.collectives["all_reduce"], stats.flat()["pccl/tx_bytes"]
    (12, 48000.0)

    Attributes:
        collectives: the number of collectives that have succeeded, by call.
        failures: the number of calls of any kind that have failed, by reason: `peer_lost`,
            `timeout`, ...
        tx_bytes: payload bytes that this peer sent in calls that have succeeded.
        rx_bytes: payload bytes that it received in these calls.
        entering_seconds: total time of these collectives from the call until all had entered it.
        moving_seconds: total time from then until this peer held the result.
        finishing_seconds: total time from then until all had the result. Small collectives take
            only entering time: their data travels with the votes.
        syncs: synchronizations of the shared state that have succeeded.
        sync_seconds: how long they took.
        recoveries: how many times a collective started after another one had failed because of
            other peers.
        recovery_seconds: total time from such failures to the starts of the next collectives.
    """

    collectives: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    tx_bytes: int = 0
    rx_bytes: int = 0
    entering_seconds: float = 0.0
    moving_seconds: float = 0.0
    finishing_seconds: float = 0.0
    syncs: int = 0
    sync_seconds: float = 0.0
    recoveries: int = 0
    recovery_seconds: float = 0.0

    def flat(self, prefix: str = "pccl/") -> dict[str, float]:
        """All numbers as one dict of floats, as TensorBoard and Weights & Biases take them.

        wandb.log(comm.stats().flat(), step=step)
        """
        found = {
            f"{prefix}{name}": float(getattr(self, name))
            for name in self.__slots__
            if name not in ("collectives", "failures")
        }
        for name in ("collectives", "failures"):
            by_kind: Mapping[str, int] = getattr(self, name)
            found[f"{prefix}{name}"] = float(sum(by_kind.values()))
            found |= {f"{prefix}{name}/{kind}": float(n) for kind, n in by_kind.items()}
        return found


class Sample(NamedTuple):
    """A collective that has succeeded."""

    what: str  # the call
    members: int  # the number of members
    tx_bytes: int  # payload bytes that this peer has sent
    small: bool  # whether its data traveled with the votes
    entering_s: float  # from the call until all had entered it
    moving_s: float  # from then until this peer held the result
    finishing_s: float  # from then until all had the result
    engine_s: float | None  # processor time of the engine's thread while data moved, if known

    @property
    def total_s(self) -> float:
        return self.entering_s + self.moving_s + self.finishing_s


class LinkFacts(NamedTuple):
    """The link from this peer to the next one in the ring, as measured by its kernel."""

    to: str  # the next peer
    rtt_s: float  # the round trip of an idle link
    busy: float  # the share of the collectives' moving time in which bytes were in flight
    full: float  # the share of that time in which the receive window of the other side was full
    retransmits: int  # retransmitted packets


class Cause(Enum):
    """A cause of a collective's duration; the value is its description, and the condition without
    it."""

    VOTES = "the two votes, if the master were beside this peer"
    LATE = "waiting for peers that enter later, if all entered at once"
    STEPS = "round trips from peer to peer, if they took no time"
    LINK = "the link to the next peer, if it were twice as fast"
    RECEIVER = "the next peer, which reads too slowly, if it were twice as fast"
    ELSEWHERE = "other links or peers of the ring, if these were twice as fast"
    CPU = "this machine's processor, if it were twice as fast"
    END = "waiting for the others to have the result, if all had it at once"


HALVED = (Cause.LINK, Cause.RECEIVER, Cause.ELSEWHERE, Cause.CPU)  # if these were twice as fast


@dataclass(frozen=True, slots=True)
class Limit:
    """One part of a collective's time, with its cause.

    Attributes:
        cause: what takes the time.
        seconds: the time that it takes in the average collective.
        without: how long the average collective would take without it, or if it were twice as fast,
            according to `cause.value`.
        why: the measurement.
    """

    cause: Cause
    seconds: float
    without: float
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The limits of a peer's last collectives.

    `str()` gives a text, as in `print(comm.explain())`. It explains the kind of collective that
    took most time.

    >>> late = Limit(Cause.LATE, seconds=0.2, without=0.3, why="the longest wait took 0.4 s")
    >>> print(Explanation("all_reduce", count=64, seconds=0.5, rate=5e7, limits=(late,)))
    the last 64 of all_reduce took 500 ms each, and sent 50 MB/s
     40 %, 200 ms: waiting for peers that enter later: the longest wait took 0.4 s. If all entered \
at once: 300 ms

    Attributes:
        what: the call; empty if there was none.
        count: the number of these collectives.
        seconds: their average time.
        rate: bytes per second that this peer sent while data moved.
        limits: the parts of that time, the largest first.
    """

    what: str = ""
    count: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        if not self.count:
            return "no collective has succeeded yet"
        lines = [
            f"the last {self.count} of {self.what} took {duration_text(self.seconds)} each, "
            f"and sent {self.rate / 1e6:.4g} MB/s"
        ]
        for one in self.limits:
            share = 100 * one.seconds / self.seconds if self.seconds else 0.0
            what, _, then = one.cause.value.partition(", if ")
            lines.append(
                f"{share:3.0f} %, {duration_text(one.seconds)}: {what}: {one.why}. "
                f"If {then}: {duration_text(one.without)}"
            )
        return "\n".join(lines)


def explain(
    samples: Sequence[Sample], link: LinkFacts | None = None, master_s: float | None = None
) -> Explanation:
    """Explains the duration of a peer's last collectives.

    `link` and `master_s`, the round trip to the master, may be unknown, as on one machine.
    """
    chosen = _slowest_kind(samples)
    if not chosen:
        return Explanation()
    mean_s = sum(one.total_s for one in chosen) / len(chosen)
    moving_s = sum(one.moving_s for one in chosen)
    sent = sum(one.tx_bytes for one in chosen)
    parts = [*_votes(chosen, master_s), *_data(chosen, link)]
    limits = [
        Limit(cause, spent_s, mean_s - (spent_s / 2 if cause in HALVED else spent_s), why)
        for cause, spent_s, why in parts
        if spent_s > NEGLIGIBLE * mean_s
    ]
    limits.sort(key=lambda one: -one.seconds)
    rate = sent / (moving_s or sum(one.total_s for one in chosen) or 1.0)
    return Explanation(chosen[0].what, len(chosen), mean_s, rate, tuple(limits))


Part = tuple[Cause, float, str]  # the cause, its seconds of the mean, and the measurement


def _slowest_kind(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the kind and size of collective that took most of the time."""
    kinds: dict[tuple[str, bool, int, int], list[Sample]] = {}
    for one in samples:
        key = one.what, one.small, one.members, one.tx_bytes.bit_length()
        kinds.setdefault(key, []).append(one)
    return max(kinds.values(), key=lambda each: sum(one.total_s for one in each), default=[])


def _votes(samples: Sequence[Sample], master_s: float | None) -> Iterator[Part]:
    """The time of the votes, and of waiting for others in them.

    The shortest vote counts as one without waiting.
    """
    count, votes = len(samples), 1 if samples[0].small else 2
    spans = [one.entering_s for one in samples]
    if votes == 2:
        spans += [one.finishing_s for one in samples]
    least_s = min(spans)
    trip = (
        ""
        if master_s is None
        else f"; the round trip to the master alone takes {duration_text(master_s)}"
    )
    why = f"the shortest of the last {len(spans)} took {duration_text(least_s)}{trip}"
    yield Cause.VOTES, votes * least_s, why
    waits = {Cause.LATE: [one.entering_s - least_s for one in samples]}
    if votes == 2:
        waits[Cause.END] = [one.finishing_s - least_s for one in samples]
    for cause, each in waits.items():
        why = f"of the last {count}, the longest wait took {duration_text(max(each))}"
        yield cause, sum(each) / count, why


def _data(samples: Sequence[Sample], link: LinkFacts | None) -> Iterator[Part]:
    """The time in which data moved: the steps around the ring, and the busiest resource."""
    count = len(samples)
    moving_s = sum(one.moving_s for one in samples) / count
    if not moving_s or samples[0].small:
        return
    steps_s = 0.0
    if link is not None and (laps := TRAITS[CollectiveKind(samples[0].what)].laps):
        steps = laps * (samples[0].members - 1)
        steps_s = min(moving_s, steps * link.rtt_s / 2)
        trip = duration_text(link.rtt_s)
        why = f"{steps} steps, each half a round trip; that to {link.to} takes {trip}"
        yield Cause.STEPS, steps_s, why
    known = [one.engine_s for one in samples if one.engine_s is not None]
    cpu = None if len(known) < count else sum(known) / count / moving_s
    if cpu is not None and cpu >= BUSY:
        why = f"pccl's thread was busy for {100 * cpu:.0f} % of the time in which data moved"
        cause = Cause.CPU
    elif link is not None and link.full >= BUSY:
        why = f"{link.to} had no room for more for {100 * link.full:.0f} % of the time"
        cause = Cause.RECEIVER
    elif link is not None and link.busy >= BUSY:
        again = f", and {link.retransmits} packets were lost on it" if link.retransmits else ""
        why = f"that to {link.to} was busy for {100 * link.busy:.0f} % of the time{again}"
        cause = Cause.LINK
    else:
        own = "" if link is None else f"; the link to {link.to} for {100 * link.busy:.0f} %"
        ours = f"pccl's thread here was busy for {100 * (cpu or 0):.0f} % of the time"
        ours = "how busy pccl's thread was is not known" if cpu is None else ours
        cause, why = Cause.ELSEWHERE, f"{ours}{own}"
    yield cause, moving_s - steps_s, why
