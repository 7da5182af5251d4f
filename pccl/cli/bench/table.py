"""The table and the JSON of `pccl bench` for collectives, in the formats of nccl-tests.

The columns of nccl-tests come first and unchanged, so that its parsers work; our own columns follow
to the right. GB are 10**9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pccl.cli.bench.trials import IN_PLACE, OTHERS, OUT_OF_PLACE, Measured

_WAYS = (OUT_OF_PLACE, IN_PLACE)
_ROOTS = {"broadcast": 0}  # -1 for the others
FACTORS: dict[str, Callable[[int], float]] = {  # busbw / algbw for n peers
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Iterations of one way to reduce, each the mean over the peers.

    Attributes:
        median_us: microseconds.
        min_us: microseconds.
        wrong: wrong elements over all peers; None when not checked.
        wire: bytes that a peer sends in a call, at most; None when not known.
    """

    median_us: float
    min_us: float
    wrong: int | None
    wire: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One size: what all peers measured.

    Attributes:
        nbytes: of the larger buffer.
        count: elements of the smaller one; of an all-to-all, those for one peer.
    """

    what: str
    nbytes: int
    count: int
    dtype: str
    op: str
    peers: int
    timings: dict[str, Timing]

    @classmethod
    def of(
        cls,
        what: str,
        count: int,
        itemsize: int,
        dtype: str,
        op: str,
        all_measured: Sequence[Measured],
    ) -> Row:
        """Combines what the peers measured of `count` elements."""
        timings = {}
        for name in all_measured[0].times_s:
            each = zip(*(measured.times_s[name] for measured in all_measured), strict=True)
            means_us = [fmean(times) * 1e6 for times in each]
            wrong = [measured.wrong[name] for measured in all_measured if name in measured.wrong]
            sent = [measured.sent[name] for measured in all_measured if name in measured.sent]
            timings[name] = Timing(
                median(means_us),
                min(means_us),
                sum(wrong) if wrong else None,
                max(sent) if sent else None,
            )
        peers = len(all_measured)
        nbytes = count * itemsize * blocks(what, peers)
        return cls(what, nbytes, count, dtype, op, peers, timings)

    def algbw(self, way: str) -> float:
        """Bytes of the buffer over the median time, in GB/s."""
        return self.nbytes / self.timings[way].median_us / 1e3

    def busbw(self, way: str) -> float:
        """What an ideal ring would have carried on each link meanwhile, in GB/s."""
        return self.algbw(way) * FACTORS[self.what](self.peers)

    @property
    def ways(self) -> list[str]:
        """Those of ours that this collective has."""
        return [way for way in _WAYS if way in self.timings]

    @property
    def other(self) -> str | None:
        """What was measured beside ours."""
        return next((way for way in OTHERS if way in self.timings), None)

    @property
    def root(self) -> int:
        """As nccl-tests has it: -1 where there is none."""
        return _ROOTS.get(self.what, -1)

    def text(self) -> str:
        """A line of the table."""
        cells = [
            f"{self.nbytes:12d}  {self.count:12d}  {self.dtype:>8}  {self.op:>6}  {self.root:6d}"
        ]
        for way in _WAYS:
            if way not in self.timings:
                cells.append(f"{'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>5}")
                continue
            timing = self.timings[way]
            wrong = "N/A" if timing.wrong is None else str(timing.wrong)
            rates = f"{_number(self.algbw(way), 6)}  {_number(self.busbw(way), 6)}"
            cells.append(f"{_number(timing.median_us, 7)}  {rates}  {wrong:>5}")
        for way in _WAYS:
            known = way in self.timings
            cells.append(_number(self.timings[way].min_us, 7) if known else f"{'N/A':>7}")
        if self.other:
            other = self.timings[self.other]
            cells += [_number(other.median_us, 7), _number(other.min_us, 7)]
            for way in _WAYS:
                known = way in self.timings
                ratio = other.median_us / self.timings[way].median_us if known else None
                cells.append(f"{ratio:6.2f}" if ratio is not None else f"{'N/A':>6}")
        cells.append(f"{self.timings[self.ways[0]].wire:12d}")
        return "  ".join(cells)

    def json(self) -> dict[str, Any]:
        """The row as nccl-tests' JSON has it; times in microseconds, rates in GB/s."""
        found: dict[str, Any] = {
            "size": self.nbytes,
            "count": self.count,
            "type": self.dtype,
            "redop": self.op,
            "root": self.root,
        }
        for way, timing in self.timings.items():
            found[way] = {
                "time": timing.median_us,
                "time_min": timing.min_us,
                "alg_bw": self.algbw(way),
                "bus_bw": self.busbw(way),
                "nwrong": timing.wrong,
                "wire": timing.wire,
            }
        return found


def blocks(what: str, peers: int) -> int:
    """How many times as large the larger buffer of a collective is."""
    return peers if what in ("all_gather", "reduce_scatter", "all_to_all") else 1


def head(other: str | None) -> str:
    """The lines above the rows."""
    groups = f"#{'':56}{'out-of-place':^32}{'in-place':^32}{'minimum':^18}"
    names = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    units = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
    names += f"  {'time':>7}  {'algbw':>6}  {'busbw':>6} {'#wrong':>6}" * len(_WAYS)
    units += f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>5}" * len(_WAYS)
    names += f"  {'out':>7}  {'in':>7}"
    units += f"  {'(us)':>7}" * len(_WAYS)
    if other:
        groups += f"{other:^18}{'times as fast':^16}"
        names += f"  {'time':>7}  {'min':>7}  {'out':>6}  {'in':>6}"
        units += f"  {'(us)':>7}  {'(us)':>7}  {'':>6}  {'':>6}"
    names += f"  {'wire':>12}"
    units += f"  {'(B)':>12}"
    return "\n".join(line.rstrip() for line in ("#", groups, names, units))


def foot(rows: Sequence[Row]) -> str:
    """The lines below the rows."""
    wrong = out_of_bounds(rows)
    return (
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}\n"
        f"# Avg bus bandwidth    : {average_busbw(rows):g}\n#"
    )


def out_of_bounds(rows: Sequence[Row]) -> int:
    """Wrong elements in all rows."""
    return sum(timing.wrong or 0 for row in rows for timing in row.timings.values())


def average_busbw(rows: Sequence[Row]) -> float:
    """The mean over rows and ways, in GB/s."""
    return fmean(row.busbw(way) for row in rows for way in row.ways)


def _number(value: float, width: int) -> str:
    """Two decimals, or fewer where they would not fit."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            break
    return text.rjust(width)
