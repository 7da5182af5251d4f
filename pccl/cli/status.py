"""`pccl status` and `pccl top`: the state of a run, from the HTTP port of its master.

First come the calls that wait, and the peers that they wait for; then the groups, the peers with
their calls, and the published weights with their followers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

import msgspec

from pccl.cli.arguments import http_port, option, whole_number
from pccl.cli.terminal import Screen, Styled, printable, shown, table
from pccl.protocol.master import Status
from pccl.protocol.master import status as values
from pccl.support import address_text, duration_text

PATIENCE_S = 10.0
EVENTS_MAX = 5
BYTES_MAX = 64 << 20  # most bytes of an answer; a run of 1,000 peers takes 0.5 MB
OK = 200
PEER = "peer,name,address,group,state,age,last heard,heartbeat,late,late in all,in call".split(",")
CLIENT = "client,name,address,has,published,fetches,from,gives to,last fetched at".split(",")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the address of the master's --http"
    option(parser, "address [HOST:]PORT", text, kind=http_port)
    if parser.prog.endswith(" top"):
        text = "time between two refreshes"
        option(parser, "--interval SECONDS", text, 1, whole_number(1, 3600))
    else:
        option(parser, "--json", "print the master's answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the status; the exit code is 1 if no answer comes."""
    if args.command == "top":
        return top(args)
    answer = ask(*args.address)
    print(*[answer.body.decode()] if args.json else map(shown, lines(answer.status)), sep="\n")
    return 0


def top(args: argparse.Namespace) -> int:
    """Shows the run until Ctrl-C; the exit code is 1 if the first answer does not come."""
    if not sys.stdout.isatty():
        raise OSError("it needs a terminal; pccl status prints the same once")
    known, lost = [*lines(ask(*args.address).status)], ""
    try:
        with Screen() as screen:
            while True:
                screen.show([lost, *known] if lost else known)
                time.sleep(args.interval)
                try:
                    known, lost = [*lines(ask(*args.address).status)], ""
                except OSError as error:  # the last answer stays on the screen
                    since = lost.partition(": ")[0] or f"since {time.strftime('%H:%M:%S')}"
                    lost = f"{since}: {error}"
    except KeyboardInterrupt:
        return 0


class Answer(NamedTuple):
    body: bytes
    status: Status


def ask(host: str, port: int) -> Answer:
    """Asks a master for its status. Raises OSError that says why no answer comes."""
    where = address_text(host, port)
    try:
        with closing(HTTPConnection(host, port, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/status.json")
            response = connection.getresponse()
            body = response.read(BYTES_MAX)
        if response.status == OK:
            return Answer(body, msgspec.json.decode(body, type=Status))
        said = body[:500].decode(errors="replace").strip()
        why = f"{where} answers {response.status} {response.reason}: {said}"
    except OSError as error:
        text = "it takes too long" if isinstance(error, TimeoutError) else error.strerror or error
        why = f"no status from {where}: {text}. Has the master been started with --http there?"
    except HTTPException as error:
        why = f"what answers at {where} does not speak HTTP: {type(error).__name__} {error}"
        why += ". Is that the port of the master's --http?"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"what answers at {where} is not a master of this version of pccl: {error}"
    raise OSError(printable(why))


def lines(status: Status) -> Iterator[str]:
    """A status as text, with only printable characters."""
    return map(printable, _lines(status))


def _lines(status: Status) -> Iterator[str]:
    counts = status.counts
    pending = sum(not peer.accepted for peer in status.peers)
    yield (
        f"pccl {status.version}; peers: {len(status.peers) - pending} accepted, {pending} pending, "
        f"{counts.joined} joined, {sum(counts.lost.values())} lost; "
        f"collectives: {counts.committed} committed, {counts.aborted} aborted"
    )
    if status.recovering:
        names = ", ".join(f"peer {number}" for number in status.awaited) or "the peers of before"
        yield Styled(f"the master was restarted, and waits for {names}", "yellow")
    if status.waits:
        yield ""
    for wait in status.waits:
        group = "" if wait.group is None else f" of group {wait.group}"
        head = f"{_seconds(wait.waited_s)}: {wait.entered} in {wait.call}{group} ({wait.phase})"
        yield Styled(f"{head}: {wait.why}", "yellow")
    if status.waits_left_out:
        yield f"and {status.waits_left_out} more calls wait"
    if status.groups:
        heads = ("group", "peers", "epoch", "revision", "held by", "running", "goodput", "rings")
        yield ""
        yield from table(heads, map(_group, status.groups))
    if status.peers:
        yield ""
        yield from table(PEER, map(_peer, status.peers))
    if status.weights is not None:
        yield ""
        yield from _weights(status.weights)
    if status.events:
        yield ""
    for event in status.events[-EVENTS_MAX:]:
        yield f"{_seconds(event.ago_s)} ago: {event.text}"


def _weights(weights: values.WeightsStatus) -> Iterator[str]:
    """The number of followers by version, and the source of each client's fetch."""
    have = (
        f"{count} with {f'version {version}' if version else 'none'}"
        for version, count in sorted(weights.followers.items(), reverse=True)
    )
    followers = ", ".join(have) or "nobody follows"
    yield f"weights: {f'version {weights.version}' if weights.version else 'none yet'}; {followers}"
    if weights.clients:
        yield from table(CLIENT, map(_client, weights.clients))
    if weights.clients_left_out:
        yield f"and {weights.clients_left_out} more"


def _client(one: values.ClientStatus) -> Sequence[str]:
    source = "" if one.seeks is None else "nobody yet" if one.source is None else str(one.source)
    return (
        str(one.client),
        one.name,
        address_text(one.host, one.port),
        str(one.version or ""),
        str(one.published or ""),
        str(one.seeks or ""),
        source + (", slowly" if one.slow else ""),
        ", ".join(map(str, one.receivers)),
        "" if one.rate is None else f"{one.rate * 8e-6:.0f} Mbit/s",
    )


def _group(group: values.GroupStatus) -> Sequence[str]:
    revision = "" if group.revision is None else group.revision
    goodput = "" if group.goodput is None else f"{100 * group.goodput:.1f} %"
    state = group.group, group.size, group.epoch, revision, group.holders, group.running
    return *map(str, state), goodput, "; ".join(map(_ring, group.rings))


def _ring(ring: values.RingStatus) -> str:
    """The peers in order, back to the first one, with the measured rates of the links."""
    links = ("->" if rate is None else f"-({rate * 8e-6:.0f} Mbit/s)->" for rate in ring.rates)
    steps = (f"{number} {link}" for number, link in zip(ring.order, links, strict=True))
    return f"{' '.join(steps)} {ring.order[0]}, weight {ring.weight}"


def _peer(peer: values.PeerStatus) -> Sequence[str]:
    calls = [
        f"{call.call}, {call.phase}, {_seconds(call.waited_s)}"
        + ("" if call.done is None else f", {100 * call.done:.0f} %")
        for call in peer.calls
    ]
    return (
        str(peer.peer),
        peer.name,
        address_text(peer.host, peer.port),
        str(peer.group),
        "accepted" if peer.accepted else "pending",
        _seconds(peer.here_s),
        f"{_seconds(peer.silent_s)} ago",
        "" if peer.heartbeat_s is None else f"{_seconds(peer.heartbeat_s)} ago",
        f"{_seconds(peer.awaited_s)} by now" if peer.awaited_s else duration_text(peer.late_s),
        duration_text(peer.late_total_s),
        "; ".join(calls),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
