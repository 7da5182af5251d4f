"""Directives that draw and list what the code says, so that these pages cannot say anything else.

{transitions}           the states of a collective at a peer (pccl.protocol.calls)
{conversation} NAME     a table of tests/conversation.py, which the simulation checks
{exclusions}            which calls may wait next to each other (pccl.protocol.rounds)
{messages} peer|master  all messages of one side; {values} what is inside, {limits} the bounds
{sequence}              who says what to whom, one `a -> b: Message ...` on each line
{command} NAME          the help text of a sub-command of `pccl`
"""

from __future__ import annotations

import contextlib
import io
import typing
from collections.abc import Iterable, Sequence

import conversation
import wire
from charts import Arrow, chart
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pccl.cli import main as cli
from pccl.protocol import messages as m
from pccl.protocol.calls import TRANSITIONS, Event, State
from pccl.protocol.rounds import EXCLUDED, RUN_WIDE, Kind

CHARACTERS = 22  # of a label, for each column that its arrow spans
SAID = {
    True: {one.__name__ for one in typing.get_args(m.PeerMessage)},
    False: {one.__name__ for one in typing.get_args(m.MasterMessage)},
}


class _Drawn(SphinxDirective):
    """A directive that gives a chart or Markdown."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def draw(self, columns: Sequence[str], arrows: Sequence[Arrow]) -> list[nodes.Node]:
        return [nodes.raw("", chart(columns, arrows), format="html")]

    def write(self, markdown: str) -> list[nodes.Node]:
        return self.parse_text_to_nodes(markdown)


def _joined(columns: Sequence[str], arrows: Iterable[Arrow]) -> list[Arrow]:
    """Arrows between the same two states in one row, as long as their labels fit there."""
    rows: list[Arrow] = []
    for arrow in arrows:
        span = max(1, abs(columns.index(arrow.begin) - columns.index(arrow.end)))
        for index, row in enumerate(rows):
            label = f"{row.label}; {arrow.label}"
            if row[:2] == arrow[:2] and len(label) <= CHARACTERS * span:
                rows[index] = row._replace(label=label)
                break
        else:
            rows.append(arrow)
    return rows


class Transitions(_Drawn):
    def run(self) -> list[nodes.Node]:
        columns = [state.name for state in TRANSITIONS]
        arrows = (
            Arrow(state.name, after.name, event.name)
            for state, events in TRANSITIONS.items()
            for event, after in events.items()
        )
        words = [*State, *Event]
        rows = [f"| {one.name} | {one.value} |" for one in words]
        table = "\n".join(["| state or event | is |", "| --- | --- |", *rows])
        return self.draw(columns, _joined(columns, arrows)) + self.write(table)


class Conversation(_Drawn):
    required_arguments = 1
    optional_arguments = 0

    def run(self) -> list[nodes.Node]:
        table = conversation.TABLES[self.arguments[0]]
        columns = [*table, conversation.OVER]
        arrows = (
            Arrow(state, after, said)
            for state, allowed in table.items()
            for said, after in allowed.items()
        )
        return self.draw(columns, _joined(columns, arrows))


class Exclusions(_Drawn):
    def run(self) -> list[nodes.Node]:
        rows = ["| who waits in | votes of | cannot come to |", "| --- | --- | --- |"]
        for kind in Kind:
            scope = "the whole run" if kind in RUN_WIDE else "a group"
            others = ", ".join(other.value for other in EXCLUDED[kind])
            rows.append(f"| {kind.value} | {scope} | {others} |")
        return self.write("\n".join(rows))


class Sequence_(_Drawn):
    """Between peers and the master only messages that exist may be named, in their direction."""

    def run(self) -> list[nodes.Node]:
        arrows: list[Arrow] = []
        for line in filter(None, map(str.strip, self.content)):
            ends, _, label = line.partition(": ")
            begin, _, end = ends.partition(" -> ")
            if not (begin and end and label):
                raise self.error(f"not `a -> b: what`: {line!r}")
            arrow = Arrow(begin, end, label)
            message = arrow.label.split("(")[0].split(" ")[0].rstrip(",")
            if "master" in (arrow.begin, arrow.end) and arrow.begin != arrow.end:
                if message not in SAID[arrow.end == "master"]:
                    raise self.error(f"{arrow.begin} never says {message!r} to {arrow.end}")
            arrows.append(arrow)
        columns = self.arguments[0].split(", ") if self.arguments else []
        columns += [c for a in arrows for c in a[:2] if c not in columns]
        return self.draw(list(dict.fromkeys(columns)), arrows)


class Messages(_Drawn):
    def run(self) -> list[nodes.Node]:
        return self.write(wire.messages(self.arguments[0]))


class Values(_Drawn):
    def run(self) -> list[nodes.Node]:
        return self.write(wire.values())


class Limits(_Drawn):
    def run(self) -> list[nodes.Node]:
        return self.write(wire.limits())


class Command(_Drawn):
    def run(self) -> list[nodes.Node]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            cli.main([self.arguments[0], "--help"])
        text = shown.getvalue()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in {
        "transitions": Transitions,
        "conversation": Conversation,
        "exclusions": Exclusions,
        "messages": Messages,
        "values": Values,
        "limits": Limits,
        "sequence": Sequence_,
        "command": Command,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
