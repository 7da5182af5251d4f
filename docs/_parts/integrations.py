"""The table of programs that were run, from the record that their tests make."""

from __future__ import annotations

import json
from pathlib import Path


def table(record: Path) -> str:
    """A row for each run: packages with versions, what was run, its result, what had to change."""
    lines = ["| client | what was run | result | what had to change |", "| --- | --- | --- | --- |"]
    runs = json.loads(record.read_text(encoding="utf-8"))
    for run, (clients, result, change) in sorted(runs.items(), key=lambda one: (one[1][0], one[0])):
        lines.append(f"| {clients} | {run} | {result} | {change} |")
    return "\n".join(lines)
