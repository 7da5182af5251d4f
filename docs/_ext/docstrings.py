"""Docstrings are plain text with `code`, indented examples and sections such as Args.

Here they become what Sphinx and napoleon read: code is literal, so are indented blocks outside of
the sections, and nothing else is markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
CODE = re.compile(r"`+([^`]+)`+")
SPECIAL = re.compile(r"(?<=\w)_(?!\w)|[*|]")


def restructured(lines: list[str]) -> list[str]:
    """The docstring in reStructuredText."""
    out: list[str] = []
    for example, chunk in _chunks(lines):
        if example:
            out += ["::", "", *chunk]
        else:
            out += _prose("\n".join(chunk)).split("\n")
    return out


def _chunks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Prose, and indented blocks outside of sections."""
    section = example = False
    chunk: list[str] = []
    for index, line in enumerate(lines):
        begins = example
        if line and not line.startswith("  "):
            section = bool(SECTION.match(line))
            begins = False
        elif line and not section and (index == 0 or not lines[index - 1]):
            begins = True
        if begins != example:
            yield example, chunk
            example, chunk = begins, []
        chunk.append(line)
    yield example, chunk


def _prose(text: str) -> str:
    parts = CODE.split(text)  # plain text and code, in turn
    parts[::2] = [SPECIAL.sub(lambda at: "\\" + at[0], part) for part in parts[::2]]
    parts[1::2] = ["``" + " ".join(part.split()) + "``" for part in parts[1::2]]
    return "".join(parts)


def _process(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    lines[:] = restructured(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
