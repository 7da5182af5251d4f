"""The documentation builds without warnings, and its pages need nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow  # .ci/run runs it in any case
def test_it_builds_without_warnings(tmp_path: Path) -> None:
    missing = [m for m in ("sphinx", "furo", "myst_parser") if not importlib.util.find_spec(m)]
    if missing:
        pytest.skip(f'{missing} not installed: pip install -e ".[docs]"')
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    ended = subprocess.run(
        [*command, "-d", tmp_path / "doctrees", DOCS, tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    elsewhere = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//')
    loads = [
        p.name
        for p in (tmp_path / "html").rglob("*.html")
        if elsewhere.search(p.read_text("utf-8"))
    ]
    assert not loads, "pages load something from elsewhere"
