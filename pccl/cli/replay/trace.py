"""A log as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each peer is a process of the trace. Its calls are slices, in which the time until all had entered,
and the one until all had finished, are slices too; calls at the same time are on threads of their
own. What befalls a peer is a mark on it, what befalls the run one on the master.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pccl.cli.replay.story import Call, Happened
from pccl.protocol.master.outbox import plain


class Trace:
    """Collects the events of a trace."""

    def __init__(self) -> None:
        self._marks: list[dict[str, Any]] = []
        self._calls: list[Call] = []

    def add(self, unix_s: float, happened: Happened) -> None:
        """What one line of the log has led to."""
        self._calls += happened.ended
        for mark in happened.marks:
            where = {"pid": mark.peer, "tid": 0, "ts": _us(unix_s)}
            self._marks.append({"ph": "i", "s": "p", "name": plain(mark.text), **where})

    def end(self, unix_s: float, happened: Happened) -> None:
        """The log ends, and calls are open."""
        for call in happened.ended:
            call.ended_s, call.failed = unix_s, "it was not over when the log ended"
            self._calls.append(call)

    def encode(self) -> bytes:
        """The trace, as JSON."""
        slices: list[dict[str, Any]] = []
        busy: dict[int, list[float]] = {}  # of each peer: until when each of its threads is taken
        for call in sorted(self._calls, key=lambda call: call.began_s):
            threads = busy.setdefault(call.peer, [])
            free = (i for i, until_s in enumerate(threads) if until_s <= call.began_s)
            thread = next(free, len(threads))
            threads[thread : thread + 1] = [call.ended_s or call.began_s]
            slices += _slices(call, thread)
        numbers = {event["pid"] for event in (*self._marks, *slices)}
        named: list[dict[str, Any]] = []
        for number in sorted(numbers):
            name = f"peer {number}" if number else "master"
            order = {"sort_index": number}
            named.append(_told("process_name", number, {"name": name}))
            named.append(_told("process_sort_index", number, order))
        return msgspec.json.encode({"traceEvents": named + self._marks + slices})


def _slices(call: Call, thread: int) -> list[dict[str, Any]]:
    """A call, and within it the times until all had entered it, and until all had finished."""
    assert call.ended_s is not None
    args: dict[str, Any] = {"last": [*call.awaited]}
    if call.seq:
        args["collective"] = call.seq
    if call.failed:
        args["failed"] = plain(call.failed)
    slices = [_slice(call, thread, plain(call.what), call.began_s, call.ended_s, args)]
    if call.started_s is not None and call.started_s < call.ended_s:
        slices.append(_slice(call, thread, "enters", call.began_s, call.started_s, {}))
        done_s = call.ended_s if call.done_s is None else call.done_s
        slices.append(_slice(call, thread, "runs", call.started_s, done_s, {}))
        slices.append(_slice(call, thread, "waits for others", done_s, call.ended_s, {}))
    return slices


def _slice(
    call: Call, thread: int, name: str, begin_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    where = {"pid": call.peer, "tid": thread, "ts": _us(begin_s)}
    return {"ph": "X", "name": name, **where, "dur": _us(end_s) - _us(begin_s), "args": args}


def _told(name: str, number: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": number, "tid": 0, "args": args}


def _us(unix_s: float) -> int:
    return round(unix_s * 1e6)
