"""Instructions of the documentation: blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md", *generate.pages()]
PROGRAMS = [p for top in ("examples", "stress") for p in sorted((ROOT / top).rglob("*.py"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:pccl|python|pip|pytest|make|\.venv/bin/\w+) [^`]+)`")
BEGINS = ("pccl", "python", "pip")  # commands in the docstring of a program


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    text: str
    elsewhere: bool  # it shows another library, "before"; or wants a process of its own

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """Words that a reader types, and where they stand."""

    where: str
    words: tuple[str, ...]
    settings: tuple[str, ...] = ()  # names of environment variables that are given with it

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def blocks(page: Path, *, made: bool = True) -> list[Block]:
    """The blocks of a page in order; without those that are made from the code, if so wished."""
    text = page.read_text(encoding="utf-8")
    if not made:
        text = generate.PART.sub(lambda part: "\n" * part[0].count("\n"), text)
    found = []
    for block in BLOCK.finditer(text):
        above = re.findall(r"^\*\*(Before|After)\*\*", text[: block.start()], re.MULTILINE)
        line = text[: block.start()].count("\n") + 2
        # a process has one default group: tests/integration/test_torch_*.py have such programs
        backend = any(words in block[3] for words in ("pccl.torch", 'init_process_group("pccl"'))
        elsewhere = above[-1:] == ["Before"] or backend
        found.append(Block(page, line, block[2], dedent(block[3]), elsewhere))
    return found


def commands() -> list[Command]:
    """All commands in pages, and in the docstrings of the programs that a reader may start."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and not block.elsewhere:
                found += _commands(str(block), block.text)
        prose = BLOCK.sub("", generate.PART.sub("", page.read_text(encoding="utf-8")))
        for span in INLINE.findall(prose):
            found += _commands(page.name, " ".join(span.split()))
    for program in PROGRAMS:
        text = program.read_text(encoding="utf-8")
        doc = text.split('"""')[1] if text.startswith('"""') else ""
        lines = re.sub(r"\n {20,}\[", " [", doc).splitlines()  # options on a second line
        for line in lines:
            if line.strip().startswith(tuple(f"{begin} " for begin in BEGINS)):
                bare = line.strip().replace("[", "").replace("]", "").replace(" ...", "")
                found += _commands(str(program.relative_to(ROOT)), bare)
    return found


def _commands(where: str, text: str) -> Iterator[Command]:
    for line in text.splitlines():
        words: list[str] = []
        settings: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    yield Command(where, tuple(words), tuple(settings))
                words, settings = [], []
            elif not words and re.match(r"[A-Z_]+=", word):
                settings.append(word.partition("=")[0])
            else:
                words.append(word)
