"""Mutants of the protocol (stress/mutants.py) that have lost the line which they change."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "stress"))
import mutants  # noqa: E402


def test_each_mutant_changes_one_line_of_the_protocol() -> None:
    texts = mutants.sources(ROOT / "pccl")
    found = {mutant.rule: mutants.occurrences(mutant, texts) for mutant in mutants.MUTANTS}
    assert len(found) > 100
    assert not {rule: count for rule, count in found.items() if count != 1}
