"""The control protocol in Markdown: its messages, states and rules, read from the code itself."""

from __future__ import annotations

import enum
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
from simulation import conversation as talk

from pccl.protocol import messages as m
from pccl.protocol.peer.calls import TRANSITIONS, Event, State
from pccl.protocol.rounds import EXCLUDED, RUN_WIDE, Kind

NOTICES = m.PeerNotice, m.MasterNotice  # legal whenever a peer is accepted

# The names of the types that stand for numbers and texts within limits.
_NAMES = {
    m.U16: "unsigned, 16 bits",
    m.U32: "unsigned, 32 bits",
    m.Weight: "unsigned, 32 bits, not 0",
    m.U64: "unsigned, 64 bits",
    m.Text: "text of at most 4,096 characters",
    m.Name: "text of at most 256 characters",
    m.Data: f"at most {m.INLINE_BYTES_MAX:,} bytes",
    m.Version: "unsigned, 62 bits, not 0",
    m.Hash: "16 bytes",
    bool: "true or false",
    float: "number, 64-bit floating point",
    bytes: "bytes",
    types.NoneType: "nil",
}


def messages(sender: str) -> str:
    """All messages of "peer" or "master", by tag."""
    union = {"peer": m.PeerMessage, "master": m.MasterMessage}[sender]
    structs = sorted(typing.get_args(union), key=lambda one: one.__struct_config__.tag)
    when = {one: ", at any time" if issubclass(one, NOTICES) else "" for one in structs}
    return "\n".join(
        _struct(one, f", tag {one.__struct_config__.tag}{when[one]}") for one in structs
    )


def values() -> str:
    """All structures inside messages."""
    kinds = [one for one in m.Value.__subclasses__() if one not in (m.FromPeer, m.FromMaster)]
    return "\n".join(_struct(one, "") for one in kinds)


def limits() -> str:
    """The constants of the module that defines the messages, with their comments."""
    text = Path(m.__file__).read_text(encoding="utf-8")
    rows = ["| name | value | meaning |", "| --- | --- | --- |"]
    for name, why in re.findall(r"^([A-Z][A-Z_]+) = \d[^#\n]*(?:# (.*))?$", text, re.MULTILINE):
        if name == "PROTOCOL_VERSION":  # not a limit
            continue
        rows.append(f"| `{name}` | {getattr(m, name):,} | {why} |")
    return "\n".join(rows)


def conversation(name: str) -> str:
    """A table of tests/support/simulation/conversation.py, which each simulated message is in."""
    rows = ["| state | sender | message | next state |", "| --- | --- | --- | --- |"]
    for state, allowed in talk.TABLES[name].items():
        for index, (words, after) in enumerate(_together(allowed).items()):
            who = {">": "peer", "<": "master"}[words[0]]
            rows.append(f"| {'' if index else state} | {who} | {words[2:]} | {after} |")
    return "\n".join(rows)


def _together(allowed: dict[str, str]) -> dict[str, str]:
    """What may be said in a state; one line for all notices, in a state where all may come."""
    for sign, base in zip("><", NOTICES, strict=True):
        notices = {f"{sign} {kind.__name__}" for kind in base.__subclasses__()}
        if notices <= allowed.keys():
            name = f"{sign} any {base.__name__}"
            allowed = {name if said in notices else said: to for said, to in allowed.items()}
    return allowed


def transitions() -> str:
    """What moves a collective at a peer, and what its states and events are."""
    rows = ["| state | event | next state |", "| --- | --- | --- |"]
    for state, events in TRANSITIONS.items():
        for index, (event, after) in enumerate(events.items()):
            rows.append(f"| {'' if index else state.name} | {event.name} | {after.name} |")
    rows += ["", "| state or event | meaning |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {one.name} | {one.value} |" for one in [*State, *Event])])


def exclusions() -> str:
    """Which calls may wait next to each other."""
    rows = ["| a peer waits in | for the votes of | and cannot enter |", "| --- | --- | --- |"]
    for kind in Kind:
        scope = "the whole run" if kind in RUN_WIDE else "a group"
        scope = "two peers" if kind is Kind.PAIR else scope
        others = ", ".join(other.value for other in EXCLUDED[kind])
        rows.append(f"| {kind.value} | {scope} | {others} |")
    return "\n".join(rows)


def _struct(struct: Any, more: str) -> str:
    lines = [f"**{struct.__name__}**{more}", "", _plain(struct.__doc__), ""]
    fields = msgspec.structs.fields(struct)
    if fields:
        lines += ["| field | type | default |", "| --- | --- | --- |"]
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in fields:
        default = "" if field.required else f"`{field.default!r}`"
        lines.append(f"| `{field.name}` | {_type(hints[field.name])} | {default} |")
    return "\n".join([*lines, ""])


def _plain(doc: str | None) -> str:
    return "\n".join(line.strip() for line in (doc or "").strip().splitlines())


def _type(hint: Any) -> str:
    for known, name in _NAMES.items():
        if hint == known:
            return name
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        inner, meta = args[0], args[1]
        if meta.pattern is not None:
            return f"{_type(inner)} like `{meta.pattern}`"
        if meta.ge is not None:
            return f"{_type(inner)}, {meta.ge} to {meta.le}"
        return f"{_type(inner)}, at most {meta.max_length:,}"
    if origin is tuple and args[-1] is Ellipsis:
        return f"array of {_type(args[0])}"
    if origin is tuple:
        return "array of (" + ", ".join(map(_type, args)) + ")"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, args))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(f"`{one.value}`" for one in hint)
    return str(hint.__name__)
