"""`pccl plan`: does a model train on these machines and links, and with which settings?

docs/howto/plan.md explains the formulas. The command measures nothing and needs no peer.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pccl import kernels
from pccl.cli.arguments import http_port, option, whole_number
from pccl.cli.status import ask
from pccl.cli.terminal import scaled
from pccl.protocol.master import Status
from pccl.protocol.tuning import DIRECT_MAX

RTT_S, STEP_S = 0.05, 1.0  # assumed, unless --rtt and --step are given
LINK_SHARE: Final = 0.9  # the payload of an all-reduce gets this share of a link's rate
FREQUENT: Final = 0.1  # average gradients in each step if that takes up to this share of it
BUSY: Final = 0.8  # an exchange in the background takes up to this share of a round
FEW_STEPS, MANY_STEPS, MOST_STEPS = 30, 100, 500  # inner steps: see docs/howto/diloco.md
DAY_S: Final = 86_400
FP32: Final = 4  # bytes
_SAMPLE: Final = 1 << 20  # elements, whose payload gives the bytes of one element
_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
WIRES: Final = ("int8", "int4", "2bit", "sparse")  # DiLoCo's, besides fp32
TWO_STAGE: Final = ("int8", "int4")  # the wires that can average in two stages
PAUSING: Final = {"fp32": MANY_STEPS, "int4": MOST_STEPS, "2bit": MOST_STEPS, "sparse": MANY_STEPS}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A model, and the peers and links to train it on."""

    params: float  # parameters of the model, or of a peer's shard of it
    peers: int  # peers that hold these parameters
    uplink: float  # bit/s of the slowest peer; the downlink is assumed to be at least as fast
    rtt_s: float = RTT_S  # between two neighbors in the ring, and between a peer and the master
    step_s: float = STEP_S  # an inner step, on one peer
    share: float = 0.05  # exchanges may take this share of the training time

    def all_reduce(self, form: str = "fp32") -> Exchange:
        """Gradients, or pseudo-gradients in fp32, around the ring."""
        others = self.peers - 1
        return self._exchange(form, 2 * others / self.peers * _bytes_of(form), 2 * others)

    def diloco(self, wire: str) -> Exchange:
        """The exchange of DiLoCo: a gather, a mean in two stages, or an fp32 all-reduce."""
        others, size = self.peers - 1, _bytes_of(wire)
        chosen = self._exchange(wire, others * size, others)
        if wire in TWO_STAGE and self.peers <= DIRECT_MAX:
            hops = 1 + others + 4  # to an owner, around, and the votes of a second collective
            two_stage = self._exchange(wire, 2 * others / self.peers * size, hops)
            if two_stage.sent <= 0.8 * chosen.sent:
                chosen = two_stage
        return min(self.all_reduce(), chosen, key=lambda exchange: exchange.sent)

    def _exchange(self, name: str, sent: float, hops: int) -> Exchange:
        """Bytes for each parameter, hops of half a round trip, and two votes of a whole one."""
        moving_s = self.params * sent * 8 / (self.uplink * LINK_SHARE)
        return Exchange(name, self.params * sent, moving_s + (hops / 2 + 2) * self.rtt_s)

    def steps(self, exchange: Exchange) -> int:
        """The inner steps between two exchanges that give these the wanted share of time."""
        return math.ceil(exchange.seconds / (self.share * self.step_s))

    @property
    def joining_s(self) -> float:
        """The time to send the parameters and the outer momentum, both fp32, to a newcomer."""
        return self.params * 2 * FP32 * 8 / (self.uplink * LINK_SHARE)


class Exchange(NamedTuple):
    name: str
    sent: float  # bytes, by each peer
    seconds: float


class Advice(NamedTuple):
    """The recommendation: gradients in each step, or DiLoCo with these settings."""

    exchange: Exchange
    inner_steps: int = 0  # 0: gradients
    mode: Literal["sync", "decoupled"] = "sync"

    def round_s(self, cluster: Cluster) -> float:
        """The time from one exchange to the next."""
        training_s = max(1, self.inner_steps) * cluster.step_s
        if self.mode == "decoupled":
            return max(training_s, self.exchange.seconds)
        return training_s + self.exchange.seconds

    @property
    def call(self) -> str:
        wire, steps = self.exchange.name, self.inner_steps
        if not steps:
            coded = f', quantization="{wire}"' if wire != "fp32" else ""
            return f"comm.all_reduce(gradients{coded})"
        settings = f'inner_steps={steps}, mode="{self.mode}", wire="{wire}"'
        if wire == "sparse":
            settings = f'**{{**sparseloco(), "inner_steps": {steps}}}'
        return f"DiLoCo(comm, model, optimizer, {settings})"


def advise(cluster: Cluster) -> Advice | None:
    """The settings that fit with the lowest loss; None if no exchange is short enough."""
    for form in ("fp32", "int8"):
        gradients = cluster.all_reduce(form)
        if gradients.seconds <= FREQUENT * cluster.step_s:
            return Advice(gradients)
    for wire, most in PAUSING.items():
        exchange = cluster.diloco(wire)
        if (steps := cluster.steps(exchange)) <= most:
            return Advice(exchange, max(FEW_STEPS, steps))
    for wire in ("int4", "2bit"):  # the exchange runs during the next round
        exchange = cluster.diloco(wire)
        steps = math.ceil(exchange.seconds / (BUSY * cluster.step_s))
        if steps <= MOST_STEPS:
            return Advice(exchange, max(MANY_STEPS, steps), "decoupled")
    smallest = cluster.diloco("sparse")
    if smallest.seconds <= MOST_STEPS * cluster.step_s:  # it takes at most half of the time
        return Advice(smallest, min(MOST_STEPS, cluster.steps(smallest)))
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "parameters of the model, such as 7e9 or 7B; of one shard, if machines shard it"
    option(parser, "--params NUMBER", text, kind=quantity, required=True)
    text = "peers that hold them (with --links: all of that run)"
    option(parser, "--peers N", text, kind=whole_number(2))
    text = "bit/s of the slowest peer, such as 200M (with --links: of the slowest link)"
    option(parser, "--uplink RATE", text, kind=quantity)
    option(parser, "--rtt MS", f"round trip (default: {1e3 * RTT_S:g})", kind=quantity)
    option(parser, "--step S", f"an inner step (default: {STEP_S:g})", kind=quantity)
    option(parser, "--share PERCENT", "share of the training time for exchanges", 5, quantity)
    text = "take peers and uplink from the run whose master has this --http address"
    option(parser, "--links [HOST:]PORT", text, kind=http_port)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; the exit code is 1 if nothing fits."""
    peers, uplink = args.peers, args.uplink
    if args.links:
        there, slowest = measured(ask(*args.links).status)
        if not slowest and uplink is None:
            raise OSError("no link of that run is measured: call optimize_topology() there")
        peers, uplink = peers or there, uplink or slowest
    if not peers or peers < 2 or uplink is None:
        raise OSError("give --peers of at least 2 and --uplink, or --links of a run that has both")
    rtt_s = RTT_S if args.rtt is None else args.rtt / 1e3
    step_s = STEP_S if args.step is None else args.step
    cluster = Cluster(args.params, peers, uplink, rtt_s, step_s, args.share / 100)
    advice = advise(cluster)
    options = {"the round trip (--rtt)": args.rtt, "the time of an inner step (--step)": args.step}
    assumed = [name for name, given in options.items() if given is None]
    for line in lines(cluster, advice, assumed):
        print(line)
    return int(advice is None)


def measured(status: Status) -> tuple[int, float]:
    """The peers of a run's largest ring, and the bit/s of its slowest link; 0: not measured."""
    rings = [ring for group in status.groups for ring in group.rings]
    rates = [8.0 * rate for ring in rings for rate in ring.rates if rate]
    return max((len(ring.order) for ring in rings), default=0), min(rates, default=0.0)


def lines(cluster: Cluster, advice: Advice | None, assumed: Sequence[str] = ()) -> Iterator[str]:
    """The table of all exchanges, and the advice. `assumed` names the assumed values."""
    yield (
        f"{scaled(cluster.params)} parameters, {cluster.peers} peers, "
        f"{scaled(cluster.uplink)}bit/s, a round trip of {1e3 * cluster.rtt_s:g} ms, "
        f"{cluster.step_s:g} s per inner step"
    )
    if assumed:
        yield f"assumed, not given: {' and '.join(assumed)}"
    yield ""
    yield f"{'one exchange':<22}{'sends':>10}{'takes':>12}{'H':>9}"
    yield _row("gradients, fp32", cluster.all_reduce())
    yield _row("gradients, int8", cluster.all_reduce("int8"))
    for wire in ("fp32", *WIRES):
        one = cluster.diloco(wire)
        yield _row(f"DiLoCo, {wire}", one, f"{cluster.steps(one):,}")
    yield ""
    share = f"{100 * cluster.share:g} %"
    yield f"H: inner steps between two exchanges, which then take {share} of the training time"
    yield f"a newcomer receives {scaled(cluster.params * 2 * FP32)}B in {_time(cluster.joining_s)}"
    yield ""
    if advice is None:
        longest = MOST_STEPS * cluster.step_s
        yield (
            f"does not fit: the smallest exchange takes longer than {MOST_STEPS} steps "
            f"({_time(longest)}). Take a faster link or fewer parameters for each peer."
        )
        return
    round_s = advice.round_s(cluster)
    share = f"{advice.exchange.seconds / round_s:.0%}"
    hidden = " beside training" if advice.mode == "decoupled" else ""
    yield f"recommended: {advice.call}"
    yield (
        f"  an exchange every {_time(round_s)}, which takes {share} of that{hidden}; "
        f"{scaled(advice.exchange.sent * DAY_S / round_s)}B a day from each peer"
    )


def _row(name: str, one: Exchange, steps: str = "-") -> str:
    return f"{name:<22}{scaled(one.sent) + 'B':>10}{_time(one.seconds):>12}{steps:>9}"


def quantity(text: str) -> float:
    """A positive number: 7e9, 7B, 200M, 1.5G."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([kmgbt]?)(?:bit/s|bps)?", text.strip().lower())
    try:
        number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number, such as 200M or 7e9")
    return number


def _bytes_of(form: str) -> float:
    return FP32 if form == "fp32" else kernels.quantized_size(form, _SAMPLE) / _SAMPLE  # type: ignore[arg-type]


def _time(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
