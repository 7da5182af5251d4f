"""The script behind docs/internals/quantization.md gives what is printed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def rows(text: str) -> dict[tuple[str, str], list[float]]:
    """The rows of the Markdown tables of numbers, by the first cells of the table and the row."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found, op = {}, ""
    for row in cells:
        if len(row) == 11 and row[1] == "bytes":
            op = row[0]
        elif len(row) == 11 and set(row[1]) != {"-"}:
            found[op, row[0]] = [float(number) for number in row[1:]]
    return found


@pytest.mark.slow
def test_the_tables_in_the_documentation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "quantization.py", plot],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    measured = rows(ended.stdout)
    documented = rows((ROOT / "docs" / "internals" / "quantization.md").read_text(encoding="utf-8"))
    assert len(measured) == 12
    assert measured.keys() == documented.keys()
    for name, numbers in measured.items():  # who is where in the ring changes them a little
        assert numbers == pytest.approx(documented[name], rel=0.12), name
    assert "<svg" in plot.read_text(encoding="utf-8")
