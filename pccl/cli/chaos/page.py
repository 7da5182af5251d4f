"""The report of a run: one HTML file that needs no network and runs no program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from pccl.cli.chaos.director import Chronicle, Done
from pccl.cli.chaos.figures import Figures
from pccl.cli.chaos.stage import Copy

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
svg .life { fill: var(--life); } svg .fault { fill: var(--fault); }
svg .span { fill: var(--fault); opacity: .35; } svg .grid { stroke: var(--line); }
pre, code { font-family: ui-monospace, monospace; font-size: .88rem; white-space: pre-wrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem; }
table { border-collapse: collapse; background: var(--card); font-size: .9rem; width: 100%; }
th, td { text-align: left; border: 1px solid var(--line); padding: .25rem .6rem;
  font-variant-numeric: tabular-nums; }
"""


class Report(NamedTuple):
    """What is reported.

    Attributes:
        title: what was run.
        again: the command that runs it again.
        chronicle: what has happened.
        copies: that were started.
        figures: in numbers.
        violations: all, in words.
        notes: what else is to be said.
    """

    title: str
    again: str
    chronicle: Chronicle
    copies: Sequence[Copy]
    figures: Figures
    violations: Sequence[str]
    notes: Sequence[str] = ()


def page(report: Report) -> str:
    """The report as HTML."""
    held = not report.violations
    verdict = "everything held" if held else f"{len(report.violations)} violations"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pccl chaos: {escape(verdict)}</title><style>{STYLE}</style></head><body>",
        f'<h1>{escape(report.title)}: <span class="{"held" if held else "broken"}">'
        f"{escape(verdict)}</span></h1>",
        f"<p>{escape(report.figures.words())}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        f"<p>Once more: <code>{escape(report.again)}</code></p>",
    ]
    if report.violations:
        parts.append("<h2>What did not hold</h2>")
        parts += [f"<pre>{escape(text)}</pre>" for text in report.violations]
    parts += ["<h2>Copies and faults</h2>", '<div class="wide">', *_timeline(report), "</div>"]
    parts += ["<h2>From a fault to the next step</h2>", '<div class="wide">']
    parts += [*_histogram(report.figures.recoveries_s), "</div>"]
    parts += ["<h2>Faults</h2>", *_table(report.chronicle), "</body></html>"]
    return "\n".join(parts) + "\n"


def _timeline(report: Report) -> Iterator[str]:
    chronicle = report.chronicle
    whole_s = max(chronicle.ended_s - chronicle.began_s, 0.001)
    rows = len(report.copies) + 1
    height = (rows + 1) * ROW + 8

    def x(at_s: float) -> float:
        return LABEL + (WIDTH - LABEL - 10) * (at_s - chronicle.began_s) / whole_s

    yield f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}" role="img">'
    yield "<title>Which copies lived when, and what befell them</title>"
    for tenth in range(11):
        at_s = chronicle.began_s + whole_s * tenth / 10
        yield (
            f'<line class="grid" x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{ROW:.0f}" '
            f'y2="{height - 8:.0f}"/><text class="quiet" x="{x(at_s) - 8:.1f}" y="12">'
            f"{whole_s * tenth / 10:.0f} s</text>"
        )
    lives = [("master", chronicle.began_s, chronicle.ended_s)]
    lives += [
        (f"copy {copy.number}", copy.began_s, min(copy.ended_s or 1e18, chronicle.ended_s))
        for copy in report.copies
    ]
    for row, (name, began_s, ended_s) in enumerate(lives, 1):
        width = max(x(ended_s) - x(began_s), 1.0)
        yield (
            f'<text x="2" y="{row * ROW + 14:.0f}">{escape(name)}</text>'
            f'<rect class="life" x="{x(began_s):.1f}" y="{row * ROW + 5:.0f}" '
            f'width="{width:.1f}" height="12" rx="3"/>'
        )
    ends = {copy.number: copy.ended_s or chronicle.ended_s for copy in report.copies}
    for done in chronicle.done:
        if not done.skipped:
            over_s = min(done.over_s or done.at_s, ends.get(done.copy, chronicle.ended_s))
            yield _mark(done, x(done.at_s), x(max(done.at_s, over_s)), chronicle)
    yield "</svg>"


def _mark(done: Done, left: float, right: float, chronicle: Chronicle) -> str:
    top = (done.copy + 2) * ROW if done.copy >= 0 else ROW
    said = f"{done.at_s - chronicle.faults_s:.2f} s: {_words(done)}"
    span = (
        f'<rect class="span" x="{left:.1f}" y="{top + 3:.0f}" width="{right - left:.1f}" '
        'height="16"/>'
        if right > left
        else ""
    )
    return (
        f'<g><title>{escape(said)}</title>{span}<circle class="fault" cx="{left:.1f}" '
        f'cy="{top + 11:.0f}" r="4"/></g>'
    )


def _words(done: Done) -> str:
    moment = f", {done.moment}" if done.moment else ""
    whom = f" (copy {done.copy})" if done.copy >= 0 else ""
    return f"{done.fault.what}{whom}{moment}"


def _histogram(times_s: Sequence[float]) -> Iterator[str]:
    counts = [0] * (len(BINS_S) + 1)
    for time_s in times_s:
        counts[sum(time_s > bin_s for bin_s in BINS_S)] += 1
    most = max([*counts, 1])
    step, floor = 80.0, 130.0
    width = step * len(counts)
    yield f'<svg viewBox="0 0 {width:.0f} 160" width="{width:.0f}" role="img">'
    yield "<title>How many recoveries took how long</title>"
    for i, count in enumerate(counts):
        tall = 110.0 * count / most
        name = f"up to {BINS_S[i]:g} s" if i < len(BINS_S) else f"over {BINS_S[-1]:g} s"
        yield (
            f'<rect class="life" x="{i * step + 8:.0f}" y="{floor - tall:.1f}" '
            f'width="{step - 16:.0f}" height="{tall:.1f}"/>'
            f'<text x="{i * step + 30:.0f}" y="{floor - tall - 4:.1f}">{count}</text>'
            f'<text class="quiet" x="{i * step + 8:.0f}" y="148">{name}</text>'
        )
    yield "</svg>"


def _table(chronicle: Chronicle) -> Iterator[str]:
    yield "<table><tr><th>at</th><th>fault</th><th>whom</th><th>for</th><th>moment</th></tr>"
    for done in chronicle.done:
        length = "" if done.over_s is None else f"{done.over_s - done.at_s:.2f} s"
        whom = done.skipped or (f"copy {done.copy}" if done.copy >= 0 else "")
        cells = (
            f"{done.at_s - chronicle.faults_s:.2f} s",
            done.fault.what,
            whom,
            length,
            done.moment,
        )
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"
