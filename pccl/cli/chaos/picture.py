"""The picture of a run on a terminal. It needs rich."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pccl.cli.chaos.director import Director
from pccl.cli.chaos.stage import Copy

FAULTS_SHOWN = 8
ENDED_SHOWN_S = 5.0


def picture(director: Director) -> RenderableType:
    """Copies, the last faults, and how it goes."""
    now_s, chronicle = time.monotonic(), director.chronicle
    passed_s = now_s - chronicle.faults_s if chronicle.faults_s else 0.0
    watch, schedule = director.watch, director.schedule
    title = f"{passed_s:.0f} of {schedule.seconds:.0f} s, seed {schedule.seed}"
    table = Table(title=title)
    for heading in ("copy", "is", "since", "what befell it last"):
        table.add_column(heading)
    for copy in director.stage.copies:
        if copy.ended_s is None or now_s - copy.ended_s < ENDED_SHOWN_S:
            table.add_row(*_row(copy, now_s))
    faults = [
        Text(f"{done.at_s - chronicle.faults_s:7.1f} s  {done.fault.what} {_whom(done.copy)}")
        for done in chronicle.done[-FAULTS_SHOWN:]
        if not done.skipped
    ]
    still_s = now_s - watch.last_s if watch.rounds else 0.0
    state = (
        f"{len(watch.accepted)} peers; {len(watch.collectives_s)} collectives, {watch.rounds} "
        f"calls; the last one {still_s:.1f} s ago; {len(chronicle.done)} of "
        f"{len(schedule.faults)} faults"
    )
    return Group(table, *faults, Text(state, style="dim" if still_s < 5.0 else "yellow"))


def _whom(copy: int) -> str:
    return f"copy {copy}" if copy >= 0 else ""


def _row(copy: Copy, now_s: float) -> tuple[str | Text, ...]:
    if copy.ended_s is not None:
        said, style = ("killed", "red") if copy.by_us else (f"ended ({copy.status})", "dim")
    elif copy.stopped:
        said, style = "frozen", "cyan"
    elif copy.settled:
        said, style = "in the run", "green"
    else:
        said, style = "coming", "yellow"
    since_s = now_s - (copy.ended_s or copy.began_s)
    last = f"{copy.befell[-1][1]} {now_s - copy.befell[-1][0]:.1f} s ago" if copy.befell else ""
    return str(copy.number), Text(said, style=style), f"{since_s:.0f} s", last
