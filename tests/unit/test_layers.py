"""Layers of the C core: includes and declarations, read from the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

C = Path(__file__).resolve().parents[2] / "c"
FOLDERS = {  # and the folders that they may use; all use pccl_core.h
    "kernels": {"kernels"},
    "zmq": {"zmq"},
    "net": {"net"},
    "engine": {"zmq", "engine"},
}
FILES = [path for folder in FOLDERS for path in sorted((C / folder).iterdir())]
LISTED = re.compile(r"^ \* (\w+)  +\w", re.MULTILINE)  # in the comment that begins engine.c
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DECLARED = re.compile(
    r"^(?!typedef|static)[a-z][\w *]*?\b(\w+)\([^;{]*\)(?: PRINTF_LIKE\(.*?\))?;", re.MULTILINE
)
DEFINED = re.compile(r"^(?!static|typedef)[a-z][\w *]*?\b(\w+)\([^;{]*\)\n\{", re.MULTILINE)


def name(path: Path) -> str:
    return path.relative_to(C).as_posix()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code(path: Path) -> str:
    return COMMENT.sub("", read(path))


def order() -> list[str]:
    """The modules of the engine from the bottom up, as its uppermost lists them."""
    comment = read(C / "engine" / "engine.c").partition("*/")[0]
    return [*LISTED.findall(comment), "engine"]


def headers() -> list[Path]:
    return [path for path in FILES if path.suffix == ".h"]


def sources() -> list[Path]:
    return [path for path in FILES if path.suffix == ".c"]


def names(paths: Iterable[Path]) -> list[str]:
    return [path.stem for path in paths if path.parent.name == "engine"]


def test_every_module_of_the_engine_is_listed_once() -> None:
    listed = order()
    assert sorted(listed) == sorted({*listed})
    assert sorted(names(sources())) == sorted(listed)
    assert {*names(headers())} == {*listed} - {"engine"}, "whose interface is pccl_core.h"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_uses_only_lower_modules(path: Path) -> None:
    found = INCLUDE.findall(read(path))
    for file in found:
        folder, _, module = file.rpartition("/")
        assert (C / file).is_file(), f"{file}: an include names the folder"
        assert folder in {"", *FOLDERS[path.parent.name]}, f"{file}: of another folder"
        if folder == "engine":
            below = order()[: order().index(path.stem)]
            own = [path.stem] if path.suffix == ".c" else []
            assert Path(module).stem in [*below, *own], f"{file}: not below {path.stem}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_a_source_includes_its_own_header_first(path: Path) -> None:
    """So every header is complete by itself."""
    own = path.with_suffix(".h")
    includes = re.findall(r'^#include ["<]([^">]+)', read(path), re.MULTILINE)
    assert includes[0] == (name(own) if own.exists() else "pccl_core.h")


@pytest.mark.parametrize("path", headers(), ids=name)
def test_a_header_declares_the_functions_of_its_module(path: Path) -> None:
    source = path.with_suffix(".c")
    declared = {*DECLARED.findall(code(path))}
    if not source.exists():
        assert not declared, "a header without a source is constants and inline functions"
        return
    assert declared == {*DEFINED.findall(code(source))}, "all that is not static, and no more"


def test_the_patterns_find_declarations_and_definitions() -> None:
    stream = C / "engine" / "stream"
    assert {"stream_lose", "streams_find", "flow_request_turn"} < {
        *DECLARED.findall(code(stream.with_suffix(".h")))
    }
    assert len(DEFINED.findall(code(stream.with_suffix(".c")))) > 10
    assert order()[:2] == ["wire", "bitmap"]
    assert len(FILES) > 30


def test_the_modules_without_a_header_define_the_api() -> None:
    public = [path for path in sources() if not path.with_suffix(".h").exists()]
    defined = {symbol for path in public for symbol in DEFINED.findall(code(path))}
    declared = {*DECLARED.findall(code(C / "pccl_core.h"))}
    assert declared and declared == defined
