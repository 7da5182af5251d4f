"""`pccl doctor`: checks whether this machine is ready for a run, and what to change if not.

With the address of a master, it also checks whether the master can be reached, whether the master
(and so the other peers) can reach this machine, and whether versions, arithmetic and clocks agree.
It does not join the run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pccl
from pccl.cli import plan
from pccl.cli.arguments import http_port, master, option
from pccl.cli.status import ask
from pccl.cli.terminal import painted
from pccl.ext import tables
from pccl.insight import NEGLIGIBLE
from pccl.kernels import arithmetic_digest
from pccl.protocol.master import Status
from pccl.protocol.master.status import GroupStatus
from pccl.protocol.messages import PROTOCOL_VERSION
from pccl.protocol.rounds import Kind
from pccl.protocol.topology import hops
from pccl.runtime.client.connect import Examination, examine
from pccl.runtime.config import Config
from pccl.runtime.resources import descriptor_limit
from pccl.support import duration_text, parse_address

PACKAGES = ("pyzmq", "numpy", "cffi", "msgspec", "xxhash", "torch")
CLOCK_MAX_S = 1.0  # with a larger difference, logs of several machines are hard to compare
FILES_MIN = 1024
SEND_BUFFER_MIN = 4 << 20  # enough for 1 Gbit/s over 100 ms with the usual lanes
RECEIVE_BUFFER_MIN = 6 << 20
SYSCTLS = (  # title, name, recommended value, reason
    ("window scaling", "tcp_window_scaling", "1", "without it, long links stay idle"),
    ("slow after idle", "tcp_slow_start_after_idle", "0", "otherwise each call begins slowly"),
    ("congestion", "tcp_congestion_control", "bbr", "it is faster on links that lose packets"),
)


class Finding(NamedTuple):
    """One line of output: a fact, whether it is good, and the remedy if not."""

    title: str
    fact: str
    good: bool | None = None  # None: only a fact
    cure: str = ""
    needed: bool = False  # whether pccl needs this to work

    def show(self) -> None:
        verdict = painted("ok   ", "green") if self.good else "     "
        if self.good is False:
            verdict = painted("BAD  ", "red") if self.needed else painted("hint ", "yellow")
        print(f"{verdict}{self.title:<16}{self.fact}", flush=True)
        if self.good is False:
            print(f"{'':21}-> {self.cure}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "also check the connection to this master"
    option(parser, "master HOST[:PORT]", text, kind=master, nargs="?")
    text = "instead, explain what limits the collectives of the run with this --http address"
    option(parser, "--explain [HOST:]PORT", text, kind=http_port)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each finding; the exit code is 1 if one is bad."""
    if args.explain is not None:
        for line in explanation(ask(*args.explain).status):
            print(line)
        return 0
    security = pccl.Security.of(None)
    os.environ.pop("PCCL_CURVE_DIR", None)  # the master of _all_reduce has no keys
    of_master = () if args.master is None else _master(*parse_address(args.master), security)
    bad = False
    for finding in chain(_software(), _system(), _all_reduce(), of_master):
        finding.show()
        bad |= finding.good is False and finding.needed
    return int(bad)


# ---- this machine ----


def _software() -> Iterator[Finding]:
    yield Finding("pccl", f"{pccl.__version__}, protocol {PROTOCOL_VERSION}")
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("cores", str(os.cpu_count()))
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        yield Finding(package, found)
    backend = tables.load()
    reason = f" ({backend.reason})" if backend.reason else ""
    yield Finding("engine backend", backend.name + reason)
    yield Finding("arithmetic", f"{arithmetic_digest().hex()} (must be equal on all peers)")


def _system() -> Iterator[Finding]:
    if sys.platform != "win32":
        files = descriptor_limit()
        cure = f"ulimit -n {FILES_MIN}: each connection takes one"
        yield Finding("open files", str(files), files >= FILES_MIN, cure)
    ipv4 = Path("/proc/sys/net/ipv4")
    if not ipv4.exists():
        return
    for name, least in (("tcp_wmem", SEND_BUFFER_MIN), ("tcp_rmem", RECEIVE_BUFFER_MIN)):
        low, default, most = (ipv4 / name).read_text().split()
        cure = f'sysctl -w net.ipv4.{name}="{low} {default} {least}": less leaves long links idle'
        yield Finding(name, most, int(most) >= least, cure)
    for title, name, good, why in SYSCTLS:
        file = ipv4 / name
        if file.exists():  # some network namespaces lack some of them
            found = file.read_text().strip()
            yield Finding(title, found, found == good, f"sysctl -w net.ipv4.{name}={good}: {why}")


def _all_reduce() -> Iterator[Finding]:
    """An all-reduce with a known result, between two communicators of this process."""
    values = [array("f", [i + 1.0] * 100_000) for i in range(2)]
    with pccl.MasterNode("127.0.0.1:0") as master, ThreadPoolExecutor() as pool:
        list(pool.map(partial(_sum, master.address), values))
    good = all(value == 3.0 for each in values for value in each)
    fact = "works between two peers on this machine" if good else "gave wrong values"
    cure = "this build of pccl, or this machine, computes wrong results: reinstall pccl"
    yield Finding("all_reduce", fact, good, cure, needed=True)


def _sum(address: str, values: array[float]) -> None:
    """An all-reduce without numpy and torch, which may be missing."""
    begin, count = values.buffer_info()
    operand = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
    work = pccl.ReduceDescriptor(count, pccl.ReduceOp.SUM, 0, operand, None)
    with pccl.Communicator(address, advertise="", port_range="") as comm:
        comm.wait_for_peers(2, timeout=60)
        comm.all_reduce_multiple_with_retry([pccl.ReduceOpDescriptor(begin, begin, work)])


# ---- a master ----


def _master(host: str, port: int, security: pccl.Security | None) -> Iterator[Finding]:
    try:
        found = examine(host, port, Config.from_env(), security)
    except pccl.PCCLError as error:
        yield Finding("master", error.message, False, error.remedy or _KEYS, needed=True)
        return
    except OSError as error:
        why, cure = error.strerror or str(error), "choose a wider PCCL_PORT_RANGE"
        yield Finding("own port", why, False, cure, needed=True)
        return
    report = found.report
    fact = f"answers in {found.round_trip_s * 1000:.1f} ms; {report.peers} peers are in its run"
    yield Finding("master", fact, True)
    spoken = report.protocol == PROTOCOL_VERSION
    same = spoken and report.version == pccl.__version__
    fact = f"pccl {report.version}, protocol {report.protocol}"
    yield Finding("its version", fact, same, "install the same version of pccl", needed=not spoken)
    yield _reached(found)
    if report.arithmetic:
        same = report.arithmetic == arithmetic_digest()
        fact = "gives the same bits here as on the run's peers" if same else "gives other bits here"
        cure = "install the peers' version of pccl, because results must be bit-identical"
        yield Finding("kernels", fact, same, cure, needed=True)
    fact, near = f"{found.clock_s:+.3f} s from the master's", abs(found.clock_s) < CLOCK_MAX_S
    yield Finding("clock", fact, near, "synchronize it by NTP; otherwise logs are hard to compare")


_KEYS = "compare PCCL_CURVE_DIR here with the master's --curve-dir; `pccl keys` makes both"


def _reached(found: Examination) -> Finding:
    if not found.report.dialled:
        why = "it does not resolve names, limits its dials, or has --no-dial-back"
        fact = f"the master has not tried {found.address}: {why}"
        cure = "set PCCL_ADVERTISE to an address, or ask again in a minute"
        return Finding("own port", fact, False, cure)
    why = found.report.unreached
    fact = f"the master {'cannot reach' if why else 'reaches'} {found.address}"
    cure = (
        "let the port through the firewall; behind NAT, forward ports to this machine and set "
        "PCCL_PORT_RANGE to them and PCCL_ADVERTISE to the address that others see"
    )
    return Finding("own port", f"{fact}: {why}" if why else fact, not why, cure, needed=True)


# ---- --explain: what limits the collectives of a run, as its master sees it ----

# `Communicator.explain()` explains one peer in more detail.

NEAR = 0.7  # a link that carries at least this share of its measured rate is the limit


def explanation(status: Status) -> Iterator[str]:
    """Lines of text: the time of collectives by cause, the slowest link, failures."""
    counts = status.counts
    count = sum(sum(taken.counts) for taken in counts.collectives.values())
    if not count:
        yield "no collective has committed yet"
        return
    votes = counts.votes[Kind.START]
    entering_s = votes.total_s / max(1, sum(votes.counts))
    running_s = sum(taken.total_s for taken in counts.collectives.values()) / count
    given = sum(counts.carried.values()) / count
    yield (
        f"{count} collectives have committed, of {given / 1e6:.4g} MB on average: "
        f"{duration_text(entering_s + running_s)} from the first peer's call to the last one's end"
    )
    all_s = entering_s + running_s
    yield (
        f"{_share(entering_s, all_s)}: waiting for peers that enter later. If all entered at once: "
        f"{duration_text(running_s)}"
    )
    data = "from then until all have finished: the data, and two votes"
    yield f"{_share(running_s, all_s)}: {data}"
    for group in status.groups:
        yield from _links(group, running_s)
    yield from _latest(status)
    yield from _failures(status)
    peers, uplink = plan.measured(status)
    if uplink:
        fits = f"pccl plan --params NUMBER --peers {peers} --uplink {uplink / 1e6:.4g}M"
        yield f"which settings fit these links: {fits}"


def _latest(status: Status) -> Iterator[str]:
    """The peer that others wait for now, or else the one that they recently waited for most."""
    late = max(status.peers, key=lambda peer: (peer.awaited_s, peer.late_s), default=None)
    if late is None or len(status.peers) < 2:
        return
    name = f"peer {late.peer} ({late.name})" if late.name else f"peer {late.peer}"
    if late.awaited_s:
        yield f"others have been waiting for {name} for {duration_text(late.awaited_s)} by now"
    elif late.late_s:
        yield (
            f"the latest is {name}: others recently waited {duration_text(late.late_s)} for it in "
            f"each call, and {duration_text(late.late_total_s)} in all"
        )


def _share(part_s: float, all_s: float) -> str:
    return f"{100 * part_s / all_s if all_s else 0.0:3.0f} %, {duration_text(part_s)}"


def _links(group: GroupStatus, running_s: float) -> Iterator[str]:
    rates = {
        hop: rate
        for ring in group.rings
        for hop, rate in zip(hops(ring.order), ring.rates, strict=True)
        if rate
    }
    name = f"group {group.group}"
    if not rates:
        what = f"{name}: no link is measured"
        yield f"{what}: call optimize_topology(), which also finds better rings"
        return
    (src, dst), slowest = min(rates.items(), key=lambda each: each[1])
    more = sorted(rates.values())[1:]
    what = f"{name}: the slowest link, from peer {src} to peer {dst}, carries {_rate(slowest)}"
    if group.bus_rate is None:
        yield what
    elif group.bus_rate < NEAR * slowest:
        yield (
            f"{what}; each link carried {_rate(group.bus_rate)} in the last collective: links are "
            "not what limits it, but votes, round trips or processors: ask a peer's explain()"
        )
    elif more:
        better_s = running_s * max(group.bus_rate / more[0], slowest / more[0])
        yield (
            f"{what}; each link carried {_rate(group.bus_rate)} in the last collective: that link "
            f"limits it. Without it the next slowest would, with {_rate(more[0])}: "
            f"{duration_text(min(better_s, running_s))} in place of {duration_text(running_s)}"
        )
    else:
        yield f"{what}, and each carried {_rate(group.bus_rate)}: it limits the collectives"


def _failures(status: Status) -> Iterator[str]:
    counts = status.counts
    if counts.aborted:
        reasons = {str(why): number for why, number in counts.retries.items() if number}
        text = ", ".join(f"{number} by {why}" for why, number in reasons.items())
        yield f"{counts.aborted} collectives were aborted: {text}"
    for group in status.groups:
        if group.goodput is not None and group.goodput < 1 - NEGLIGIBLE:
            lost = f"{100 * (1 - group.goodput):.0f} % of the time was lost"
            yield f"group {group.group}: {lost} to aborts, recoveries and late peers"


def _rate(rate: float) -> str:
    return f"{rate * 8e-6:.4g} Mbit/s"
