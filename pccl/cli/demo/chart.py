"""The chart of a run: the loss of each peer over time, with the kill and the join marked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from pccl.cli.demo.director import Director, Peer

# Okabe and Ito's, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_GREY = "#555555"


def save(director: Director, path: Path) -> None:
    """Writes the PNG of a finished run.

    Raises:
        OSError: `path` cannot be written.
    """
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for peer in director.peers:
        _draw_peer(axes, peer)
    # theta is the same on all peers, so one curve stands for all; peer 0 lives from first to last.
    times, losses = zip(*director.peers[0].validation, strict=True)
    axes.plot(
        times, losses, color="black", linewidth=1.6, marker="o", markersize=4, zorder=4,
        label="validation, after each outer step",
    )  # fmt: skip
    axes.set_title(
        f"DiLoCo on Python's standard library: {director.steps} outer steps "
        f"of {director.inner_steps} inner steps",
        loc="left",
    )
    # The first steps take the loss down most; a logarithmic scale leaves room to see the rest.
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([1.5, 2, 2.5, 3, 4, 5]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path)


def _draw_peer(axes: Axes, peer: Peer) -> None:
    if not peer.training:
        return
    colour = _COLOURS[peer.number % len(_COLOURS)]
    times, losses = zip(*peer.training, strict=True)
    axes.plot(times, losses, color=colour, linewidth=1.2, alpha=0.85, label=peer.name)
    if peer.killed_s is not None:
        axes.plot(times[-1], losses[-1], "X", color=colour, markersize=10, zorder=5)
        _mark(axes, peer.killed_s, f"{peer.name} killed", "right")
    if peer.joined_step and peer.joined_s is not None:
        axes.plot(times[0], losses[0], "^", color=colour, markersize=9, zorder=5)
        _mark(axes, peer.joined_s, f"{peer.name} joins", "left")


def _mark(axes: Axes, time_s: float, text: str, align: Literal["left", "right"]) -> None:
    """A line with its text on that side where the text of the other line is not."""
    axes.axvline(time_s, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        text, (time_s, 0.6), xycoords=("data", "axes fraction"), textcoords="offset points",
        xytext=(5 if align == "left" else -5, 0), ha=align, color=_GREY, fontsize=9,
    )  # fmt: skip
