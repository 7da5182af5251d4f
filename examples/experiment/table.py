"""The table of an experiment, in Markdown, and what was to be reached."""

from __future__ import annotations

from collections.abc import Sequence

from experiment.runs import BASELINE, Result

# Losses of arXiv 2503.09799, table 4 (C4, H = 30, tuned): data parallel, then M = 1, 2, 4, 8.
_PUBLISHED = {
    "35M": (3.485, 3.482, 3.508, 3.554, 3.621),
    "180M": (2.950, 2.943, 2.957, 2.981, 3.019),
}
_PEERS = (1, 2, 4, 8)


def gap(result: Result, baseline: Result) -> float:
    """How much worse than data parallel, as a part of its loss."""
    return result.validation / baseline.validation - 1


def saving(result: Result) -> float | None:
    """How many times fewer bytes than data parallel among as many peers; None for one peer."""
    return result.data_parallel_bytes / result.tx_bytes if result.variant.peers > 1 else None


def published(peers: int) -> str:
    """The gaps at 35M and 180M parameters, which others have found for the synchronous form."""
    i = 1 + _PEERS.index(peers)
    low, high = (f"{100 * (row[i] / row[0] - 1):+.1f}" for row in _PUBLISHED.values())
    return f"{low} to {high} %"


def render(results: Sequence[Result]) -> str:
    """All runs whose loss counts, then those whose time does."""
    baseline = next((r for r in results if r.variant.name == BASELINE), None)
    lines = [
        "| run | peers | loss | gap | published | MB sent by each | times fewer | kills |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        if not result.variant.is_timed:
            lines.append(_row(result, baseline))
    calm = [r for r in results if r.variant.is_timed and not r.kills]
    timed = [r for r in results if r.variant.is_timed and r.kills]
    for result in timed:
        share = result.tokens_per_s / calm[0].tokens_per_s if calm else None
        lines += ["", _goodput(result, share)]
    return "\n".join(lines) + "\n"


def _row(result: Result, baseline: Result | None) -> str:
    variant = result.variant
    known = variant.options is not None and set(variant.options) <= {"outer_lr", "outer_momentum"}
    times = saving(result)
    cells = (
        variant.name,
        str(variant.peers),
        f"{result.validation:.4f}",
        f"{100 * gap(result, baseline):+.2f} %" if baseline else "",
        published(variant.peers) if known and not result.kills else "",
        f"{result.tx_bytes / 1e6:.2f}",
        f"{times:,.0f}" if times and variant.name != BASELINE else "",
        str(result.kills or ""),
    )
    return f"| {' | '.join(cells)} |"


def _goodput(result: Result, share: float | None) -> str:
    every_s = result.variant.churn.every_s
    text = f"One failure in {every_s:.0f} s: {result.tokens_per_s:,.0f} tokens a second"
    if share is not None:
        text += f", {share:.1%} of those without failures"
    return f"{text} (load of the machine: {result.load:.1f})."
