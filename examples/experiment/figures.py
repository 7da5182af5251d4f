"""The figures, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiment.tables import Row, law, published

# of Okabe and Ito: readable for the color-blind
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_MARKS = ("o", "s", "^", "D", "v", "P")  # of as many series as colours


def sizes(rows: Sequence[Row], path: Path) -> None:
    """The gap of synchronous DiLoCo against the number of parameters, beside the published one.

    Raises:
        OSError: it cannot be written.
    """
    figure, axes = _figure("What synchronous DiLoCo costs, by the size of the model")
    names = dict.fromkeys(row.arm.name for row in rows)
    for color, mark, name in zip(_COLOURS, _MARKS * 2, names, strict=False):
        own = [row for row in rows if row.arm.name == name]
        axes.errorbar(
            [row.size.parameters for row in own], [row.gap for row in own],
            [row.spread for row in own], fmt=f"{mark}-", color=color, capsize=3, label=name,
        )  # fmt: skip
    steps = [5e4 * 1.1**i for i in range(88)]
    axes.plot(
        steps, [law(4, n) for n in steps], "--", color="black", linewidth=1,
        label="published law, 4 peers",
    )  # fmt: skip
    for mark, peers in zip(_MARKS, (2, 4, 8), strict=False):
        points = published(peers)
        axes.plot(
            list(points), list(points.values()), mark, color="black", fillstyle="none",
            label=f"published, {peers} peers",
        )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("parameters, with 20 tokens for each")
    axes.set_ylabel("validation loss above that of data parallel")
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def savings(rows: Sequence[Row], path: Path) -> None:
    """The gap of all arms against the bytes that they save.

    Raises:
        OSError: it cannot be written.
    """
    figure, axes = _figure("What DiLoCo costs, and what it saves")
    names = list(dict.fromkeys(row.size.name for row in rows))
    for i, name in enumerate(names):
        own = [(row.saving, row) for row in rows if row.size.name == name and row.saving]
        axes.errorbar(
            [saving for saving, _ in own], [row.gap for _, row in own],
            [row.spread for _, row in own], fmt=_MARKS[i], color=_COLOURS[i], capsize=3,
            label=f"{name} parameters",
        )  # fmt: skip
        if i == 0:
            for saving, row in own:
                axes.annotate(
                    row.arm.name, (saving, row.gap), textcoords="offset points", xytext=(6, 3),
                    fontsize=7,
                )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("times fewer bytes than data parallel sends among as many peers")
    axes.set_ylabel("validation loss above that of data parallel")
    axes.margins(x=0.15)
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def waits(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path) -> None:
    """Losses against seconds, by title and name; the last loss of the first name has a line.

    Raises:
        OSError: it cannot be written.
    """
    figure, *every = _figure(*panels)
    names = dict.fromkeys(name for curves in panels.values() for name in curves)
    colours = dict(zip(names, _COLOURS, strict=False))
    for axes, curves in zip(every, panels.values(), strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), color=colours[name], label=name)
        first = next(iter(curves.values()))
        axes.axhline(first[-1][1], linestyle="--", color="black", linewidth=0.8)
        axes.set_ylim(top=first[-1][1] + 1.0)  # the beginnings look all alike
        axes.set_xlabel("seconds")
    every[0].set_ylabel("validation loss, nats per byte")
    every[0].legend(frameon=False, fontsize=8)
    _write(figure, path)


def _figure(*titles: str) -> tuple[Figure, *tuple[Axes, ...]]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    every = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(every, titles, strict=True):
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, *every


def _write(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "pccl"}):  # the same file for the same results
        figure.savefig(path, metadata={"Date": None})
