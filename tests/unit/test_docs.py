"""The pages of docs/: plain Markdown, up to date with the code, with links that resolve."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import pccl
from pccl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

PAGES = generate.pages()
SIGNATURES = re.compile(r"^<!-- made: class.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_in_pages_use_existing_names(page: Path) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert read(page) == generate.up_to_date(read(page)), "run `python docs/generate.py`"


def test_the_site_has_what_stands_in_no_file() -> None:
    site = "".join(generate.built(read(page)) for page in PAGES)
    assert "<!-- built" not in site
    for command in cli.COMMANDS:
        assert f"\n### {command}\n\n`pccl {command}" in site
    assert "| `--listen-address HOST:PORT` | where to listen for peers; port 0" in site


def test_impossible_parts_are_errors() -> None:
    for order, why in {
        "sequence\npeer, master\npeer -> master: Plan": "peer never says 'Plan' to master",
        "sequence\npeer, master\npeer, master": "not `a -> b: what`",
        'listing examples/all_reduce.py from "no such line"': "no line has 'no such line'",
        "listing examples/diloco.py function absent": "there is no function absent",
        "listing examples/diloco.py to x": "to?",
    }.items():
        with pytest.raises(ValueError, match=re.escape(why)):
            generate.up_to_date(f"<!-- made: {order} -->\n<!-- end -->")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_are_plain_markdown(page: Path) -> None:
    """Markup that only Sphinx knows is text or nothing on a forge."""
    found = re.findall(r"^ *```\{.*|\{[a-z-]+\}`|\[\]\(.*?\)|^\(.*\)=$", read(page), re.MULTILINE)
    assert not found
    text = generate.BUILT.sub("", generate.PART.sub("", read(page)))
    assert "<!--" not in text and "-->" not in text, "a made part without its begin or end"


def test_links_lead_somewhere() -> None:
    dead = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"]:
        for path, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", CODE.sub("", read(page))):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.name}: {path}#{anchor}")
    assert not dead


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
