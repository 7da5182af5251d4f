"""Checks that no linter makes: paths of a machine, names in examples, commands that install."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [
    path
    for top in ("pccl", "tests", "examples", "stress", "docs")
    for path in (ROOT / top).rglob("*.py")
]
C = [path for path in (ROOT / "c").rglob("*.[ch]") if "build" not in path.parts]
PROSE = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
OTHERS = [ROOT / "pyproject.toml", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_names_a_machine_or_is_left_for_later() -> None:
    banned = re.compile("/(home|Users|root|work)/" + r"|\b(TO" + "DO|FIX" + r"ME)\b")
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in PYTHON + C + PROSE + OTHERS
        if path != Path(__file__).resolve()
        for number, line in enumerate(lines(path), 1)
        if banned.search(line)
    ]
    assert not found


def test_tests_share_code_in_support_only() -> None:
    shared = []
    importing = re.compile(r"^\s*(from|import) .*\btest_", re.MULTILINE)  # parsing takes longer
    for path in (ROOT / "tests").rglob("*.py"):
        if not importing.search(path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            shared += [
                f"{name(path)}:{node.lineno}: {module}"
                for module in modules
                if module.split(".")[-1].startswith("test_")
            ]
    assert not shared


def test_examples_use_public_names_only() -> None:
    """Except the experiment: it runs its peers as the demonstration does."""
    import pccl

    private = []
    examples = ROOT / "examples"
    for path in {*examples.rglob("*.py")} - {*(examples / "experiment").iterdir()}:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "pccl":
                names = {alias.name for alias in node.names} - {*pccl.__all__}
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = {getattr(node, "module", None) or alias.name for alias in node.names}
                names = {module for module in modules if module.startswith("pccl.")}
                names -= {
                    "pccl.data",
                    "pccl.diloco",
                    "pccl.weights",
                    "pccl.torch",
                    "pccl.torch.torchft",
                }
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pccl":
                names = {node.attr} - {*pccl.__all__, "torch"}
            else:
                continue
            private += [f"{name(path)}: {each}" for each in names]
    assert not private


def test_our_commands_pin_torch_to_one_version() -> None:
    pins = {
        pin
        for path in [*PROSE, *OTHERS[1:]]
        for line in lines(path)
        for pin in re.findall(r"pip install [^`&]*?\btorch(==[\w.]+)?\s", line)
    }
    assert pins == {"==2.13.0"}


def test_the_readme_names_the_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    asked = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert asked
    assert {extra for group in asked for extra in group.split(",")} <= extras.keys()
