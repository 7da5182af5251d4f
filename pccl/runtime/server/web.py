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
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pccl.protocol.master import Status
from pccl.protocol.master.status import Phase
from pccl.protocol.master.tally import BOUNDS_S, Histogram
from pccl.protocol.rounds import Kind
from pccl.protocol.topology import hops
from pccl.runtime import forks, limits
from pccl.support import address_text, numeric

log = logging.getLogger("pccl")

FILE = Path(__file__).with_name("page.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def load() -> Reply:
    """Reads the page. The page's policy allows only its own script and style, by their hashes."""
    text = FILE.read_bytes().decode()
    allowed = {kind: _hash(content) for kind, content in INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Reply(text.encode(), HTML, policy)


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


Values = Mapping[str, float | Histogram | None]  # by labels; None: not known


def exposition(status: Status) -> str:
    """All metrics of a run, in the text format of Prometheus."""
    lines: list[str] = []
    for name, kind, text, values in _metrics(status):
        lines += [f"# HELP pccl_{name} {text}", f"# TYPE pccl_{name} {kind}"]
        for labels, value in values.items():
            if isinstance(value, Histogram):
                lines += _histogram(f"pccl_{name}", labels, value)
            elif value is not None:
                lines.append(
                    f"pccl_{name}{{{labels}}} {value}" if labels else f"pccl_{name} {value}"
                )
    return "".join(f"{line}\n" for line in lines)


def _histogram(name: str, labels: str, durations: Histogram) -> Iterator[str]:
    cumulated = list(accumulate(durations.counts))
    for bound, count in zip((*BOUNDS_S, "+Inf"), cumulated, strict=True):
        yield f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {count}'
    shown = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{shown} {durations.total_s}"
    yield f"{name}_count{shown} {cumulated[-1]}"


def _by(label: str, values: Mapping[Any, float | Histogram | None]) -> Values:
    return {f'{label}="{_escaped(str(of))}"': value for of, value in values.items()}


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


GROUP = (  # for each group: metric, what it is, field
    ("peer_group_size", "Accepted peers of a group.", "size"),
    ("epoch", "The epoch of a group's rings, which grows when they are renewed.", "epoch"),
    ("collectives_running", "Collectives that have started and not ended.", "running"),
    ("shared_state_revision", "The revision of a group's shared state.", "revision"),
    ("shared_state_holders", "Peers that took part in its last synchronization.", "holders"),
    ("goodput_ratio", "The share of the time that was not lost to aborts.", "goodput"),
)
PEER = (  # for each peer; other labels have few values
    ("late_seconds", "gauge", "How long others waited for a peer per call, of late.", "late_s"),
    ("late_seconds_total", "counter", "How long others waited for a peer.", "late_total_s"),
    ("awaited_seconds", "gauge", "How long others wait for a peer just now.", "awaited_s"),
)


def _metrics(status: Status) -> Iterator[tuple[str, str, str, Values]]:
    """The name of each metric, its type, what it is, and its values."""
    groups, counts, weights = status.groups, status.counts, status.weights
    accepted = sum(group.size for group in groups)
    yield "build_info", "gauge", "The version of pccl.", _by("version", {status.version: 1})
    yield "world_size", "gauge", "Accepted peers.", {"": accepted}
    pending = len(status.peers) - accepted
    yield "peers_pending", "gauge", "Peers that wait for admission.", {"": pending}
    text = "Whether a restarted master waits for its earlier peers."
    yield "recovering", "gauge", text, {"": int(status.recovering)}
    for name, text, field in GROUP:
        own = {group.group: getattr(group, field) for group in groups}
        yield name, "gauge", text, _by("group", own)
    text = "What each link of the ring carried in the last collective, as nccl-tests counts it."
    rates = {one.group: None if one.bus_rate is None else one.bus_rate / 1e9 for one in groups}
    yield "bus_bandwidth_gbs", "gauge", text, _by("group", rates)
    text = "A link of a ring, as the last optimize_topology has measured it."
    links = {
        f'src="{src}",dst="{dst}"': rate
        for group in groups
        for ring in group.rings
        for (src, dst), rate in zip(hops(ring.order), ring.rates, strict=True)
        if rate is not None
    }
    yield "link_bandwidth_bytes_per_second", "gauge", text, links
    text = "Calls that some peers are in and that wait for others."
    yield "waits", "gauge", text, {"": len(status.waits) + status.waits_left_out}
    longest = dict.fromkeys(Phase, 0.0)
    for wait in status.waits:
        longest[wait.phase] = max(longest[wait.phase], wait.waited_s)
    text = "For how long the longest of these waits has lasted."
    yield "longest_wait_seconds", "gauge", text, _by("phase", longest)
    for name, kind, text, field in PEER:
        late = {
            f'peer="{one.peer}",name="{_escaped(one.name)}"': getattr(one, field)
            for one in status.peers
        }
        yield f"peer_{name}", kind, text, late
    newest = 0 if weights is None else weights.version
    text = "The newest version of the weights that was published."
    yield "weights_version", "gauge", text, {"": newest}
    has = dict.fromkeys(("newest", "older", "none"), 0)
    for version, count in () if weights is None else weights.followers.items():
        has["none" if not version else "older" if version < newest else "newest"] += count
    text = "Processes that have published no weights, by the version that they have."
    yield "weights_followers", "gauge", text, _by("has", has)
    yield "peers_joined_total", "counter", "Peers that were accepted.", {"": counts.joined}
    text = "Accepted peers that have gone."
    yield "peers_lost_total", "counter", text, _by("cause", counts.lost)
    ended = {"committed": counts.committed, "aborted": counts.aborted}
    text = "Collectives that had started, and have ended."
    yield "collectives_total", "counter", text, _by("outcome", ended)
    text = "Collectives that were aborted, for their callers to make again."
    yield "retries_total", "counter", text, _by("reason", counts.retries)
    text = "Bytes that each member gave to committed collectives, before quantization."
    yield "collective_bytes_total", "counter", text, _by("wire", counts.carried)
    text = "Payload of shared state that peers lacked and received."
    yield "state_sync_bytes_total", "counter", text, {"": counts.synced_bytes}
    text = "Of these, bytes of peers that took part in the synchronization before."
    yield "state_resync_bytes_total", "counter", text, {"": counts.resynced_bytes}
    text = "Peers whose content differed from that elected at the same revision."
    yield "parity_failures_total", "counter", text, {"": counts.parity_failures}
    text = "How long the first peer of a round waited for the last one to enter it."
    votes = {"collective" if k is Kind.START else k: waited for k, waited in counts.votes.items()}
    yield "vote_wait_seconds", "histogram", text, _by("phase", votes)
    text = "How long committed collectives took, once all members had entered them."
    yield "collective_seconds", "histogram", text, _by("collective", counts.collectives)
    text = "How long synchronizations took, once all members had entered them."
    yield "state_sync_seconds", "histogram", text, {"": counts.syncs}
    text = "From the interruption of a collective to the start of the next one of its group."
    yield "recovery_seconds", "histogram", text, {"": counts.recoveries}


REQUEST = re.compile(r"([A-Z]+) (/\S*) HTTP/1\.[01]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
JSON, METRICS = "application/json", "text/plain; version=0.0.4; charset=utf-8"
NOTHING = "default-src 'none'; frame-ancestors 'none'"  # browsers must load and run nothing
SAFE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Connection": "close",
}


class Reply(NamedTuple):
    body: bytes
    kind: str = TEXT
    policy: str = NOTHING
    status: HTTPStatus = HTTPStatus.OK


MADE: dict[str, Callable[[Status], Reply]] = {  # from the status, by path
    "/status.json": lambda status: Reply(msgspec.json.encode(status), JSON),
    "/metrics": lambda status: Reply(exposition(status).encode(), METRICS),
    "/events": lambda status: Reply(msgspec.json.encode(status.events), JSON),
    "/healthz": lambda _: Reply(b"ok\n"),
}


class Unanswered(Exception):
    """A request is refused. The text, which is the answer, says why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def target(head: bytes, loopback: bool) -> tuple[str, bool]:
    """The path that a request asks for, and whether it wants the body.

    Args:
        head: its first line and its headers, with the empty line after them.
        loopback: whether only this machine is served. A foreign page could make this machine's
            browser send requests under the page's host name (DNS rebinding), so foreign names are
            then refused.

    Raises:
        Unanswered: the request is refused.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    request = REQUEST.fullmatch(first)
    headers = [HEADER.fullmatch(line) for line in lines]
    if request is None or None in headers:
        raise Unanswered(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
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
    """True if a Host header names this machine in a form that only the machine itself uses."""
    name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")
    address = numeric(name)
    return name.lower() == "localhost" or (address is not None and address.is_loopback)


def _listen(host: str, port: int) -> socket.socket:
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
        self._loopback = ip_address(name[0]).is_loopback
        self._ended = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}  # by connection, the oldest first
        self._asking: asyncio.Future[Status] | None = None
        self._made: dict[str, Reply] = {}  # replies made from the last status, by path
        self._stale_s = 0.0  # when the last status expires
        self._thread = threading.Thread(target=self._run, name="pccl-http", daemon=True)
        forks.watch(self)

    def start(self) -> None:
        """Begins to answer. Raises RuntimeError if no thread can be started."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server. The port is free when this returns. Must be called once."""
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        live = [one for one in self._tasks if not one.cancelling()]
        if len(live) >= limits.HTTP_CONNECTIONS:
            live[0].cancel()
        self._tasks[task] = None
        try:
            async with asyncio.timeout(limits.HTTP_REQUEST_S):
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, or its time is up
        except Exception:
            log.exception("master: a request over HTTP made it fail")
        finally:
            del self._tasks[task]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wants_body = True
        try:
            path, wants_body = target(await reader.readuntil(b"\r\n\r\n"), self._loopback)
            reply = await self._reply(path)
        except asyncio.LimitOverrunError:
            too_long = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            reply = Reply(b"the request is too long\n", status=too_long)
        except Unanswered as error:
            reply = Reply(f"{error}\n".encode(), status=error.status)
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
            return self._page
        if path not in MADE:
            raise Unanswered(HTTPStatus.NOT_FOUND, f"the paths are: {', '.join(('/', *MADE))}")
        status = await self._status()
        if path not in self._made:
            self._made[path] = MADE[path](status)
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
            why = "the master could not make its status: see its log"
            raise Unanswered(HTTPStatus.INTERNAL_SERVER_ERROR, why)
        return asking.result()

    def _answered(self, asking: asyncio.Future[Status]) -> None:
        self._made.clear()
        self._stale_s = self._loop.time() + limits.HTTP_KEPT_S
