"""The repository checks itself: what fits in one sitting, what is banned."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
ATTRIBUTES_MAX = 16  # of a class of the protocol

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


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    if path.suffix == ".py":
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield node.name, node.end_lineno - node.lineno + 1
        return
    header, begin = "", 0
    for number, line in enumerate(lines(path)):  # bodies stand between a { and a } in column 0
        if line == "{":
            begin = number
        elif line == "}" and begin:
            yield header, number - begin + 1
            begin = 0
        elif not begin and line[:1].isalpha():
            header = line


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) > 30
    assert len(C) > 10
    assert sum(1 for path in C for _ in functions(path)) > 100
    assert all(path.exists() for path in OTHERS)


def test_lines_of_c_fit() -> None:  # ruff measures those of Python
    wide = [
        f"{name(path)}:{number}"
        for path in C
        for number, line in enumerate(lines(path), 1)
        if len(line) > COLUMNS_MAX
    ]
    assert not wide


def test_functions_fit() -> None:
    long = [
        f"{name(path)}: {function} has {length} lines"
        for path in PYTHON + C
        for function, length in functions(path)
        if length > FUNCTION_LINES_MAX
    ]
    assert not long


def test_files_fit_in_one_sitting() -> None:
    long = [name(path) for path in PYTHON + C if len(lines(path)) > FILE_LINES_MAX]
    assert not long


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


def test_tests_wait_for_conditions_and_do_not_sleep() -> None:
    sleeps = re.compile(r"\bsleep\((?!0\))")  # asyncio.sleep(0) lets the loop go on
    found = [
        f"{name(path)}:{number}"
        for path in (ROOT / "tests").rglob("*.py")
        for number, line in enumerate(lines(path), 1)
        if sleeps.search(line)
    ]
    assert len(found) == 1 and found[0].startswith("tests/support/waiting.py:")


def test_objects_of_the_protocol_collaborate_and_are_not_cut_across_files() -> None:
    """A class has few attributes, and inherits from none of ours."""
    values = {"Struct", "Enum", "IntEnum", "StrEnum", "NamedTuple", "Generic", "Protocol"}
    found = []
    for path in (ROOT / "pccl" / "protocol").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
                own = {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and ast.unparse(each.value) == "self"
                }
                inherits = bases - values - {"Exception", "ValueError"}
                if inherits or len(own) > ATTRIBUTES_MAX:
                    found.append((name(path), node.name, inherits, len(own)))
    assert not found


# Names of Python and torch: public ones of named tuples, and what has no public name.
FOREIGN = {"_replace", "_asdict", "_exit", "_getframe"}
FOREIGN |= {"_world", "_plugins", "_buffers", "_non_persistent_buffers_set"}


@pytest.mark.parametrize("package", ["protocol", "torch", "diloco", "data", "cli"])
def test_no_object_reaches_into_another(package: str) -> None:
    reaches = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in (ROOT / "pccl" / package).rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in FOREIGN
        and ast.unparse(node.value) not in ("self", "cls")
    ]
    assert not reaches


def test_tests_import_what_they_share_from_support_and_not_from_each_other() -> None:
    shared = []
    for path in (ROOT / "tests").rglob("*.py"):
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


def test_the_extension_is_built_from_this_header() -> None:
    from pccl.ext import ffi, lib

    header = (ROOT / "c" / "pccl.h").read_text(encoding="utf-8")
    bound = header.split("/* cdef begin */")[1].split("/* cdef end */")[0]
    assert not re.search(r"^\s*#", bound, re.MULTILINE), "cffi reads no preprocessor directives"
    code = re.sub(r"/\*.*?\*/", "", bound, flags=re.DOTALL)
    declared = re.findall(r"^[a-z].*?\b(pccl_\w+)\(", code, re.MULTILINE)
    constants = re.findall(r"\b(PCCL_\w+) = ([^,}\s][^,}]*)", code)
    assert len(declared) > 10 < len(constants)
    missing = [symbol for symbol in declared if not hasattr(lib, symbol)]
    stale = [
        symbol
        for symbol, value in constants
        if getattr(lib, symbol, None) != eval(value, {"__builtins__": {}})
    ]
    assert not missing + stale, "the extension is stale: pip install -e ."
    assert ffi.sizeof("pccl_msg") == 64


def test_examples_use_public_names_only() -> None:
    import pccl

    private = []
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "pccl":
                names = {alias.name for alias in node.names} - {*pccl.__all__}
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = {getattr(node, "module", None) or alias.name for alias in node.names}
                names = {module for module in modules if module.startswith("pccl.")}
                names -= {"pccl.data", "pccl.diloco", "pccl.weights", "pccl.torch"}
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
