"""What the documentation says of the code is so."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import pccl

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

PAGES = generate.pages()
SIGNATURES = re.compile(r"^<!-- made: class.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_in_pages_use_what_exists(page: Path) -> None:
    """Each ```python block parses, and its names of pccl and of a communicator exist."""
    text = SIGNATURES.sub("", read(page))
    for program in re.findall(r"```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(dedent(program))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pccl.torch":
                assert hasattr(importlib.import_module("pccl.torch"), node.attr)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "pccl":
                    package = importlib.util.find_spec(f"pccl.{node.attr}")
                    assert node.attr in pccl.__all__ or package is not None
                elif node.value.id == "comm":
                    assert hasattr(pccl.Communicator, node.attr)


def test_all_settings_are_listed() -> None:
    listed = set(re.findall(r"^\| `(PCCL_\w+)`", read(DOCS / "howto" / "tuning.md"), re.MULTILINE))
    used = {
        name
        for path in (ROOT / "pccl").rglob("*.py")
        for name in re.findall(r'"(PCCL_[A-Z_]+)"', read(path))
    }
    assert len(used) > 10
    assert used == listed
