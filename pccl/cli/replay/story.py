"""What an event log tells: who waited for whom, in words and as a trace.

Each peer is a process of the trace. Its calls are slices, in which the time until all had entered,
and the one until all had finished, are slices too; calls at the same time are on threads of their
own. What befalls a peer is a mark on it, what befalls the run one on the master.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pccl.cli.replay.source import Entry
from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.effects import plain
from pccl.protocol.master.record import Told

ANSWERS = {"TopologyResult", "PendingResult", "SyncResult", "OptimizeResult"}
RUN_WIDE = {m.TopologyVote, m.PendingVote, m.OptimizeVote}


@dataclass
class Call:
    """A call that a peer has entered.

    Attributes:
        peer: its number.
        number: of the call, among those of the peer.
        what: with its arguments.
        group: of a call of one group.
        began_s: when it was entered, in seconds since 1970, as all times are.
        started_s: when all had entered it.
        done_s: when this peer had finished its part.
        ended_s: when all had.
        seq: of a collective.
        failed: why it failed; empty if it did not.
        awaited: whom it waited for to enter it, or to finish it.
    """

    peer: int
    number: int
    what: str
    group: int | None
    began_s: float
    started_s: float | None = None
    done_s: float | None = None
    ended_s: float | None = None
    seq: int = 0
    failed: str = ""
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class Round:
    """All have entered a call, or have finished it, or it has failed: one of these for several.

    Attributes:
        calls: of the peers in it.
        phase: "entered" or "finished"; empty of a failure.
        awaited: who came last, or was lost.
        waited_s: of each call, how long it waited for these.
        failed: why the calls failed.
    """

    calls: tuple[Call, ...]
    phase: str
    awaited: tuple[int, ...]
    waited_s: tuple[float, ...]
    failed: str = ""


@dataclass(frozen=True)
class Mark:
    """Something that took no time, in words; of a peer, or of the whole run.

    `noted`: the master's own words, which are a mark of the run, say it too.
    """

    text: str
    peer: int = 0
    noted: bool = False


@dataclass
class Happened:
    """What one line of the log has led to."""

    marks: list[Mark] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)


class Story:
    """Follows the calls of all peers from line to line."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], Call] = {}  # open, by peer and call
        self._of: dict[tuple[int, int], Call] = {}  # started collectives, by peer and seq
        self._groups: dict[int, int] = {}  # of peers that were accepted
        self._asking: dict[int, int] = {}  # groups of those that were not yet

    def tell(self, entry: Entry) -> Happened:
        """What has happened in one line."""
        happened = Happened()
        now_s, line = entry.unix_s, entry.line
        if isinstance(line.input, inputs.Began):
            again = line.input.why or "the master begins" + (
                f" again, and waits for {len(line.input.journal.accepted)} peers"
                if line.input.journal is not None
                else ""
            )
            happened.marks.append(Mark(again))
            self._lose(self._peers(), again, now_s, happened)
        happened.marks += [Mark(note) for note in line.notes]
        if line.failed:
            happened.marks.append(Mark(f"the master failed: {line.failed}", line.peer))
        self._enter(line.input, line.peer, now_s, happened)
        late = line.gone or ((line.peer,) if line.peer else ())
        for told in line.told:
            self._told(told, late, now_s, happened)
        self._lose(line.gone, "; ".join(line.notes), now_s, happened)
        return happened

    def end(self) -> Happened:
        """The calls that were open when the log ended, and those of them that waited for others."""
        happened = Happened(ended=[*self._open()])
        rounds: dict[tuple[str, int | None, bool], list[Call]] = {}
        for call in self._open():
            rounds.setdefault((call.what, call.group, call.started_s is None), []).append(call)
        for (_, group, entering), calls in rounds.items():
            waiting = [call for call in calls if entering or call.done_s is not None]
            inside = {call.peer for call in waiting}
            members = {n for n, of in self._groups.items() if group in (None, of)}
            if not entering:
                members = {call.peer for call in calls}
            waits = (0.0,) * len(waiting)
            phase = "entered" if entering else "finished"
            missing = tuple(sorted(members - inside))
            for call in waiting:
                call.awaited = missing
            happened.rounds.append(Round(tuple(waiting), phase, missing, waits))
        return happened

    # ---- what peers say ----

    def _enter(self, event: inputs.Input, peer: int, now_s: float, happened: Happened) -> None:
        if isinstance(event, inputs.Hello | inputs.Resume) and peer:
            hello = event.message
            self._asking[peer] = hello.group if isinstance(hello, m.Hello) else hello.info.group
            text = "asks to be admitted" if isinstance(hello, m.Hello) else "is back"
            happened.marks.append(Mark(text, peer, noted=True))
        elif isinstance(event, inputs.Received) and peer:
            self._said(event.message, peer, now_s, happened)

    def _said(self, said: m.PeerMessage, peer: int, now_s: float, happened: Happened) -> None:
        match said:
            case m.TopologyVote(call):
                self._begin(peer, call, "update_topology()", said, now_s)
            case m.PendingVote(call):
                self._begin(peer, call, "are_peers_pending()", said, now_s)
            case m.OptimizeVote(call):
                self._begin(peer, call, "optimize_topology()", said, now_s)
            case m.StartVote(call, tag, work):
                self._begin(peer, call, f"{work} with tag {tag}", said, now_s)
            case m.SyncVote(call):
                self._begin(peer, call, "sync_shared_state()", said, now_s)
            case m.FinishVote(seq, ok, why):
                if (found := self._of.get((peer, seq))) is not None:
                    found.done_s = now_s
                if not ok:
                    happened.marks.append(Mark(f"could not complete collective {seq}: {why}", peer))
            case m.FetchedVote(_, ok, why):
                text = "has received shared state" if ok else f"received no shared state: {why}"
                happened.marks.append(Mark(text, peer))
            case m.Unreached(other, _, why):
                happened.marks.append(Mark(f"could not reach peer {other}: {why}", peer))
            case m.Stalled(_, _, why):
                happened.marks.append(Mark(f"cannot pass data on: {why}", peer))
            case m.Withdraw(call):
                happened.marks.append(Mark(f"waits no longer in {self._name(peer, call)}", peer))
            case m.Leave():
                happened.marks.append(Mark("leaves", peer))

    def _begin(self, peer: int, call: int, what: str, said: m.PeerMessage, now_s: float) -> None:
        group = None if type(said) in RUN_WIDE else self._groups.get(peer)
        self._calls[peer, call] = Call(peer, call, what, group, now_s)

    def _name(self, peer: int, call: int) -> str:
        found = self._calls.get((peer, call))
        return "a call" if found is None else found.what

    # ---- what the master tells them ----

    def _told(self, told: Told, late: tuple[int, ...], now_s: float, happened: Happened) -> None:
        if told.say == "Admitted":
            for peer in told.to:
                self._groups[peer] = self._asking.pop(peer, self._groups.get(peer, 0))
                happened.marks.append(Mark("is admitted", peer, noted=True))
        elif told.say == "SyncPlan" and told.fetches:
            holders = ", ".join(map(str, told.holders))
            for peer in told.to:
                text = f"receives {told.fetches} entries of shared state from peers {holders}"
                happened.marks.append(Mark(text, peer))
        elif told.say == "Finished":
            calls = self._found(self._of, ((peer, told.seq) for peer in told.to))
            self._forget(calls)
            waited = [now_s - (call.done_s or now_s) for call in calls]
            self._round(calls, "finished", late, waited, "" if told.ok else told.why, happened)
            self._end(calls, "" if told.ok else told.why, now_s, happened)
        elif told.calls:
            calls = self._found(self._calls, zip(told.to, told.calls, strict=False))
            waited = [now_s - call.began_s for call in calls]
            if told.say == "CallError":
                self._round(calls, "", late, waited, told.why, happened)
            elif told.say in ANSWERS | {"Started"}:
                self._round(calls, "entered", late, waited, "", happened)
            if told.say == "Started":
                for call in calls:
                    call.started_s, call.seq = now_s, told.seq
                    self._of[call.peer, told.seq] = call
            if told.say in ANSWERS | {"CallError"} or told.final:
                self._forget(calls)
                failed = told.why if told.say == "CallError" else ""
                self._end(calls, failed, now_s, happened)

    @staticmethod
    def _found(table: dict[tuple[int, int], Call], keys: Iterable[tuple[int, int]]) -> list[Call]:
        return [table[key] for key in keys if key in table]

    def _round(
        self,
        calls: list[Call],
        phase: str,
        late: tuple[int, ...],
        waited_s: list[float],
        failed: str,
        happened: Happened,
    ) -> None:
        if not calls:
            return
        for call in calls:
            call.awaited = tuple(number for number in late if number != call.peer)
        happened.rounds.append(Round(tuple(calls), phase, late, tuple(waited_s), failed))

    def _end(self, calls: Iterable[Call], failed: str, now_s: float, happened: Happened) -> None:
        for call in calls:
            call.ended_s, call.failed = now_s, failed
            happened.ended.append(call)

    def _forget(self, calls: list[Call]) -> None:
        for call in calls:
            self._calls.pop((call.peer, call.number), None)
            self._of.pop((call.peer, call.seq), None)

    # ---- peers that are gone ----

    def _lose(self, peers: Iterable[int], why: str, now_s: float, happened: Happened) -> None:
        for peer in peers:
            mine = [call for call in self._open() if call.peer == peer]
            self._calls = {key: call for key, call in self._calls.items() if key[0] != peer}
            self._of = {key: call for key, call in self._of.items() if key[0] != peer}
            self._end(mine, f"peer {peer} was lost: {why}", now_s, happened)
            self._groups.pop(peer, None)
            self._asking.pop(peer, None)

    def _peers(self) -> list[int]:
        return [*self._groups, *self._asking]

    def _open(self) -> Iterator[Call]:
        yield from self._calls.values()


NAMES_MAX = 8  # peers named in one line
SUMS_MAX = 20  # peers named at the end


@dataclass
class Waited:
    """For one peer: how often others waited for it, for how long together, and at most."""

    times: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


class Teller:
    """Says what happened.

    Args:
        longer_than_s: calls in which nobody waited for longer are left out, unless they failed.
    """

    def __init__(self, longer_than_s: float) -> None:
        self._longer_than_s = longer_than_s
        self._waited: defaultdict[int, Waited] = defaultdict(Waited)
        self._day = ""
        self._left_out = 0

    def tell(self, unix_s: float, happened: Happened) -> list[str]:
        """What one line of the log has led to."""
        now = time.gmtime(unix_s)
        texts = [_marked(mark) for mark in happened.marks if not mark.noted]
        for round_ in happened.rounds:
            texts += self._round(round_)
        head = f"{time.strftime('%H:%M:%S', now)}.{int(unix_s % 1 * 1000):03d}"
        lines = [f"{head}  {plain(text)}" for text in texts]
        day = time.strftime("%Y-%m-%d", now)
        if lines and day != self._day:
            self._day = day
            lines.insert(0, f"{day}, times are UTC")
        return lines

    def end(self, happened: Happened) -> list[str]:
        """What was not over when the log ended, and for whom most was waited."""
        lines = [
            f"at the end {_peers(call.peer for call in round_.calls)} had {round_.phase} "
            f"{round_.calls[0].what}, and waited for {_peers(round_.awaited)}"
            for round_ in happened.rounds
            if round_.calls and round_.awaited
        ]
        if self._left_out:
            lines.append(
                f"calls in which nobody waited for {self._longer_than_s:g} s are left out: "
                f"{self._left_out}"
            )
        sums = sorted(self._waited.items(), key=lambda item: -item[1].total_s)[:SUMS_MAX]
        if sums:
            lines.append("others waited, together and at most at a time:")
        lines += [
            f"  for peer {number}: {one.total_s:.3f} s, {one.longest_s:.3f} s; "
            f"{one.times} times it came last"
            for number, one in sums
        ]
        return [plain(line) for line in lines]

    def _round(self, round_: Round) -> Iterator[str]:
        what, calls = round_.calls[0].what, _peers(call.peer for call in round_.calls)
        longest_s = max(round_.waited_s)
        others_s = [
            waited_s
            for call, waited_s in zip(round_.calls, round_.waited_s, strict=True)
            if call.peer not in round_.awaited
        ]
        for number in round_.awaited if others_s else ():
            one = self._waited[number]
            one.times += 1
            one.total_s += sum(others_s)
            one.longest_s = max(one.longest_s, *others_s)
        if round_.failed:
            yield f"{what} has failed on {calls} after {longest_s:.3f} s: {round_.failed}"
        elif longest_s >= self._longer_than_s and round_.awaited:
            waited = f"others waited up to {longest_s:.3f} s for {_peers(round_.awaited)}"
            yield f"{what}: {calls} have {round_.phase} it; {waited}"
        else:
            self._left_out += 1


def _marked(mark: Mark) -> str:
    return f"peer {mark.peer} {mark.text}" if mark.peer else mark.text


def _peers(numbers: Iterable[int]) -> str:
    """Peers by number; only the first ones of many."""
    listed = sorted({*numbers})
    names = ", ".join(map(str, listed[:NAMES_MAX]))
    more = f" and {len(listed) - NAMES_MAX} more" if len(listed) > NAMES_MAX else ""
    return f"{'peer' if len(listed) == 1 else 'peers'} {names}{more}" if listed else "nobody"


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
