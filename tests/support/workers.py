"""Peer processes that make collectives without end (worker.py), and what they must agree on."""

from __future__ import annotations

from pathlib import Path

from processes import Reporter

SCRIPT = Path(__file__).with_name("worker.py")
PATIENCE_S = 40.0


class Worker(Reporter):
    """A peer process and what it has reported."""

    def __init__(self, master: str, slot: int, count: int, what: str = "all_reduce") -> None:
        self.slot = slot
        super().__init__(SCRIPT, master, slot, count, what, patience_s=PATIENCE_S)


def agree(workers: list[Worker]) -> None:
    """Whoever reported a step reported the same outcome, and it is the sum of who contributed."""
    outcomes: dict[int, tuple[int, int]] = {}
    for worker in workers:
        for report in worker.reports:
            if "step" not in report:
                continue
            outcome = report["world"], report["value"]
            assert outcomes.setdefault(report["step"], outcome) == outcome
            if report["what"] == "broadcast":
                assert report["value"].bit_count() == 1, report
                continue
            assert report["value"].bit_count() == report["world"], report
            assert report["value"] >> worker.slot & 1, "its own contribution is missing"
