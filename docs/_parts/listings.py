"""Parts of files of this repository, as code blocks."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

LANGUAGES = {
    "": "text",  # a Dockerfile
    ".c": "c",
    ".h": "c",
    ".py": "python",
    ".service": "ini",
    ".sh": "bash",  # not sh, which a reader types
    ".yaml": "yaml",
}


def listing(root: Path, path: str, *words: str) -> str:
    """`PATH [from TEXT] [until TEXT]`, lines that begin or end there, or `PATH function NAME`."""
    text = (root / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    asked = dict(zip(words[::2], words[1::2], strict=True))
    begin, end = 0, len(lines)
    if name := asked.pop("function", None):
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                begin, end = node.lineno - 1, node.end_lineno or end
                break
        else:
            raise ValueError(f"{path}: there is no function {name}")
    if first := asked.pop("from", None):
        begin = _find(path, lines, first, 0)
    if last := asked.pop("until", None):
        end = _find(path, lines, last, begin)
    if asked:
        raise ValueError(f"{path}: {', '.join(asked)}?")
    code = dedent("\n".join(lines[begin:end])).strip("\n")
    language = "text" if path.startswith("c/") else LANGUAGES[Path(path).suffix]  # its comments
    return f"```{language}\n{code}\n```"


def _find(path: str, lines: list[str], text: str, start: int) -> int:
    for number, line in enumerate(lines[start:], start):
        if text in line:
            return number
    raise ValueError(f"{path}: no line has {text!r}")
