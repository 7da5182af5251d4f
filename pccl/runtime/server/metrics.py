"""The status of a run in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from pccl.protocol.master import Status
from pccl.protocol.master.status import Phase
from pccl.protocol.master.tally import BOUNDS_S, Histogram
from pccl.protocol.rounds import Kind
from pccl.protocol.topology import hops

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(status: Status) -> str:
    """All metrics of a run. Labels have few values: groups, phases, causes, outcomes."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: Status) -> Iterator[str]:
    accepted = sum(group.size for group in status.groups)
    yield from _metric(
        "build_info", "gauge", "The version of pccl.", {status.version: 1}, label="version"
    )
    yield from _metric("world_size", "gauge", "Accepted peers.", {"": accepted})
    pending = len(status.peers) - accepted
    yield from _metric("peers_pending", "gauge", "Peers that wait for admission.", {"": pending})
    text = "Whether a restarted master waits for the peers of before."
    yield from _metric("recovering", "gauge", text, {"": int(status.recovering)})
    yield from _groups(status)
    yield from _bandwidth(status)
    yield from _links(status)
    yield from _waits(status)
    yield from _weights(status)
    yield from _counts(status)
    yield from _bytes(status)
    yield from _durations(status)


def _groups(status: Status) -> Iterator[str]:
    columns = (
        ("peer_group_size", "Accepted peers of a group.", "size"),
        ("epoch", "The epoch of a group's rings, which grows when they are renewed.", "epoch"),
        ("collectives_running", "Collectives that have started and not ended.", "running"),
        ("shared_state_revision", "The revision of a group's shared state.", "revision"),
        ("shared_state_holders", "Peers that took part in its last synchronisation.", "holders"),
        ("goodput_ratio", "The share of the time that was not lost to aborts.", "goodput"),
    )
    for name, text, field in columns:
        fields = {str(group.group): getattr(group, field) for group in status.groups}
        known = {number: value for number, value in fields.items() if value is not None}
        yield from _metric(name, "gauge", text, known, label="group")


def _bandwidth(status: Status) -> Iterator[str]:
    text = "What each link of the ring carried in the last collective, as nccl-tests counts it."
    rates = {
        str(group.group): group.bus_rate / 1e9
        for group in status.groups
        if group.bus_rate is not None
    }
    yield from _metric("bus_bandwidth_gbs", "gauge", text, rates, label="group")


def _links(status: Status) -> Iterator[str]:
    name = "pccl_link_bandwidth_bytes_per_second"
    yield f"# HELP {name} A link of a ring, as the last optimize_topology has measured it."
    yield f"# TYPE {name} gauge"
    rings = [ring for group in status.groups for ring in group.rings]
    rates = {
        hop: rate
        for ring in rings
        for hop, rate in zip(hops(ring.order), ring.rates, strict=True)
        if rate is not None
    }
    for (src, dst), rate in rates.items():
        yield f'{name}{{src="{src}",dst="{dst}"}} {rate}'


def _waits(status: Status) -> Iterator[str]:
    text = "Calls that some peers stand in and that wait for others."
    number = len(status.waits) + status.waits_left_out
    yield from _metric("waits", "gauge", text, {"": number})
    longest = dict.fromkeys(map(str, Phase), 0.0)
    for wait in status.waits:
        longest[wait.phase] = max(longest[wait.phase], wait.waited_s)
    text = "For how long the longest of these waits has lasted."
    yield from _metric("longest_wait_seconds", "gauge", text, longest, label="phase")


def _weights(status: Status) -> Iterator[str]:
    weights = status.weights
    newest = 0 if weights is None else weights.version
    text = "The newest version of the weights that was published."
    yield from _metric("weights_version", "gauge", text, {"": newest})
    has = dict.fromkeys(("newest", "older", "none"), 0)
    for version, count in () if weights is None else weights.followers.items():
        has["none" if not version else "older" if version < newest else "newest"] += count
    text = "Processes that have published no weights, by the version that they have."
    yield from _metric("weights_followers", "gauge", text, has, label="has")


def _counts(status: Status) -> Iterator[str]:
    counts = status.counts
    text = "Peers that were accepted."
    yield from _metric("peers_joined_total", "counter", text, {"": counts.joined})
    text = "Accepted peers that have gone."
    lost = {str(how): number for how, number in counts.lost.items()}
    yield from _metric("peers_lost_total", "counter", text, lost, label="cause")
    text = "Collectives that had started, and have ended."
    ended = {"committed": counts.committed, "aborted": counts.aborted}
    yield from _metric("collectives_total", "counter", text, ended, label="outcome")


def _bytes(status: Status) -> Iterator[str]:
    counts = status.counts
    text = "Collectives that were aborted, for their callers to make again."
    retries = {str(reason): number for reason, number in counts.retries.items()}
    yield from _metric("retries_total", "counter", text, retries, label="reason")
    text = "Bytes that each member gave to committed collectives, before quantization."
    yield from _metric("collective_bytes_total", "counter", text, counts.carried, label="wire")
    text = "Payload of shared state that peers lacked and received."
    yield from _metric("state_sync_bytes_total", "counter", text, {"": counts.synced_bytes})
    text = "Of these, bytes of peers that took part in the synchronisation before."
    yield from _metric("state_resync_bytes_total", "counter", text, {"": counts.resynced_bytes})
    text = "Peers whose content differed from that elected at the same revision."
    yield from _metric("parity_failures_total", "counter", text, {"": counts.parity_failures})


def _durations(status: Status) -> Iterator[str]:
    counts = status.counts
    text = "How long the first peer of a round waited for the last one to enter it."
    votes = {
        "collective" if kind is Kind.START else kind.value: waited
        for kind, waited in counts.votes.items()
    }
    yield from _histogram("vote_wait_seconds", text, votes, label="phase")
    text = "How long committed collectives took, once all members had entered them."
    taken = {str(kind): durations for kind, durations in counts.collectives.items()}
    yield from _histogram("collective_seconds", text, taken, label="collective")
    text = "How long synchronisations took, once all members had entered them."
    yield from _histogram("state_sync_seconds", text, {"": counts.syncs})
    text = "From the interruption of a collective to the start of the next one of its group."
    yield from _histogram("recovery_seconds", text, {"": counts.recoveries})


def _histogram(
    name: str, text: str, values: Mapping[str, Histogram], label: str = ""
) -> Iterator[str]:
    """One histogram, for each value of its label, where it has one."""
    name = f"pccl_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for of, durations in values.items():
        own = f'{label}="{of}"' if label else ""
        cumulated = list(accumulate(durations.counts))
        for bound, count in zip((*BOUNDS_S, "+Inf"), cumulated, strict=True):
            labels = f'{own},le="{bound}"' if own else f'le="{bound}"'
            yield f"{name}_bucket{{{labels}}} {count}"
        shown = f"{{{own}}}" if own else ""
        yield f"{name}_sum{shown} {durations.total_s}"
        yield f"{name}_count{shown} {cumulated[-1]}"


def _metric(
    name: str, kind: str, text: str, values: Mapping[str, float], label: str = ""
) -> Iterator[str]:
    """One metric: its values, each for a value of its label, where it has one."""
    name = f"pccl_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for of, value in values.items():
        yield f'{name}{{{label}="{of}"}} {value}' if label else f"{name} {value}"
