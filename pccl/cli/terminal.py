"""Terminal output: optional colors, tables, and live pictures of a run."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TextIO, TypeAlias

from pccl.support import Closing

Style: TypeAlias = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}

BEGIN, END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
PICTURE_S = 0.25  # seconds from one picture of a run to the next


def has_color(stream: TextIO) -> bool:
    """True for a terminal with colors, or if FORCE_COLOR is set; False if NO_COLOR is."""
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    known = os.environ.get("TERM") not in (None, "", "dumb") or "WT_SESSION" in os.environ
    return known and stream.isatty()


def painted(text: str, style: Style, stream: TextIO | None = None) -> str:
    """The text in this style, if the stream (stdout) has colors."""
    if not text or not has_color(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def scaled(number: float) -> str:
    """A number and its decimal prefix, for a unit that follows, as in "1.5 M" + "B"."""
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:.3g} "


class Styled(str):
    style: Style

    def __new__(cls, text: str, style: Style) -> Styled:
        line = super().__new__(cls, text)
        line.style = style
        return line


def printable(text: str) -> str:
    """Text from elsewhere, with "?" for each character that might control a terminal."""
    safe = "".join(c if c.isprintable() else "?" for c in text)
    return Styled(safe, text.style) if isinstance(text, Styled) else safe


def shown(line: str, columns: int | None = None) -> str:
    """A line in its style, cut to the number of columns."""
    return painted(line[:columns], line.style) if isinstance(line, Styled) else line[:columns]


class Screen(Closing):
    """The terminal's alternate screen, on which lines replace those shown before."""

    def __init__(self) -> None:
        sys.stdout.write(BEGIN)

    def show(self, lines: Sequence[str]) -> None:
        """Shows lines, cut to the width and height of the terminal."""
        columns, rows = shutil.get_terminal_size()
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"and {len(lines) - rows + 1} more lines"]
        # some terminals would clear the character in the last column
        text = "\n".join(shown(line, columns - 1) + REST_OF_LINE for line in lines)
        sys.stdout.write(HOME + text + REST_OF_SCREEN)
        sys.stdout.flush()

    def close(self) -> None:
        sys.stdout.write(END)
        sys.stdout.flush()


class Progress(Closing):
    """Prints lines as they come. On a terminal, it shows a picture above the last lines instead.

    Args:
        picture: returns the lines of the picture.
        shown: the number of other lines below it.
        plain: prints lines on a terminal, too.
    """

    def __init__(
        self, picture: Callable[[], Iterable[str]], shown: int, *, plain: bool = False
    ) -> None:
        self._lines: list[str] = []  # all printed lines
        self._picture, self._shown, self._pictured_s = picture, shown, 0.0
        live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not plain
        self._screen = Screen() if live else None

    def print(self, line: str) -> None:
        self._lines.append(line)
        if self._screen is None:
            print(line, flush=True)
        else:
            self.refresh(0.0)

    def refresh(self, after_s: float = PICTURE_S) -> None:
        """Draws the picture, if the last one is old enough."""
        if self._screen is not None and time.monotonic() >= self._pictured_s + after_s:
            self._pictured_s = time.monotonic()
            self._screen.show([*self._picture(), "", *self._lines[-self._shown :]])

    def close(self) -> None:
        """Leaves the terminal with all lines on it."""
        if self._screen is not None:
            self._screen.close()
            print(*self._lines, sep="\n", flush=True)
            self._screen = None


class Refused(Exception):
    """A command cannot start; the text says why, and its exit status is 2."""


def complain(command: str, text: object) -> None:
    """Prints on stderr why a command has failed."""
    print(f"{painted(f'pccl {command}:', 'red', sys.stderr)} {text}", file=sys.stderr)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with aligned columns."""
    cells = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()
