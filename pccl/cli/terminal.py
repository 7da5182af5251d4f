"""What commands print for people: colours, where they are wanted, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TextIO, TypeAlias

Style: TypeAlias = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def has_colour(stream: TextIO) -> bool:
    """Whether it is a terminal with colours, or FORCE_COLOR is set, and NO_COLOR is not."""
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    known = os.environ.get("TERM") not in (None, "", "dumb") or "WT_SESSION" in os.environ
    return known and stream.isatty()


def painted(text: str, style: Style, stream: TextIO | None = None) -> str:
    """The text in that style, if the stream (stdout) has colours."""
    if not text or not has_colour(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def complain(command: str, text: object) -> None:
    """Says on stderr why a command has failed."""
    print(f"{painted(f'pccl {command}:', 'red', sys.stderr)} {text}", file=sys.stderr)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with columns as wide as what is in them; the last one as it is."""
    cells = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()
