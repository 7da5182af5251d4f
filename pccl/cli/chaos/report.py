"""The report of a run under faults, during the run and afterwards."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pccl.cli.chaos.director import Chronicle, Director, Done
from pccl.cli.chaos.stage import Copy
from pccl.cli.chaos.watch import Metrics
from pccl.cli.replay import Check, Source
from pccl.cli.terminal import Style, Styled, table

ENDED_SHOWN_S = 5.0


def picture(director: Director) -> Iterator[str]:
    """The copies, and the progress of the run."""
    now_s, chronicle = time.monotonic(), director.chronicle
    watch, schedule = director.watch, director.schedule
    passed_s = now_s - chronicle.faults_s if chronicle.faults_s else 0.0
    yield f"{passed_s:.0f} of {schedule.seconds:.0f} s, seed {schedule.seed}"
    yield ""
    copies = [
        copy
        for copy in director.stage.copies
        if copy.ended_s is None or now_s - copy.ended_s < ENDED_SHOWN_S
    ]
    states = [_state(copy) for copy in copies]
    rows = [_row(copy, state, now_s) for copy, (state, _) in zip(copies, states, strict=True)]
    head, *lines = table(("copy", "is", "since", "what befell it last"), rows)
    yield head
    yield from (Styled(line, style) for line, (_, style) in zip(lines, states, strict=True))
    still_s = now_s - watch.last_s if watch.rounds else 0.0
    how = (
        f"{len(watch.accepted)} peers; {len(watch.collectives_s)} collectives, {watch.rounds} "
        f"calls; the last one {still_s:.1f} s ago; {len(chronicle.done)} of "
        f"{len(schedule.faults)} faults"
    )
    yield ""
    yield Styled(how, "dim" if still_s < 5.0 else "yellow")


def _state(copy: Copy) -> tuple[str, Style]:
    if copy.ended_s is not None:
        return ("killed", "red") if copy.by_us else (f"ended ({copy.process.status})", "dim")
    if copy.stopped:
        return "frozen", "cyan"
    return ("in the run", "green") if copy.settled else ("coming", "yellow")


def _row(copy: Copy, state: str, now_s: float) -> Sequence[str]:
    since_s = now_s - (copy.ended_s or copy.began_s)
    last = f"{copy.befell[-1][1]} {now_s - copy.befell[-1][0]:.1f} s ago" if copy.befell else ""
    return str(copy.number), state, f"{since_s:.0f} s", last


def line_of(done: Done, director: Director) -> str:
    copies = director.stage.alive()
    frozen = sum(copy.stopped for copy in copies)
    at_s = done.at_s - director.chronicle.faults_s
    whom = f": copy {done.copy}" if done.copy >= 0 else ""
    lasts = f" for {done.fault.lasts_s:.1f} s" if done.fault.lasts_s else ""
    moment = f" ({done.moment})" if done.moment else ""
    why = f", but {done.skipped}" if done.skipped else ""
    what = f"{done.fault.what}{whom}{lasts}{moment}{why}"
    world = f"{len(director.watch.accepted)} peers, {len(copies)} copies, {frozen} frozen"
    return f"{at_s:7.1f} s  {what:52}  {director.watch.rounds:6} calls, {world}"


def _whom(done: Done) -> str:
    return f"copy {done.copy}" if done.copy >= 0 else ""


# ---- afterwards: a page ----

WIDTH, LABEL, ROW = 1100.0, 90.0, 22.0
BINS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { --page: #f6f7f9; --card: #fff; --line: #d8dce3; --text: #1a1f29; --quiet: #5b6472;
  --life: #9db8ea; --fault: #b3261e; --held: #1b6b3a; }
@media (prefers-color-scheme: dark) { :root { --page: #11151c; --card: #1a202a; --line: #343c49;
  --text: #e7eaf0; --quiet: #a2abba; --life: #35558f; --fault: #ff8a80; --held: #7fd6a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; }
.held { color: var(--held); } .broken { color: var(--fault); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; padding: .5rem; }
svg text { fill: var(--text); font-size: 11px; }
svg .quiet { fill: var(--quiet); }
svg .life { fill: var(--life); rx: 3px; } svg .fault { fill: var(--fault); }
svg .span { fill: var(--fault); opacity: .35; } svg .grid { stroke: var(--line); }
pre, code { font-family: ui-monospace, monospace; font-size: .88rem; white-space: pre-wrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem; }
table { border-collapse: collapse; background: var(--card); font-size: .9rem; width: 100%; }
th, td { text-align: left; border: 1px solid var(--line); padding: .25rem .6rem;
  font-variant-numeric: tabular-nums; }
"""


def page(title: str, again: str, chronicle: Chronicle, copies: Sequence[Copy], run: Metrics) -> str:
    """One HTML file. `again` is the command that repeats the run."""
    broken = chronicle.violations
    verdict = f"{len(broken)} violations" if broken else "everything held"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pccl chaos: {verdict}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}: "
        f'<span class="{"broken" if broken else "held"}">{verdict}</span></h1>',
        f"<p>{run.words()}</p>",
        f"<p>Once more: <code>{escape(again)}</code></p>",
        "<h2>What did not hold</h2>" if broken else "",
        *(f"<pre>{escape(text)}</pre>" for text in broken),
        '<h2>Copies and faults</h2><div class="wide">',
        *_timeline(chronicle, copies),
        "</div><h2>From a fault to the next step</h2>",
        _recoveries(run.recoveries_s),
        "<h2>Faults</h2>",
        _faults(chronicle),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = (f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{head}</th>" for head in heads)
    return "\n".join([f"<table><tr>{head}</tr>", *cells, "</table>"])


def _recoveries(times_s: Sequence[float]) -> str:
    """The number and the durations of recoveries."""
    counts = [0] * (len(BINS_S) + 1)
    for time_s in times_s:
        counts[bisect.bisect_left(BINS_S, time_s)] += 1
    names = [*(f"up to {bin_s:g} s" for bin_s in BINS_S), f"over {BINS_S[-1]:g} s"]
    most = max([*counts, 1])
    rows = zip(names, map(str, counts), ("█" * (40 * n // most) for n in counts), strict=True)
    return _table(("time", "faults", ""), rows)


def _faults(chronicle: Chronicle) -> str:
    rows = (
        (
            f"{done.at_s - chronicle.faults_s:.2f} s",
            done.fault.what,
            done.skipped or _whom(done),
            "" if done.over_s is None else f"{done.over_s - done.at_s:.2f} s",
            done.moment,
        )
        for done in chronicle.done
    )
    return _table(("at", "fault", "whom", "for", "moment"), rows)


def _timeline(chronicle: Chronicle, copies: Sequence[Copy]) -> Iterator[str]:
    """A row for the master and for each copy, with the time from left to right."""
    began_s, ended_s = chronicle.began_s, chronicle.ended_s
    whole_s = max(ended_s - began_s, 0.001)
    height = (len(copies) + 2) * ROW + 8

    def x(at_s: float) -> float:
        return LABEL + (WIDTH - LABEL - 10) * (at_s - began_s) / whole_s

    yield f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}" role="img">'
    yield "<title>Which copies lived when, and what befell them</title>"
    for passed_s in (whole_s * tenth / 10 for tenth in range(11)):
        at = x(began_s + passed_s)
        yield (
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{ROW:.0f}" y2="{height - 8:.0f}"/>'
            f'<text class="quiet" x="{at - 8:.1f}" y="12">{passed_s:.0f} s</text>'
        )
    ends = {copy.number: min(copy.ended_s or ended_s, ended_s) for copy in copies}
    lives = [("master", began_s, ended_s)]
    lives += [(f"copy {copy.number}", copy.began_s, ends[copy.number]) for copy in copies]
    for row, (name, from_s, to_s) in enumerate(lives, 1):
        yield f'<text x="2" y="{row * ROW + 14:.0f}">{name}</text>'
        yield _bar("life", x(from_s), max(x(to_s), x(from_s) + 1), row * ROW + 5, 12)
    for done in chronicle.done:
        if not done.skipped:
            over_s = min(done.over_s or done.at_s, ends.get(done.copy, ended_s))
            top = (max(done.copy, -1) + 2) * ROW
            what = ", ".join(filter(None, [done.fault.what, _whom(done), done.moment]))
            yield f"<g><title>{done.at_s - chronicle.faults_s:.2f} s: {escape(what)}</title>"
            yield _bar("span", x(done.at_s), x(max(done.at_s, over_s)), top + 3, 16)
            yield f'<circle class="fault" cx="{x(done.at_s):.1f}" cy="{top + 11:.0f}" r="4"/></g>'
    yield "</svg>"


def _bar(kind: str, left: float, right: float, top: float, height: int) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.0f}" width="{right - left:.1f}" '
        f'height="{height}"/>'
    )


# ---- the demands on the master ----

GROWTH_MAX = 40, 4, 64  # descriptors, threads, MiB of the master: more is a leak
SIZES_MIN = 20  # the fewest samples of one master that are compared


def master_violations(director: Director) -> Iterator[str]:
    """Yields a violation if a second master decides otherwise, or if the master has grown."""
    check = Check()
    try:
        source = Source(director.stage.event_log)
        for line in source.lines():
            check.feed(line)
    except OSError as error:
        yield f"the master's event log cannot be read: {error}"
        return
    if source.damaged:
        yield f"the master's event log is damaged: {'; '.join(source.problems)}"
    if check.failed:
        yield f"another master, given the same events, decides otherwise: {check.summary()}"
    yield from growth("the master", director.chronicle.sizes, GROWTH_MAX, SIZES_MIN)


def growth(
    what: str, sizes: Sequence[tuple[int, int, int]], limits: tuple[int, int, int], least: int
) -> Iterator[str]:
    """Yields a violation if a process holds more at the end than in the middle of its life.

    Sizes are descriptors, threads and MiB. With fewer than `least` sizes, it yields nothing.
    """
    if len(sizes) < least:
        return
    half, last = len(sizes) // 2, len(sizes) // 4
    early, late = (
        tuple(max(column) for column in zip(*some, strict=True))
        for some in (sizes[last:half], sizes[-last:])
    )
    if any(b - a > limit for a, b, limit in zip(early, late, limits, strict=True)):
        yield f"{what} has grown from {early} to {late} descriptors, threads and MiB"
