"""What the documentation says of the code is so."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import simpeer
import simulator

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
    listed = set(re.findall(r"^\| `(PCCL_\w+)`", read(DOCS / "settings.md"), re.MULTILINE))
    used = {
        name
        for path in (ROOT / "pccl").rglob("*.py")
        for name in re.findall(r'"(PCCL_[A-Z_]+)"', read(path))
    }
    assert len(used) > 10
    assert used == listed


def test_what_checks_the_invariants_exists() -> None:
    table = read(DOCS / "protocol.md").split("## Invariants")[1]
    homes = {"Run": simulator.Run, "SimPeer": simpeer.SimPeer}
    named = re.findall(r"`(Run|SimPeer)\.(\w+)`", table)
    assert len(named) > 5
    assert all(hasattr(homes[home], name) for home, name in named)
    assert all(
        (ROOT / path).exists() for path in re.findall(r"`((?:tests|stress)/[\w/]+\.py)`", table)
    )


@pytest.mark.parametrize("machine", ["master", "peer"])
def test_the_parts_of_both_state_machines_are_those_of_the_code(machine: str) -> None:
    text = read(DOCS / "architecture.md")
    table = text.split(f"| of the {machine} | does |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)(?:\.(\w+))?`", table)
    assert len(named) > 7
    for module, part in named:
        found = importlib.import_module(f"pccl.protocol.{machine}.{module}")
        assert not part or found.__dict__[part].__module__ == found.__name__
