"""Who says what to whom, drawn with characters: it reads the same on a forge and in a terminal.

Each peer is a column, each message a row with an arrow from column to column, top to bottom.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pccl.protocol import messages as m

SAID = {
    True: {one.__name__ for one in typing.get_args(m.PeerMessage)},
    False: {one.__name__ for one in typing.get_args(m.MasterMessage)},
}
ENDS = len("│─  ─>")  # what an arrow needs beside its label
NOTE = len("│─ ")  # and what a column says to itself


class Arrow(NamedTuple):
    """A row: from a column to a column, and what is written on it."""

    begin: str
    end: str
    label: str


def sequence(text: str) -> str:
    """The chart of lines `a -> b: Message ...`; the first line has the columns, by commas.

    Between peers and the master only messages that exist may be named, in their direction.
    """
    first, *rest = filter(None, map(str.strip, text.splitlines()))
    arrows = [_arrow(line) for line in rest]
    return "```text\n" + "\n".join(_draw(first.split(", "), arrows)) + "\n```"


def _arrow(line: str) -> Arrow:
    ends, _, label = line.partition(": ")
    begin, _, end = ends.partition(" -> ")
    if not (begin and end and label):
        raise ValueError(f"not `a -> b: what`: {line!r}")
    message = label.split("(")[0].split(" ")[0].rstrip(",")
    if "master" in (begin, end) and begin != end and message not in SAID[end == "master"]:
        raise ValueError(f"{begin} never says {message!r} to {end}")
    return Arrow(begin, end, label)


def _draw(columns: Sequence[str], arrows: Sequence[Arrow]) -> list[str]:
    at = _places(columns, arrows)
    head = ""
    for name, x in zip(columns, at, strict=True):
        head = head.ljust(x - len(name) // 2) + name
    lines = [head]
    for arrow in arrows:
        row = [" "] * (at[-1] + 1)
        for x in at:
            row[x] = "│"
        begin, end = at[columns.index(arrow.begin)], at[columns.index(arrow.end)]
        if begin == end:
            row[begin + 1 : begin + NOTE + len(arrow.label)] = f"─ {arrow.label}"
        else:
            left, right = min(begin, end), max(begin, end)
            drawn = f" {arrow.label} ".center(right - left - 2, "─")
            row[left + 1 : right] = drawn + ">" if end > begin else "<" + drawn
        lines.append("".join(row))
    return [line.rstrip() for line in lines]


def _places(columns: Sequence[str], arrows: Sequence[Arrow]) -> list[int]:
    """Where each column stands, so that all names and labels fit."""
    gaps = [len(left) // 2 + len(right) // 2 + 4 for left, right in pairwise(columns)]
    for arrow in sorted(arrows, key=lambda a: abs(columns.index(a.end) - columns.index(a.begin))):
        begin, end = sorted((columns.index(arrow.begin), columns.index(arrow.end)))
        if begin == end:
            begin, end, wanted = begin, begin + 1, len(arrow.label) + NOTE + 2
        else:
            wanted = len(arrow.label) + ENDS
        while end < len(columns) and sum(gaps[begin:end]) < wanted:
            narrow = min(range(begin, end), key=gaps.__getitem__)
            gaps[narrow] += 1
    at = [len(columns[0]) // 2]
    for gap in gaps:
        at.append(at[-1] + gap)
    return at
