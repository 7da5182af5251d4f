"""The texts of errors that docs/reference/errors.md promises."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"


def listed(text: str) -> None:
    """The page quotes this error: one of its rows, with any numbers, is part of the text."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 10
    quoted = [".*".join(map(re.escape, re.split(" ?… ?", row))) for row in rows]
    assert any(re.search(pattern, text) for pattern in quoted), f"not in {PAGE.name}: {text}"
