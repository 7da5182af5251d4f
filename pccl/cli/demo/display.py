"""The demonstration in the terminal, and its chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pccl.cli.demo.director import Director, Peer, State
from pccl.cli.terminal import Style, Styled, scaled, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: dict[State, Style] = {
    State.LOADING: "dim",
    State.STANDBY: "dim",
    State.JOINING: "yellow",
    State.TRAINING: "green",
    State.KILLED: "red",
    State.FINISHED: "green",
    State.FAILED: "red",
}


def picture(director: Director) -> Iterator[str]:
    def row(peer: Peer) -> Sequence[str]:
        trains = peer.state is State.TRAINING and peer.training
        return (
            str(peer.number),
            peer.state.value,
            str(peer.outer_step) if peer.joined_s is not None else "-",
            f"{peer.training[-1][1]:.3f}" if peer.training else "-",
            f"{peer.tokens_per_s:,.0f}" if trains else "-",
            f"{scaled(peer.tx_bytes)}B",
        )

    yield f"DiLoCo, outer step {director.outer_step}/{director.steps}"
    heads = ("peer", "state", "outer step", "loss", "tokens/s", "sent")
    yield from _table(director, heads, row)
    speed = f"{director.algbw_bytes_s / 1e9:.2f} GB/s" if director.algbw_bytes_s else "-"
    size = scaled(director.reduce_bytes)
    yield Styled(f"last all-reduce: {size}B a peer, algbw {speed}", "dim")


def closing_table(director: Director) -> Iterator[str]:
    """The table of each peer's results. Losses are validation losses."""

    def row(peer: Peer) -> Sequence[str]:
        return (
            str(peer.number),
            peer.fate,
            f"{peer.validation[0][1]:.3f} -> {peer.validation[-1][1]:.3f}",
            f"{scaled(peer.tx_bytes)}B",
            f"{scaled(peer.data_parallel_bytes)}B",
            peer.digest[:8] or "-",
        )

    return _table(director, ("peer", "fate", "loss", "sent", "data parallel", "digest"), row)


def _table(
    director: Director, heads: Sequence[str], row: Callable[[Peer], Sequence[str]]
) -> Iterator[str]:
    """A row for each peer, in the color of its state."""
    head, *lines = table(heads, map(row, director.peers))
    yield head
    for line, peer in zip(lines, director.peers, strict=True):
        yield Styled(line, _STYLES[peer.state])


# Okabe and Ito's palette, which color-blind readers can tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_GREY = "#555555"


def save(director: Director, path: Path) -> None:
    # imported late, because the import takes a second or more without any output
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

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
    color = _COLORS[peer.number % len(_COLORS)]
    times, losses = zip(*peer.training, strict=True)
    axes.plot(times, losses, color=color, linewidth=1.2, alpha=0.85, label=peer.name)
    if peer.killed_s is not None:
        axes.plot(times[-1], losses[-1], "X", color=color, markersize=10, zorder=5)
        _mark(axes, peer.killed_s, f"{peer.name} killed", "right")
    if peer.joined_step and peer.joined_s is not None:
        axes.plot(times[0], losses[0], "^", color=color, markersize=9, zorder=5)
        _mark(axes, peer.joined_s, f"{peer.name} joins", "left")


def _mark(axes: Axes, time_s: float, text: str, align: Literal["left", "right"]) -> None:
    """A vertical line with its text on one side."""
    axes.axvline(time_s, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        text, (time_s, 0.6), xycoords=("data", "axes fraction"), textcoords="offset points",
        xytext=(5 if align == "left" else -5, 0), ha=align, color=_GREY, fontsize=9,
    )  # fmt: skip
