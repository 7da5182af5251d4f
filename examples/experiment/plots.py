"""The plots of an experiment, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiment.runs import BASELINE, Result
from experiment.table import gap, saving

# of Okabe and Ito: readable for the colour-blind
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_LINES = ("-", "--", ":")


def save(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes the plots for which there are enough results. Returns their paths.

    Raises:
        OSError: one cannot be written.
    """
    trained = [r for r in results if not r.variant.is_timed]
    timed = [r for r in results if r.variant.is_timed]
    exchanged = [r for r in trained if r.variant.peers > 1]
    baseline = next((r for r in trained if r.variant.name == BASELINE), None)
    made = []
    if baseline is not None and len(exchanged) > 1:
        made.append(_write(_gaps(exchanged, baseline), folder / "gap.svg"))
    if exchanged:
        made.append(_write(_losses(exchanged), folder / "loss.svg"))
    if timed:
        made.append(_write(_goodput(timed), folder / "goodput.svg"))
    return made


def _gaps(results: Sequence[Result], baseline: Result) -> Figure:
    figure, axes = _figure("What DiLoCo costs, and what it saves")
    for i, result in enumerate(r for r in results if r is not baseline):
        times, cost = saving(result), gap(result, baseline)
        assert times is not None
        axes.plot(times, cost, "o", color=_COLOURS[i % len(_COLOURS)])
        axes.annotate(
            result.variant.name, (times, cost), textcoords="offset points", xytext=(6, 3),
            fontsize=8,
        )  # fmt: skip
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.set_xlabel("times fewer bytes than data parallel sends among as many peers")
    axes.set_ylabel("validation loss above that of data parallel")
    axes.margins(x=0.15)
    return figure


def _losses(results: Sequence[Result]) -> Figure:
    figure, axes = _figure("Loss against what a peer has sent")
    for i, result in enumerate(results):
        bytes_sent = [point.tx_bytes / 1e6 for point in result.curve]
        losses = [point.validation for point in result.curve]
        axes.plot(
            bytes_sent, losses, _LINES[i // len(_COLOURS) % len(_LINES)],
            color=_COLOURS[i % len(_COLOURS)], linewidth=1.2, label=result.variant.name,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB sent by a peer")
    axes.set_ylabel("validation loss, nats per byte")
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2)
    return figure


def _goodput(results: Sequence[Result]) -> Figure:
    figure, axes = _figure("What the peers have learnt from, with and without failures")
    for i, result in enumerate(results):
        own = result.tokens / sum(one.contributors for one in result.rounds)
        learnt = accumulate(own * one.contributors / 1e6 for one in result.rounds)
        every_s = result.variant.churn.every_s
        label = f"one failure in {every_s:.0f} s" if every_s else "no failures"
        seconds = [one.seconds for one in result.rounds]
        axes.plot(seconds, list(learnt), color=_COLOURS[i % len(_COLOURS)], label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("millions of tokens")
    axes.legend(loc="upper left", frameon=False)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _write(figure: Figure, path: Path) -> Path:
    with matplotlib.rc_context({"svg.hashsalt": "pccl"}):  # the same file for the same results
        figure.savefig(path, metadata={"Date": None})
    return path
