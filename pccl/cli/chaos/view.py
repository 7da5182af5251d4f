"""What is shown of a run while it goes on: a picture on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pccl.cli.chaos.director import Director, Done

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PICTURES_S = 0.25  # from one to the next
EVENTS_SHOWN = 10


class View:
    """Shows a run.

    Args:
        plain: only lines, also on a terminal.
    """

    def __init__(self, plain: bool) -> None:
        self.director: Director | None = None
        self._live: Live | None = None
        self._pictured_s = 0.0
        self._picture: Callable[[Director], RenderableType] | None = None
        if not plain:
            with suppress(ModuleNotFoundError):  # lines will do
                self._open()

    def told(self, done: Done | None) -> None:
        """A fault has come; or nothing has, but time has passed."""
        director = self.director
        if director is None:
            return
        if self._live is None or self._picture is None:
            if done is not None:
                print(line_of(done, director), flush=True)
        elif done is not None or time.monotonic() > self._pictured_s + PICTURES_S:
            self._pictured_s = time.monotonic()
            self._live.update(self._picture(director), refresh=True)

    def close(self) -> None:
        """Ends the picture."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from pccl.cli.chaos.picture import picture

        console = Console(highlight=False)
        if console.is_terminal:
            self._picture = picture
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()


def line_of(done: Done, director: Director) -> str:
    """A fault in one line."""
    copies = director.stage.alive()
    frozen = sum(copy.stopped for copy in copies)
    at_s = done.at_s - director.chronicle.faults_s
    whom = f": copy {done.copy}" if done.copy >= 0 else ""
    lasts = f" for {done.fault.lasts_s:.1f} s" if done.fault.lasts_s else ""
    moment = f" ({done.moment})" if done.moment else ""
    why = f", but {done.skipped}" if done.skipped else ""
    what = f"{done.fault.what}{whom}{lasts}{moment}{why}"
    world = f"{len(director.watch.accepted)} peers, {len(copies)} copies, {frozen} frozen"
    return f"{at_s:7.1f} s  {what:52}  {director.watch.rounds:6} calls, {world}"
