"""A master's HTTP: the page, the metrics, and the server.

The master's service thread never waits for an HTTP client. The HTTP thread asks it for a snapshot,
one at a time, and answers all requests of the next moment with that snapshot. The server has no
files, takes no arguments, and keeps no state about clients. It limits the number of connections
(the oldest one is closed), the size of a request, and the time from the connection to the end of
the answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from pccl.protocol.master import Status
from pccl.protocol.master.status import Phase
from pccl.protocol.master.tally import BOUNDS_S, Histogram
from pccl.protocol.rounds import Kind
from pccl.protocol.topology import hops
from pccl.runtime import forks, limits
from pccl.support.text import address_text

log = logging.getLogger("pccl")

FILE = Path(__file__).with_name("page.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(NamedTuple):
    """An HTML document, and its Content-Security-Policy."""

    body: bytes
    policy: str


def load() -> Page:
    """Reads the page. Its policy allows only its own script and style, by their hashes."""
    text = FILE.read_bytes().decode()
    allowed = {kind: _hash(content) for kind, content in INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.encode(), policy)


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(status: Status) -> str:
    """All metrics of a run, in the text format of Prometheus."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: Status) -> Iterator[str]:
    accepted = sum(group.size for group in status.groups)
    yield from _metric(
        "build_info", "gauge", "The version of pccl.", {status.version: 1}, label="version"
    )
    yield from _metric("world_size", "gauge", "Accepted peers.", {"": accepted})
    pending = len(status.peers) - accepted
    yield from _metric("peers_pending", "gauge", "Peers that wait for admission.", {"": pending})
    text = "Whether a restarted master waits for its earlier peers."
    yield from _metric("recovering", "gauge", text, {"": int(status.recovering)})
    yield from _groups(status)
    yield from _bandwidth(status)
    yield from _links(status)
    yield from _waits(status)
    yield from _lateness(status)
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
        ("shared_state_holders", "Peers that took part in its last synchronization.", "holders"),
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


def _lateness(status: Status) -> Iterator[str]:
    """The metrics of each peer. All others have labels with few values."""
    columns = (
        ("late_seconds", "gauge", "How long others waited for a peer per call, of late.", "late_s"),
        ("late_seconds_total", "counter", "How long others waited for a peer.", "late_total_s"),
        ("awaited_seconds", "gauge", "How long others wait for a peer just now.", "awaited_s"),
    )
    for name, kind, text, field in columns:
        name = f"pccl_peer_{name}"
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        for peer in status.peers:
            own = f'peer="{peer.peer}",name="{_escaped(peer.name)}"'
            yield f"{name}{{{own}}} {getattr(peer, field)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
    text = "Of these, bytes of peers that took part in the synchronization before."
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
    text = "How long synchronizations took, once all members had entered them."
    yield from _histogram("state_sync_seconds", text, {"": counts.syncs})
    text = "From the interruption of a collective to the start of the next one of its group."
    yield from _histogram("recovery_seconds", text, {"": counts.recoveries})


def _histogram(
    name: str, text: str, values: Mapping[str, Histogram], label: str = ""
) -> Iterator[str]:
    """A histogram, for each value of its label if it has one."""
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
    """A metric, for each value of its label if it has one."""
    name = f"pccl_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for of, value in values.items():
        yield f'{name}{{{label}="{of}"}} {value}' if label else f"{name} {value}"


REQUEST = re.compile(r"([A-Z]+) (/\S*) HTTP/1\.[01]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
PATHS = ("/", "/status.json", "/metrics", "/events", "/healthz")
NOTHING = "default-src 'none'; frame-ancestors 'none'"  # a policy: browsers load and run nothing
SAFE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Connection": "close",
}


class Reply(NamedTuple):
    status: HTTPStatus
    body: bytes
    kind: str = TEXT
    policy: str = NOTHING


class Unanswered(Exception):
    """A request is refused. The text, which is the answer, says why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def target(head: bytes, loopback: bool) -> tuple[str, bool]:
    """The path that a request asks for, and whether it wants the body.

    Args:
        head: its first line and its headers, with the empty line after them.
        loopback: whether only this machine is served. Then a foreign page could make a browser of
            this machine send requests under the page's host name (DNS rebinding), so such names are
            refused.

    Raises:
        Unanswered: the request is refused.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    request = REQUEST.fullmatch(first)
    headers = [HEADER.fullmatch(line) for line in lines]
    if request is None or None in headers:
        raise Unanswered(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    hosts = [header[2] for header in headers if header and header[1].lower() == "host"]
    if len(hosts) > 1:
        raise Unanswered(HTTPStatus.BAD_REQUEST, "it names several hosts")
    if loopback and hosts and not _is_local(hosts[0]):
        why = "only this machine is served, by its address or as localhost"
        raise Unanswered(HTTPStatus.MISDIRECTED_REQUEST, why)
    if request[1] not in ("GET", "HEAD"):
        raise Unanswered(HTTPStatus.METHOD_NOT_ALLOWED, "a run can only be read")
    return request[2].partition("?")[0], request[1] == "GET"


def _is_local(host: str) -> bool:
    """True if a Host header names this machine in a way that only the machine itself uses."""
    name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if that is impossible."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=limits.HTTP_CONNECTIONS)
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        why = error.strerror if unknown else os.strerror(error.errno or 0)
        where = address_text(host, port)
        raise OSError(error.errno, f"cannot serve HTTP on {where}: {why}") from None


class Web:
    """Listens from construction on, and answers from `start` to `close`.

    Args:
        host: to listen on.
        port: to listen on; 0: any free one.
        ask: asks the service thread for the status; from any thread.

    Raises:
        OSError: it cannot listen on the address, or the system provides no descriptors.
    """

    def __init__(self, host: str, port: int, ask: Callable[[], Future[Status]]) -> None:
        self._ask = ask
        self._page = load()
        self._socket = _listen(host, port)
        try:
            self._loop = asyncio.new_event_loop()
        except BaseException:
            self._socket.close()
            raise
        name = self._socket.getsockname()
        self.address = address_text(host, name[1])
        self._loopback = ipaddress.ip_address(name[0]).is_loopback
        self._ended = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Future[Status] | None = None
        self._made: dict[str, Reply] = {}  # replies made from the last status, by path
        self._stale_s = 0.0  # when the last status expires
        self._thread = threading.Thread(target=self._run, name="pccl-http", daemon=True)
        forks.watch(self)

    def start(self) -> None:
        """Begins to answer. Raises RuntimeError if no thread can be started."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server. The port is free when this returns. To be called once."""
        if self._thread.ident is None:
            self._loop.close()
            self._socket.close()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended, with an error
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def forked(self) -> None:
        """Called in a forked child: closes the socket there, so that the parent can free the
        port."""
        self._socket.close()

    # ---- its thread ----

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("master: HTTP is no longer served")
        finally:
            self._loop.close()
            self._socket.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected,
            sock=self._socket,
            limit=limits.HTTP_REQUEST_BYTES,
            backlog=limits.HTTP_CONNECTIONS,
        )
        await self._ended.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if len(self._open) >= limits.HTTP_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(limits.HTTP_REQUEST_S):
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, or its time is up
        except Exception:
            log.exception("master: a request over HTTP made it fail")
        finally:
            self._open.pop(writer, None)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wants_body = True
        try:
            path, wants_body = target(await reader.readuntil(b"\r\n\r\n"), self._loopback)
            reply = await self._reply(path)
        except asyncio.LimitOverrunError:
            reply = Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request is too long\n")
        except Unanswered as error:
            reply = Reply(error.status, f"{error}\n".encode())
        headers = SAFE | {
            "Content-Security-Policy": reply.policy,
            "Content-Type": reply.kind,
            "Content-Length": str(len(reply.body)),
        }
        if reply.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        lines = [f"HTTP/1.1 {reply.status.value} {reply.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + reply.body * wants_body)
        writer.write_eof()
        while await reader.read(limits.HTTP_REQUEST_BYTES):
            pass  # closing a socket with unread data would discard the answer
        writer.close()
        await writer.wait_closed()

    async def _reply(self, path: str) -> Reply:
        if path == "/":
            return Reply(HTTPStatus.OK, self._page.body, HTML, self._page.policy)
        if path not in PATHS:
            raise Unanswered(HTTPStatus.NOT_FOUND, f"the paths are: {', '.join(PATHS)}")
        status = await self._status()
        if path not in self._made:
            self._made[path] = _made(path, status)
        return self._made[path]

    async def _status(self) -> Status:
        """The last status, or a new one if the last has expired."""
        asking = self._asking
        if asking is None or (asking.done() and self._loop.time() >= self._stale_s):
            self._stale_s = math.inf  # while the answer is pending
            asking = self._asking = asyncio.wrap_future(self._ask())
            asking.add_done_callback(self._answered)
        await asyncio.wait([asking], timeout=limits.HTTP_ANSWER_S)
        if not asking.done():
            why = f"the master has not answered for {limits.HTTP_ANSWER_S:g} s: it hangs"
            raise Unanswered(HTTPStatus.SERVICE_UNAVAILABLE, why)
        if asking.exception() is not None:
            why = "the master could not make its status: its log says why"
            raise Unanswered(HTTPStatus.INTERNAL_SERVER_ERROR, why)
        return asking.result()

    def _answered(self, asking: asyncio.Future[Status]) -> None:
        self._made.clear()
        self._stale_s = self._loop.time() + limits.HTTP_KEPT_S


def _made(path: str, status: Status) -> Reply:
    if path == "/status.json":
        return Reply(HTTPStatus.OK, msgspec.json.encode(status), "application/json")
    if path == "/events":
        return Reply(HTTPStatus.OK, msgspec.json.encode(status.events), "application/json")
    if path == "/metrics":
        return Reply(HTTPStatus.OK, exposition(status).encode(), CONTENT_TYPE)
    return Reply(HTTPStatus.OK, b"ok\n")
