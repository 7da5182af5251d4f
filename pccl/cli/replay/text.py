"""A log in words, line by line, and at the end for whom most was waited."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pccl.cli.replay.story import Happened, Mark, Round
from pccl.protocol.master.outbox import plain

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
