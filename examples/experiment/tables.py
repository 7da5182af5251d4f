"""Gaps to data parallel, as tables in Markdown, and whether they are as small as they should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from experiment.runs import ARMS, BASELINE, Arm, Rates, Result, Results, Run, Size, arms_of

# Losses of arXiv 2503.09799, table 4 (C4, H = 30, tuned): data parallel, then M = 1, 2, 4, 8.
PUBLISHED = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
}
_PEERS = (1, 2, 4, 8)


def published(peers: int) -> dict[float, float]:
    """The gaps that others have found for the synchronous form, by the number of parameters."""
    place = 1 + _PEERS.index(peers)
    return {size: row[place] / row[0] - 1 for size, row in PUBLISHED.items()}


def law(peers: int, parameters: float) -> float:
    """The published gap at another size: a power of N, fitted to `published`."""
    points = [(math.log(size), math.log(gap)) for size, gap in published(peers).items()]
    mean_x, mean_y = mean(x for x, _ in points), mean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope /= sum((x - mean_x) ** 2 for x, _ in points)
    return math.exp(mean_y + slope * (math.log(parameters) - mean_x))


@dataclass(frozen=True)
class Row:
    """An arm at a size: the gap to data parallel of the same seed, over all seeds."""

    arm: Arm
    size: Size
    rates: Rates
    results: tuple[Result, ...]
    gaps: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Mean of the gaps, as a part of the loss of data parallel."""
        return mean(self.gaps)

    @property
    def spread(self) -> float:
        """Standard deviation of the gaps over the seeds; 0 for one."""
        return stdev(self.gaps) if len(self.gaps) > 1 else 0.0

    @property
    def tx_bytes(self) -> float:
        """Bytes that a peer has sent."""
        return mean(result.tx_bytes for result in self.results)

    @property
    def saving(self) -> float | None:
        """How many times fewer bytes than a ring all-reduce of fp32 gradients in each step."""
        peers = self.arm.peers
        ring = self.size.steps * 2 * (peers - 1) / peers * 4 * self.size.parameters
        return ring / self.tx_bytes if self.tx_bytes else None


def row_of(results: Results, arm: Arm, size: Size, smallest: Size, seeds: int) -> Row | None:
    """The measurements of an arm; None if there are none."""
    rates, base = results.rates(arm, smallest), ARMS[BASELINE]
    baseline_rates = results.rates(base, smallest)
    if rates is None or baseline_rates is None:
        return None
    found = [
        (own, other)
        for seed in range(1, 1 + seeds)
        if (own := results.get(Run(size, arm, rates, seed)))
        and (other := results.get(Run(size, base, baseline_rates, seed)))
    ]
    if not found:
        return None
    gaps = tuple(own.loss / other.loss - 1 for own, other in found)
    return Row(arm, size, rates, tuple(own for own, _ in found), gaps)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def percent(part: float) -> str:
    """With a sign and two digits."""
    return f"{100 * part:+.2f} %"


def arms(rows: Sequence[Row], missing: Sequence[tuple[Size, Arm]]) -> str:
    """All arms of one or more sizes."""
    head = ["N", "arm", "loss", "gap", "seeds", "published law", "MB sent by each"]
    head += ["times fewer", "kills"]
    lines = []
    for row in rows:
        has_law = row.arm.peers > 1 and not (
            row.arm.options or row.arm.kill_every or row.size.is_long
        )
        spread = f" ± {100 * row.spread:.2f}" if len(row.gaps) > 1 else ""
        kills = sum(result.kills for result in row.results) / len(row.results)
        lines.append(
            [
                row.size.name,
                row.arm.name,
                f"{mean(result.loss for result in row.results):.4f}",
                "" if row.arm.name == BASELINE else percent(row.gap) + spread,
                str(len(row.gaps)),
                percent(law(row.arm.peers, row.size.parameters)) if has_law else "",
                f"{row.tx_bytes / 1e6:.2f}" if row.tx_bytes else "",
                f"{row.saving:,.0f}" if row.saving else "",
                f"{kills:.0f}" if kills else "",
            ]
        )
    text = table(head, lines)
    for size in dict.fromkeys(size for size, _ in missing):
        names = ", ".join(arm.name for other, arm in missing if other == size)
        text += f"\nNot run with N = {size.name}: {names}.\n"
    return text


def sweep(results: Results, wanted: Sequence[Arm], size: Size) -> str:
    """The losses of the sweep, and what it has chosen."""
    lines = []
    for arm in wanted:
        if arm.like:
            continue
        found = sorted(results.swept(arm, size), key=lambda result: result.loss)
        whole = f"{len(found)} of {len(arm.grid)}"
        cells = [f"{words(each.rates)}: {each.loss:.4f}" for each in found]
        lines.append([arm.name, whole, cells[0] if cells else "", "; ".join(cells[1:])])
    return table(["arm", "runs", "best", "others"], lines)


def words(rates: Rates) -> str:
    """Inner learning rate, eta, mu."""
    text = f"{rates.lr:g}"
    if rates.outer_lr is not None:
        text += f", {rates.outer_lr:g}, {rates.outer_momentum:g}"
    return text


_LATE = ("delayed-4-int4", "streaming-4-int4", "decoupled-4-int4")


def bars(rows: Sequence[Row]) -> str:
    """The bars, and whether each was reached."""
    found = {(row.size, row.arm.name): row for row in rows}
    lines = []
    for size in dict.fromkeys(row.size for row in rows):
        sync, int4 = found.get((size, "sync-4")), found.get((size, "sync-4-int4"))
        for name, text, allowed, saving in (
            ("sync-4-int4", "half of the published law", law(4, size.parameters) / 2, 100),
            *((late, "1.5 times sync-4-int4", int4 and 1.5 * int4.gap, 100) for late in _LATE),
            ("sparse-4", "twice sync-4", sync and 2 * sync.gap, 1000),
            ("churn-4", "1 % more than sync-4", sync and sync.gap + 0.01, 0),
        ):
            if not arms_of(size, [ARMS[name]]):
                continue
            row = found.get((size, name))
            lines.append([size.name, name, text, *_reached(row, allowed, saving)])
    return table(["N", "arm", "gap at most", "that is", "measured", "reached"], lines)


def _reached(row: Row | None, allowed: float | None, saving: float) -> tuple[str, str, str]:
    limit = "" if allowed is None else percent(allowed)
    if row is None or allowed is None:
        return limit, "not run", ""
    yes = row.gap <= allowed and (row.saving or 0.0) >= saving
    bytes_saved = f" at 1/{row.saving:,.0f} of the bytes" if row.saving else ""
    return limit, percent(row.gap) + bytes_saved, "yes" if yes else "no"
