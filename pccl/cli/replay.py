"""`pccl replay`: shows, checks and exports a master's event log: which peers waited for which.

In a trace each peer is a process, and each of its calls a slice. Within it are slices for the time
until all had entered, and until all had finished. Concurrent calls are on different threads. Events
of a peer are marks on its process, and events of the run are marks on the master's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pccl.cli.arguments import duration, option, output
from pccl.protocol import messages as m
from pccl.protocol.master import inputs
from pccl.protocol.master.effects import plain
from pccl.protocol.master.eventlog import Differs, Gap, Line, Replay, Told
from pccl.runtime.server.eventlog import VERSION, Damaged, Head, files, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "log LOG", "the file of the master's --event-log", kind=Path)
    text = "leave out calls in which no peer waited for longer, unless they failed"
    option(parser, "--longer-than SECONDS", text, 0.1, duration)
    text = "feed the log to the master's state machine, and compare its decisions"
    option(parser, "--check", text)
    text = "write a pytest test that feeds the log to the state machine, up to the first "
    option(parser, "--to-test FILE", f"{text}exception", kind=output)
    text = "write a trace for Perfetto or Chrome (JSON)"
    option(parser, "--trace FILE", text, kind=output)


def run(args: argparse.Namespace) -> int:
    """Prints or checks the log; the exit code is 1 if it is damaged or a replay differs."""
    source, story = Source(args.log), Story()
    check = Check() if args.check else None
    teller = Teller(args.longer_than)
    marks: list[tuple[float, Mark]] = []
    calls: list[Call] = []
    for entry in source.lines():
        happened = story.tell(entry)
        if check is None:
            _print(teller.tell(entry.unix_s, happened))
        else:
            check.feed(entry)
        if args.trace is not None:
            marks += [(entry.unix_s, mark) for mark in happened.marks]
            calls += happened.ended
    ended = story.end(source.last_unix_s)
    if args.trace is not None:
        args.trace.write_bytes(trace(marks, [*calls, *ended.ended]))
    if args.to_test is not None:
        args.to_test.write_text(case(args.log), encoding="utf-8")
    _print(teller.end(ended) if check is None else [check.summary()])
    for problem in source.problems:
        print(f"pccl replay: {problem}", file=sys.stderr)
    return int(source.damaged or (check is not None and check.failed))


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line)


# ---- the lines of a log, and the state machine that takes them ----

_LAST_UNIX_S = 253402300800  # the year 10000


class Entry(NamedTuple):
    where: str  # file and line
    unix_s: float  # when
    line: Line  # its content
    whole: bool  # whether all lines before it are present


class Source:
    """An event log. Raises OSError: there is no such file."""

    def __init__(self, path: Path) -> None:
        self._files = files(path)
        self.problems: list[str] = []  # reports of missing or damaged lines; complete after `lines`
        self.damaged = False  # whether a line is unreadable
        self.last_unix_s = 0.0
        self._undated = False
        if not self._files:
            raise OSError(f"there is no event log {path}")

    def lines(self) -> Iterator[Entry]:
        """All lines, the oldest first. Raises OSError: a file is not an event log."""
        head: Head | None = None
        number = 0  # the next line's number, as its master counts
        began_s = 0.0
        whole = True
        for file in self._files:
            for at, item in read(file):
                where = f"{file}:{at}"
                if isinstance(item, Head):
                    whole &= self._continues(item, head, number, where)
                    head, number = item, item.line
                    began_s = self._dated(head.unix_s, head.monotonic_s, where)
                elif head is None:
                    raise OSError(f"{file} is not an event log of a master: it begins with no head")
                elif isinstance(item, Gap):
                    self.problems.append(f"{where}: {item.lost} events are missing: {item.why}")
                    number, whole = number + item.lost, False
                elif isinstance(item, Damaged):
                    number, whole = number + 1, False
                    self.damaged |= not item.torn
                    self.problems.append(
                        f"{where}: the master has ended within this line"
                        if item.torn
                        else f"{where}: this is not an event ({item.why}): the file was changed or "
                        "damaged; the rest is shown without it"
                    )
                else:
                    unix_s = began_s + item.at_s - head.monotonic_s
                    self.last_unix_s = self._dated(unix_s, self.last_unix_s, where)
                    yield Entry(where, self.last_unix_s, item, whole)
                    number, whole = number + 1, True

    def _dated(self, unix_s: float, otherwise: float, where: str) -> float:
        """`unix_s`, or `otherwise` if that is not a possible time."""
        if 0 <= unix_s < _LAST_UNIX_S:
            return unix_s
        if not self._undated:
            self.damaged = self._undated = True
            self.problems.append(
                f"{where}: its time is {unix_s:g} s since 1970: the file was changed or damaged; "
                "from here on, times may be wrong"
            )
        return otherwise

    def _continues(self, head: Head, before: Head | None, number: int, where: str) -> bool:
        """True if there is no gap between a head and the lines before it."""
        if head.version != VERSION:
            raise OSError(
                f"{where} is of version {head.version} of event logs, and this pccl reads version "
                f"{VERSION}: take pccl {head.pccl}"
            )
        if head.missing < 0:
            self.problems.append(
                f"{where}: the master could not write there when it ended: its last events are "
                "missing"
            )
        same = before is not None and before.process == head.process and head.line > 0
        missing = head.line - (number if same else 0)
        if missing:
            self.problems.append(
                f"{where}: {missing} events before that are missing, in files that were removed"
            )
        return not missing


class Check:
    """Feeds a log to the state machine, and compares its decisions."""

    def __init__(self) -> None:
        self._again = Replay()
        self._fed = self._skipped = 0
        self._failures: list[str] = []
        self._differs = ""

    def feed(self, entry: Entry) -> None:
        """Feeds one line. After a difference, it skips lines until the next start of a master."""
        if not entry.whole:
            self._again.lose()
        try:
            fed = self._again.feed(entry.line)
        except Differs as error:
            self._differs = self._differs or f"{entry.where}: {error}"
            self._again.lose()
            return
        self._fed += fed
        self._skipped += not fed
        if fed and entry.line.failed:
            self._failures.append(f"{entry.where}: it fails again with {entry.line.failed}")

    @property
    def failed(self) -> bool:
        """True if the master decided differently this time, or nothing could be replayed."""
        return bool(self._differs) or not self._fed

    def summary(self) -> str:
        lines = [f"{self._fed} inputs have the same effects again", *self._failures]
        if self._skipped:
            lines.append(
                f"{self._skipped} could not be fed, because events before them are missing"
            )
        if self._differs:
            lines.append(f"the master does something else at {self._differs}")
        return "\n".join(lines)


BYTES_MAX = 8 << 20  # most bytes of a generated test
TEMPLATE = '''"""What a master did in the field; made by `pccl replay --to-test`."""

from pccl.protocol.master.eventlog import Replay, lines

RECORD = r"""
{record}
"""


def test_the_master_does_what_is_right() -> None:
    """Each input but the last one has the effects that it had; the last one raises nothing."""
    again = Replay()
    *before, last = lines(RECORD)
    for line in before:
        assert again.feed(line)
    again.happen(last)
'''


def case(log: Path) -> str:
    """A test of the lines from a master's beginning up to the first one that has failed, or to the
    last. Raises OSError if the log has no beginning, or the test is too large."""
    lines: list[Line] = []
    for entry in Source(log).lines():
        if not entry.whole:
            lines.clear()
        if lines or isinstance(entry.line.input, inputs.Began):
            lines.append(entry.line)
            if entry.line.failed:
                break
    if not lines:
        raise OSError(f"{log} has no beginning of a master, from which a test could start")
    encoded = b"\n".join(map(msgspec.json.encode, lines)).decode()
    if len(encoded) > BYTES_MAX:
        mib = len(encoded) >> 20
        raise OSError(f"a test of {log} would have {mib} MiB: cut it behind the line in question")
    return TEMPLATE.format(record=encoded)  # JSON has no three quotes in a row


# ---- the calls in a log ----

ANSWERS = {"TopologyResult", "PendingResult", "SyncResult", "OptimizeResult"}
RUN_WIDE = {m.TopologyVote, m.PendingVote, m.OptimizeVote}


@dataclass
class Call:
    peer: int  # its number
    number: int  # the number of the peer's call
    what: str  # the call, with its arguments
    group: int | None  # the group that calls; None: the whole run
    began_s: float  # when the peer entered it; all times are in seconds since 1970
    started_s: float | None = None  # when all peers had entered it
    done_s: float | None = None  # when this peer finished its part
    ended_s: float = 0.0  # when all had finished it, or the log ended
    seq: int = 0  # the number of a collective
    failed: str = ""  # why it failed; empty: it did not
    awaited: tuple[int, ...] = ()  # the peers that it waited for


class Round(NamedTuple):
    """The end of a phase of a call: all peers have entered it, have finished it, or it failed."""

    calls: Sequence[Call]  # the calls of its peers
    phase: str  # "entered" or "finished"; empty after a failure
    awaited: tuple[int, ...]  # the peers that came last, or were lost
    waited_s: Sequence[float] = ()  # how long each call waited for them
    failed: str = ""  # why the calls failed


class Mark(NamedTuple):
    """An event without a duration, of a peer or of the whole run (0)."""

    text: str
    peer: int = 0
    noted: bool = False  # whether the master's log also reports it, as a mark of the run


@dataclass
class Happened:
    marks: list[Mark] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)


class Story:
    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], Call] = {}  # open, by peer and call
        self._of: dict[tuple[int, int], Call] = {}  # started collectives, by peer and seq
        self._groups: dict[int, int] = {}  # by accepted peer: its group
        self._asking: dict[int, int] = {}  # groups of those that were not yet
        self._happened = Happened()  # by the printed line
        self._now_s = 0.0

    def tell(self, entry: Entry) -> Happened:
        happened = self._happened = Happened()
        self._now_s, line = entry.unix_s, entry.line
        if isinstance(line.input, inputs.Began):
            again = line.input.why or "the master begins"
            if not line.input.why and (journal := line.input.journal) is not None:
                again += f" again, and waits for {len(journal.accepted)} peers"
            self._mark(again)
            self._lose([*self._groups, *self._asking], again)
        for note in line.notes:
            self._mark(note)
        if line.failed:
            self._mark(f"the master failed: {line.failed}", line.peer)
        self._enter(line.input, line.peer)
        late = line.gone or ((line.peer,) if line.peer else ())
        for told in line.told:
            self._told(told, late)
        self._lose(line.gone, "; ".join(line.notes))
        return happened

    def _mark(self, text: str, peer: int = 0, *, noted: bool = False) -> None:
        self._happened.marks.append(Mark(text, peer, noted))

    def end(self, unix_s: float) -> Happened:
        """The open calls at the end of the log, and the rounds in which they waited."""
        happened = Happened(ended=[*self._calls.values()])
        rounds: defaultdict[tuple[str, int | None, bool], list[Call]] = defaultdict(list)
        for call in happened.ended:
            call.ended_s, call.failed = unix_s, "it was not over when the log ended"
            rounds[call.what, call.group, call.started_s is None].append(call)
        for (_, group, entering), calls in rounds.items():
            waiting = [call for call in calls if entering or call.done_s is not None]
            inside = {call.peer for call in waiting}
            members = {call.peer for call in calls}
            if entering:
                members = {n for n, of in self._groups.items() if group in (None, of)}
            missing = tuple(sorted(members - inside))
            for call in waiting:
                call.awaited = missing
            happened.rounds.append(Round(waiting, "entered" if entering else "finished", missing))
        return happened

    # ---- messages from peers ----

    def _enter(self, event: inputs.Input, peer: int) -> None:
        if isinstance(event, inputs.Hello | inputs.Resume) and peer:
            hello = event.message
            self._asking[peer] = hello.group if isinstance(hello, m.Hello) else hello.info.group
            text = "asks to be admitted" if isinstance(hello, m.Hello) else "is back"
            self._mark(text, peer, noted=True)
        elif isinstance(event, inputs.Received) and peer:
            self._received(event.message, peer)

    def _received(self, message: m.PeerMessage, peer: int) -> None:
        match message:
            case m.TopologyVote(call):
                self._begin(peer, call, "update_topology()", message)
            case m.PendingVote(call):
                self._begin(peer, call, "are_peers_pending()", message)
            case m.OptimizeVote(call):
                self._begin(peer, call, "optimize_topology()", message)
            case m.StartVote(call, tag, work):
                self._begin(peer, call, f"{work} with tag {tag}", message)
            case m.SyncVote(call):
                self._begin(peer, call, "sync_shared_state()", message)
            case m.FinishVote(seq, ok, why):
                if (found := self._of.get((peer, seq))) is not None:
                    found.done_s = self._now_s
                if not ok:
                    self._mark(f"could not complete collective {seq}: {why}", peer)
            case m.FetchedVote(_, ok, why):
                text = "has received shared state" if ok else f"received no shared state: {why}"
                self._mark(text, peer)
            case m.Unreached(other, _, why):
                self._mark(f"could not reach peer {other}: {why}", peer)
            case m.Stalled(_, _, why):
                self._mark(f"cannot pass data on: {why}", peer)
            case m.Withdraw(call):
                open_ = self._calls.get((peer, call))
                self._mark(f"waits no longer in {open_.what if open_ else 'a call'}", peer)
            case m.Leave():
                self._mark("leaves", peer)

    def _begin(self, peer: int, call: int, what: str, message: m.PeerMessage) -> None:
        group = None if type(message) in RUN_WIDE else self._groups.get(peer)
        self._calls[peer, call] = Call(peer, call, what, group, self._now_s)

    # ---- messages from the master ----

    def _told(self, told: Told, late: tuple[int, ...]) -> None:
        if told.say == "Admitted":
            for peer in told.to:
                self._groups[peer] = self._asking.pop(peer, self._groups.get(peer, 0))
                self._mark("is admitted", peer, noted=True)
        elif told.say == "SyncPlan" and told.fetches:
            holders = ", ".join(map(str, told.holders))
            for peer in told.to:
                text = f"receives {told.fetches} entries of shared state from peers {holders}"
                self._mark(text, peer)
        elif told.say == "Finished":
            keys = ((peer, told.seq) for peer in told.to)
            calls = [self._of[key] for key in keys if key in self._of]
            failed = "" if told.ok else told.why
            waited = [self._now_s - (call.done_s or self._now_s) for call in calls]
            self._round(calls, "finished", late, waited, failed)
            self._end(calls, failed)
        elif told.calls:
            entered = zip(told.to, told.calls, strict=False)
            calls = [self._calls[key] for key in entered if key in self._calls]
            failed = told.why if told.say == "CallError" else ""
            if told.say in ANSWERS | {"Started", "CallError"}:
                waited = [self._now_s - call.began_s for call in calls]
                phase = "" if told.say == "CallError" else "entered"
                self._round(calls, phase, late, waited, failed)
            if told.say == "Started":
                for call in calls:
                    call.started_s, call.seq = self._now_s, told.seq
                    self._of[call.peer, told.seq] = call
            if told.say in ANSWERS | {"CallError"} or told.final:
                self._end(calls, failed)

    def _round(
        self, calls: list[Call], phase: str, late: tuple[int, ...], waits: list[float], failed: str
    ) -> None:
        for call in calls:
            call.awaited = tuple(number for number in late if number != call.peer)
        if calls:
            self._happened.rounds.append(Round(calls, phase, late, waits, failed))

    def _end(self, calls: Iterable[Call], failed: str) -> None:
        for call in calls:
            self._calls.pop((call.peer, call.number), None)
            self._of.pop((call.peer, call.seq), None)
            call.ended_s, call.failed = self._now_s, failed
            self._happened.ended.append(call)

    # ---- lost peers ----

    def _lose(self, peers: Iterable[int], why: str) -> None:
        for peer in peers:
            mine = [call for call in self._calls.values() if call.peer == peer]
            self._end(mine, f"peer {peer} was lost: {why}")
            self._groups.pop(peer, None)
            self._asking.pop(peer, None)


NAMES_MAX = 8  # peers named in one line
SUMS_MAX = 20  # peers named at the end


@dataclass
class Waited:
    times: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


class Teller:
    """Describes events. Omits calls without longer waits, unless they failed."""

    def __init__(self, longer_than_s: float) -> None:
        self._longer_than_s = longer_than_s
        self._waited: defaultdict[int, Waited] = defaultdict(Waited)
        self._day = ""
        self._left_out = 0

    def tell(self, unix_s: float, happened: Happened) -> list[str]:
        now = time.gmtime(unix_s)
        texts = [
            f"peer {mark.peer} {mark.text}" if mark.peer else mark.text
            for mark in happened.marks
            if not mark.noted
        ]
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
        """The open calls at the end of the log, and the peers that others waited for most."""
        lines = [
            f"at the end {_peers(call.peer for call in round_.calls)} had {round_.phase} "
            f"{round_.calls[0].what}, and waited for {_peers(round_.awaited)}"
            for round_ in happened.rounds
            if round_.calls and round_.awaited
        ]
        if self._left_out:
            lines.append(
                f"calls in which no peer waited for {self._longer_than_s:g} s are left out: "
                f"{self._left_out}"
            )
        sums = sorted(self._waited.items(), key=lambda item: -item[1].total_s)[:SUMS_MAX]
        if sums:
            lines.append("how long others waited, in all and at most:")
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


def _peers(numbers: Iterable[int]) -> str:
    """Peers by number; only the first ones of many."""
    listed = sorted({*numbers})
    names = ", ".join(map(str, listed[:NAMES_MAX]))
    more = f" and {len(listed) - NAMES_MAX} more" if len(listed) > NAMES_MAX else ""
    return f"{'peer' if len(listed) == 1 else 'peers'} {names}{more}" if listed else "nobody"


# ---- a trace ----


def trace(marks: Iterable[tuple[float, Mark]], calls: Iterable[Call]) -> bytes:
    events: list[dict[str, Any]] = []
    for unix_s, mark in marks:
        where = {"pid": mark.peer, "tid": 0, "ts": _us(unix_s)}
        events.append({"ph": "i", "s": "p", "name": plain(mark.text), **where})
    busy: defaultdict[int, list[float]] = defaultdict(
        list
    )  # until when each thread of a peer is in use
    for call in sorted(calls, key=lambda call: call.began_s):
        threads = busy[call.peer]
        free = (i for i, until_s in enumerate(threads) if until_s <= call.began_s)
        thread = next(free, len(threads))
        threads[thread : thread + 1] = [call.ended_s]
        for name, begin_s, end_s, args in _slices(call):
            begin, end = _us(begin_s), _us(end_s)
            where = {"pid": call.peer, "tid": thread, "ts": begin, "dur": end - begin}
            events.append({"ph": "X", "name": name, **where, "args": args})
    for number in sorted({event["pid"] for event in events}):
        name = f"peer {number}" if number else "master"
        facts = {"process_name": {"name": name}, "process_sort_index": {"sort_index": number}}
        for kind, args in facts.items():
            events.append({"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args})
    return msgspec.json.encode({"traceEvents": events})


def _slices(call: Call) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """A call, with the times until all had entered it, and until all had finished it."""
    args: dict[str, Any] = {"last": [*call.awaited]}
    if call.seq:
        args["collective"] = call.seq
    if call.failed:
        args["failed"] = plain(call.failed)
    yield plain(call.what), call.began_s, call.ended_s, args
    if call.started_s is not None and call.started_s < call.ended_s:
        done_s = call.ended_s if call.done_s is None else call.done_s
        yield "enters", call.began_s, call.started_s, {}
        yield "runs", call.started_s, done_s, {}
        yield "waits for others", done_s, call.ended_s, {}


def _us(unix_s: float) -> int:
    return round(unix_s * 1e6)
