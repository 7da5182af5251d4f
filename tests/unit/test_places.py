"""The places that the pages and the code name exist, and the walks follow the calls."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASES = [ROOT, ROOT / "pccl" / "protocol"]  # to which paths are relative
HOP = re.compile(r"^\d+\. `([\w./]+)` `([\w.]+)`", re.MULTILINE)
SUFFIXES = "py|pyi|c|h|inc|md|toml|html"
PATH = re.compile(r"[\w.*/-]+/[\w.*/-]*|[\w-]+\.(?:py|c|h|md|toml)")
NAME = re.compile(r"[A-Za-z_][\w.]*")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WALKS = ["An all-reduce of 256 MiB", "A peer's death"]


class Hop(NamedTuple):
    """One place of a walk, `first` on its thread."""

    path: str
    symbol: str
    first: bool

    def __str__(self) -> str:
        return f"{self.path} {self.symbol}"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def python_definitions(path: Path) -> dict[str, str]:
    """The source of each function, class and assignment, by its dotted name."""
    text = read(path)
    lines = text.splitlines()
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            begin, end = getattr(child, "lineno", 1), getattr(child, "end_lineno", 0)
            source = "\n".join(lines[begin - 1 : end])
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = source
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update({prefix + t.id: source for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(text), "")
    return found


@cache
def c_definitions(path: Path) -> dict[str, str]:
    """The source of each function."""
    pattern = re.compile(
        r"^(?!typedef|struct \w+ \{)[a-z][\w *]*?\b(\w+)\([^;{}]*?\)\n\{.*?^\}", re.M | re.S
    )
    return {match[1]: match[0] for match in pattern.finditer(read(path))}


def definitions(path: Path) -> dict[str, str]:
    return python_definitions(path) if path.suffix == ".py" else c_definitions(path)


# ---- the walks ----


def walk(title: str) -> list[Hop]:
    section = read(ROOT / "docs" / "architecture.md").split(f"\n### {title}\n")[1]
    section = re.split(r"^##", section, flags=re.MULTILINE)[0]
    threads = re.split(r"^\*\*", section, flags=re.MULTILINE)
    return [
        Hop(*hop, first=not index)
        for thread in threads
        for index, hop in enumerate(HOP.findall(thread))
    ]


def calls(caller: Hop, callee: Hop) -> bool:
    """Whether a function, or the table that its class is made with, names another one."""
    found = definitions(ROOT / caller.path)
    home = caller.symbol.rpartition(".")[0]
    source = found[caller.symbol] + found.get(f"{home}.__init__", "")
    name = callee.symbol.rpartition(".")[2]
    names = {rf"\b{name}\b"}
    if callee.path.endswith(".c"):  # by way of the table of kinds, c/engine/kinds.c
        names |= {rf"->{name.rpartition('_')[2]}\b"}
    return any(re.search(pattern, source) for pattern in names)


@pytest.mark.parametrize("title", WALKS)
def test_the_hops_of_a_walk_exist(title: str) -> None:
    hops = walk(title)
    assert len(hops) > 40
    missing = [str(hop) for hop in hops if hop.symbol not in definitions(ROOT / hop.path)]
    assert not missing


@pytest.mark.parametrize("title", WALKS)
def test_the_hops_of_a_walk_are_numbered_in_order(title: str) -> None:
    section = read(ROOT / "docs" / "architecture.md").split(f"\n### {title}\n")[1]
    numbers = re.findall(r"^(\d+)\. ", re.split(r"^##", section, flags=re.MULTILINE)[0], re.M)
    assert numbers == [str(1 + index) for index in range(len(walk(title)))]


@pytest.mark.parametrize("title", WALKS)
def test_each_hop_is_called_by_one_before_it_on_its_thread(title: str) -> None:
    before: list[Hop] = []
    uncalled = []
    for hop in walk(title):
        before = [] if hop.first else before
        if not hop.first and not any(calls(other, hop) for other in before):
            uncalled.append(str(hop))
        before.append(hop)
    assert not uncalled


# ---- files ----

FOLDERS = ["c", "pccl", "tests", "stress", "docs", "examples", ".ci"]
OF_US = "|".join(map(re.escape, FOLDERS))
WHOLE = re.compile(rf"(?<![\w/.:{{-])(?:{OF_US})/[\w./*-]*(?:\.(?:{SUFFIXES})\b|/(?=[`\s]))")
BARE = re.compile(r"(?<![\w/.*<:}-])[a-z_]\w*\.(?:py|c|h)\b(?![(\w])")
# of users, of other programs, and of what tests make up
FOREIGN = {
    *("test_it.py", "test_made.py", "_core.c", "sitecustomize.py"),
    *("typing.py", "threading.py", "zmq.h"),
}


def texts() -> list[Path]:
    """All that people wrote, but for the history."""
    patterns = [f"{folder}/**/*.{{}}" for folder in FOLDERS] + ["*.{}"]
    found = [
        path
        for pattern in patterns
        for suffix in SUFFIXES.split("|")
        for path in ROOT.glob(pattern.format(suffix))
    ]
    made = {"_build", "build", "CHANGELOG.md"}
    return sorted(path for path in found if not made & {*path.relative_to(ROOT).parts})


def test_files_that_are_named_exist() -> None:
    """Of the repository, by their paths or names, on pages and in comments."""
    everything = texts()
    known = {path.name for path in everything} | FOREIGN
    named, missing = 0, []
    for path in everything:
        text = re.sub(r"^#include <.*>$", "", read(path), flags=re.MULTILINE)
        whole, bare = {*WHOLE.findall(text)}, {*BARE.findall(text)}
        named += len(whole)
        gone = {one for one in whole if not any(ROOT.glob(one.rstrip("/")))} | bare - known
        missing += [f"{path.relative_to(ROOT)}: {one}" for one in sorted(gone)]
    assert missing == []
    assert named > 400 and len(everything) > 500


# ---- CONTRIBUTING ----


def passages() -> list[str]:
    """The rows, items and paragraphs of CONTRIBUTING, without blocks of commands."""
    text = BLOCK.sub("", read(ROOT / "CONTRIBUTING.md"))
    return [part for part in re.split(r"\n(?=\||- |\d\. |\n)", text) if "`" in part]


def spans(passage: str) -> list[str]:
    return re.findall(r"`([^`]+)`", passage)


def place(path: str) -> Path | None:
    """The file or folder that a path means."""
    found = [base / path for base in BASES if (base / path).exists()]
    return found[0] if found else None


def holds(path: Path, symbol: str) -> bool:
    """Whether a file has a name; a dotted one as a definition."""
    if path.suffix == ".py" and "." in symbol.rstrip("."):
        return symbol in python_definitions(path)
    return re.search(rf"\b{re.escape(symbol.rstrip('.'))}", read(path)) is not None


@pytest.mark.parametrize("passage", passages(), ids=lambda text: " ".join(text.split())[:40])
def test_contributing_names_what_exists(passage: str) -> None:
    """Paths; and names, each in one of the files that are named beside it, if any are."""
    names = [span for span in spans(passage) if not PATH.fullmatch(span)]
    paths = [span for span in spans(passage) if PATH.fullmatch(span)]
    assert [path for path in paths if place(path) is None] == []
    files = [found for path in paths if (found := place(path)) is not None and found.is_file()]
    symbols = [name for name in names if NAME.fullmatch(name)]
    missing = [name for name in symbols if files and not any(holds(f, name) for f in files)]
    assert missing == []


def test_the_tables_of_contributing_name_many_places() -> None:
    found = [span for passage in passages() for span in spans(passage) if PATH.fullmatch(span)]
    assert len(found) > 100
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(tests & {Path(path).name for path in found}) > 40


# ---- the glossary ----


def test_the_code_uses_every_term_of_the_glossary() -> None:
    text = read(ROOT / "docs" / "glossary.md")
    terms = [
        t
        for line in re.findall(r"^- (.*?):", text, re.M)
        for t in re.findall(r"\*\*(.*?)\*\*", line)
    ]
    assert len(terms) > 50 and len(terms) == len({*terms})
    code = "\n".join(
        read(path)
        for pattern in ("pccl/**/*.py", "c/**/*.[ch]")
        for path in sorted(ROOT.glob(pattern))
    ).lower()
    words = [re.escape(term).replace(r"\ ", r"[\s_]+") for term in terms]
    assert [word for word in words if not re.search(rf"\b_?{word}", code)] == []
