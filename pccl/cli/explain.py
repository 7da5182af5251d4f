"""`pccl doctor --explain`: what limits the collectives of a run, as its master sees it.

A peer knows more of its own: `Communicator.explain()`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.insight import NEGLIGIBLE
from pccl.protocol.master import Status
from pccl.protocol.master.status import GroupStatus
from pccl.protocol.master.tally import Histogram
from pccl.protocol.rounds import Kind
from pccl.protocol.topology import hops
from pccl.support.text import duration_text

NEAR = 0.7  # of what a link has carried when it was measured alone: it has little left


def explanation(status: Status) -> Iterator[str]:
    """In words, line by line: where the time of collectives goes, the slowest link, failures."""
    counts = status.counts
    count = sum(sum(taken.counts) for taken in counts.collectives.values())
    if not count:
        yield "no collective has committed yet"
        return
    entering_s = _mean(counts.votes[Kind.START])
    running_s = sum(taken.total_s for taken in counts.collectives.values()) / count
    given = sum(counts.carried.values()) / count
    yield (
        f"{count} collectives have committed, of {given / 1e6:.4g} MB on the average: "
        f"{duration_text(entering_s + running_s)} from the first peer's call to the last one's end"
    )
    for what, part_s, then in (
        ("waiting for peers that enter later", entering_s, "if all entered at once"),
        ("from then until all have finished: the data, and two votes", running_s, ""),
    ):
        yield _line(what, part_s, entering_s + running_s, then)
    for group in status.groups:
        yield from _links(group, running_s)
    yield from _failures(status)


def _line(what: str, part_s: float, all_s: float, then: str) -> str:
    share = 100 * part_s / all_s if all_s else 0.0
    without = f". {then[0].upper()}{then[1:]}: {duration_text(all_s - part_s)}" if then else ""
    return f"{share:3.0f} %, {duration_text(part_s)}: {what}{without}"


def _links(group: GroupStatus, running_s: float) -> Iterator[str]:
    rates = {
        hop: rate
        for ring in group.rings
        for hop, rate in zip(hops(ring.order), ring.rates, strict=True)
        if rate
    }
    name = f"group {group.group}"
    if not rates:
        what = f"{name}: no link is measured"
        yield f"{what}: call optimize_topology(), which also finds better rings"
        return
    (src, dst), slowest = min(rates.items(), key=lambda each: each[1])
    more = sorted(rates.values())[1:]
    what = f"{name}: the slowest link, from peer {src} to peer {dst}, carries {_rate(slowest)}"
    if group.bus_rate is None:
        yield what
    elif group.bus_rate < NEAR * slowest:
        yield (
            f"{what}; each link carried {_rate(group.bus_rate)} in the last collective: links are "
            "not what limits it, but votes, round trips or processors: ask a peer's explain()"
        )
    elif more:
        better_s = running_s * max(group.bus_rate / more[0], slowest / more[0])
        yield (
            f"{what}; each link carried {_rate(group.bus_rate)} in the last collective: that link "
            f"limits it. Without it the next slowest would, with {_rate(more[0])}: "
            f"{duration_text(min(better_s, running_s))} in place of {duration_text(running_s)}"
        )
    else:
        yield f"{what}, and each carried {_rate(group.bus_rate)}: it limits the collectives"


def _failures(status: Status) -> Iterator[str]:
    counts = status.counts
    if counts.aborted:
        reasons = {str(why): number for why, number in counts.retries.items() if number}
        text = ", ".join(f"{number} by {why}" for why, number in reasons.items())
        yield f"{counts.aborted} collectives were aborted: {text}"
    for group in status.groups:
        if group.goodput is not None and group.goodput < 1 - NEGLIGIBLE:
            lost = 100 * (1 - group.goodput)
            yield f"group {group.group}: {lost:.0f} % of the time was lost to aborts and recoveries"


def _mean(durations: Histogram) -> float:
    number = sum(durations.counts)
    return durations.total_s / number if number else 0.0


def _rate(rate: float) -> str:
    return f"{rate * 8e-6:.4g} Mbit/s"
