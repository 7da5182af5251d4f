"""The API in Markdown: signatures and docstrings, as the source has them.

The source is read and not imported, so torch need not be there. Docstrings are plain text with
`code`, indented examples, and sections such as Args.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
ITEM = re.compile(r"([\w*.]+(?:, [\w*.]+)*): ")
CODE = re.compile(r"(`+[^`]+`+)")
SPECIAL = re.compile(r"(?<!\w)_(?=\w)|(?<=\w)_(?!\w)|[*|<\[]")
Function = ast.FunctionDef


class Class(NamedTuple):
    """A class and the text that it is part of."""

    node: ast.ClassDef
    text: str


def module(root: Path, path: str) -> str:
    """The docstring of a module: what holds for all that is in it."""
    return _prose(ast.get_docstring(ast.parse((root / path).read_text(encoding="utf-8"))) or "")


def classes(root: Path, *names: str) -> str:
    """Classes of the package: what they are, their members that are public, the inherited too."""
    return "\n\n".join(_class(root, name) for name in names)


def all_classes(root: Path, path: str) -> str:
    """All public classes of a module."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    return classes(root, *(n.name for n in tree.body if isinstance(n, ast.ClassDef)))


@cache
def _found(root: Path) -> dict[str, Class]:
    found = {}
    folders = ("", "data", "diloco", "torch", "weights")  # in which public classes lie
    for path in sorted(p for folder in folders for p in (root / "pccl" / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = Class(node, text)
    return found


def _class(root: Path, name: str) -> str:
    found = _found(root)[name]
    doc = ast.get_docstring(found.node) or ""
    parts = [f"### {name}", _fenced(_head(found, doc)), _prose(doc)]
    for base in _bases(root, found):
        for member in base.node.body:
            if isinstance(member, Function) and not member.name.startswith("_"):
                if any(ast.unparse(d).endswith(".setter") for d in member.decorator_list):
                    continue
                parts += [f"#### {name}.{member.name}", _fenced(_signature(member, base.text))]
                if text := ast.get_docstring(member):
                    parts.append(_prose(text))
    return "\n\n".join(filter(None, parts))


def _bases(root: Path, found: Class) -> Iterator[Class]:
    """It and those that it inherits from, if they document members of their own.

    Of the exceptions only the first one lists what all have.
    """
    yield found
    for base in found.node.bases:
        name = ast.unparse(base)
        if name in _found(root) and not name.endswith("Error"):
            yield from _bases(root, _found(root)[name])


def _head(found: Class, doc: str) -> str:
    """How it is made, or the fields of a value, or the members of an enumeration."""
    node, text = found
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    fields = [
        _source(one, text)
        for one in node.body
        if isinstance(one, ast.Assign | ast.AnnAssign) and not _source(one, text).startswith("_")
    ]
    if node.decorator_list or bases == "Enum":
        decorators = [f"@{_source(one, text)}" for one in node.decorator_list]
        return "\n".join([*decorators, f"{head}:", *(f"    {one}" for one in fields)])
    made = [one for one in node.body if isinstance(one, Function) and one.name == "__init__"]
    if made and re.search(r"^Args:$", doc, re.MULTILINE):
        signature = re.sub(r"\bself(, |,\s*|(?=\)))", "", _signature(made[0], text), count=1)
        return signature.replace("def __init__", f"class {node.name}").removesuffix(" -> None")
    return head


def _signature(node: Function, text: str) -> str:
    lines = text.splitlines()
    begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    signature = dedent("\n".join(lines[begin - 1 : node.body[0].lineno - 1]))
    return signature.rstrip().removesuffix(":")


def _source(node: ast.AST, text: str) -> str:
    return ast.get_source_segment(text, node) or ""


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _prose(doc: str) -> str:
    """A docstring in Markdown."""
    out: list[str] = []
    section = ""
    for block in re.split(r"\n\n+", cleandoc(doc)):
        lines = block.splitlines()
        if named := SECTION.match(lines[0]):
            section = named[1]
            out.append(f"**{section}**")
            lines = lines[1:]
        elif not lines[0].startswith(" "):
            section = ""
        if not lines:
            continue
        body = dedent("\n".join(lines))
        if section in ("Returns", "Yields"):
            out.append(_escaped(body))
        elif section:
            out.append(_items(body))
        elif lines[0].startswith(" "):
            out.append(_example(body))
        elif block.isupper():
            out.append(f"**{block.capitalize()}**".replace("loco", "LoCo"))
        elif lines[0].endswith(":") and len(lines) > 1 and lines[1].startswith("    "):
            out.append(f"*{lines[0]}*\n" + _escaped(dedent("\n".join(lines[1:]))))
        else:
            out.append(_escaped(block))
    return "\n\n".join(out)


def _items(body: str) -> str:
    """`name: what it is`, one below the other, with more lines of each indented."""
    lines = []
    for line in body.splitlines():
        item = ITEM.match(line)
        if item:
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"- {names}: {_escaped(line[item.end() :])}")
        else:
            lines.append("  " + _escaped(line.strip()))
    return "\n".join(lines)


def _example(body: str) -> str:
    try:
        ast.parse(body)
    except SyntaxError:
        return f"```text\n{body}\n```"
    return _fenced(body)


def _escaped(text: str) -> str:
    """What is not code is not markup."""
    parts = CODE.split(text)
    parts[::2] = [SPECIAL.sub(lambda at: "\\" + at[0], part) for part in parts[::2]]
    return "".join(parts)
