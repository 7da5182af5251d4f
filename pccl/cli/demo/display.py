"""The demo's output: a table that is updated in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.cli.demo.director import Director, Peer, State
from pccl.support.closing import Closing

_STYLES = {
    State.LOADING: "dim",
    State.STANDBY: "dim",
    State.JOINING: "yellow",
    State.TRAINING: "green",
    State.KILLED: "bold red",
    State.FINISHED: "bold green",
    State.FAILED: "bold red",
}


class Display(Closing):
    """Shows a director's run while it goes on."""

    def __init__(self, director: Director) -> None:
        self._director = director
        self._console = Console(highlight=False)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, transient=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._live:
            self._live.stop()

    def say(self, text: str, now_s: float) -> None:
        """Adds a line, for good."""
        self._console.print(Text(f"{now_s:6.1f} s  {text}"), soft_wrap=True)

    def refresh(self) -> None:
        """Brings the table up to date."""
        if self._live:
            self._live.update(self._picture())

    def _picture(self) -> Group:
        director = self._director
        table = Table(title=f"DiLoCo, outer step {director.outer_step}/{director.steps}")
        table.add_column("peer")
        table.add_column("state")
        for heading in ("outer step", "loss", "tokens/s", "sent"):
            table.add_column(heading, justify="right")
        for peer in director.peers:
            table.add_row(*_live_row(peer))
        speed = f"{director.algbw_bytes_s / 1e9:.2f} GB/s" if director.algbw_bytes_s else "-"
        size = size_text(director.reduce_bytes)
        return Group(table, Text(f"last all-reduce: {size} a peer, algbw {speed}", style="dim"))


def closing_table(director: Director) -> Table:
    """How it went for each peer. The losses are those of the validation."""
    table = Table(title="How it went")
    table.add_column("peer")
    table.add_column("fate", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    for heading in ("sent", "data parallel"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    for peer in director.peers:
        table.add_row(
            str(peer.number),
            Text(peer.fate, style=_STYLES[peer.state]),
            f"{peer.validation[0][1]:.3f} -> {peer.validation[-1][1]:.3f}",
            size_text(peer.tx_bytes),
            size_text(peer.data_parallel_bytes),
            peer.digest[:8] or "-",
        )
    return table


def size_text(size: float) -> str:
    """Bytes with a decimal prefix."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _live_row(peer: Peer) -> tuple[str | Text, ...]:
    running = peer.state is State.TRAINING
    return (
        str(peer.number),
        Text(peer.state.value, style=_STYLES[peer.state]),
        str(peer.outer_step) if peer.joined_s is not None else "-",
        f"{peer.training[-1][1]:.3f}" if peer.training else "-",
        f"{peer.tokens_per_s:,.0f}" if running and peer.training else "-",
        size_text(peer.tx_bytes),
    )
