"""Shows a run over HTTP, read-only, from a thread of its own.

The service thread of the master never waits for a client: this thread asks it for a snapshot, at
most one at a time, and what it answers serves all requests of the next moment. There are no files,
no arguments and no state of a client. What a client can take is limited: connections (the oldest
one goes), the size of a request, and the time from its connection to the end of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from pccl.protocol.master import Status
from pccl.runtime import limits
from pccl.runtime.server import metrics, page
from pccl.support.text import address_text

log = logging.getLogger("pccl")

REQUEST = re.compile(r"([A-Z]+) (/\S*) HTTP/1\.[01]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
PATHS = ("/", "/status.json", "/metrics", "/events", "/healthz")
NOTHING = "default-src 'none'; frame-ancestors 'none'"  # that a browser may load or run
SAFE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Connection": "close",
}


class Reply(NamedTuple):
    """What a request is answered."""

    status: HTTPStatus
    body: bytes
    kind: str = TEXT
    policy: str = NOTHING


class Unanswered(Exception):
    """A request that gets no more than a sentence that says why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def target(head: bytes, loopback: bool) -> tuple[str, bool]:
    """The path that a request asks for, and whether it wants the body.

    Args:
        head: its first line and its headers, with the empty line after them.
        loopback: whether only this machine is served. A page from elsewhere may then make a browser
            of this machine ask by a name of its own (DNS rebinding): no such name is answered.

    Raises:
        Unanswered: it asks for nothing that there can be.
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
        raise Unanswered(HTTPStatus.METHOD_NOT_ALLOWED, "a run can be looked at, and nothing else")
    return request[2].partition("?")[0], request[1] == "GET"


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine as only itself does."""
    name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError where that cannot be."""
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
        OSError: the address cannot be listened on, or the system lends no descriptors.
    """

    def __init__(self, host: str, port: int, ask: Callable[[], Future[Status]]) -> None:
        self._ask = ask
        self._page = page.load()
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
        self._made: dict[str, Reply] = {}  # of the last answer
        self._stale_s = 0.0  # when it no longer serves
        self._thread = threading.Thread(target=self._run, name="pccl-http", daemon=True)

    def start(self) -> None:
        """Begins to answer. Raises RuntimeError where no thread can be had."""
        self._thread.start()

    def close(self) -> None:
        """Ends it; the port is free when this returns. To be called once."""
        if self._thread.ident is None:
            self._loop.close()
            self._socket.close()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended, with an error
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def forked(self) -> None:
        """In a forked child: the parent's port is not kept in use."""
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
            pass  # it has gone, or has to
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
            why = "it is too long"
            reply = Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"{why}\n".encode())
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
            pass  # what is left unread when a socket is closed takes the answer with it
        writer.close()
        await writer.wait_closed()

    async def _reply(self, path: str) -> Reply:
        if path == "/":
            return Reply(HTTPStatus.OK, self._page.body, HTML, self._page.policy)
        if path not in PATHS:
            raise Unanswered(HTTPStatus.NOT_FOUND, f"there are: {', '.join(PATHS)}")
        status = await self._status()
        if path not in self._made:
            self._made[path] = _made(path, status)
        return self._made[path]

    async def _status(self) -> Status:
        """A status that is not older than the time for which one serves."""
        asking = self._asking
        if asking is None or (asking.done() and self._loop.time() >= self._stale_s):
            self._stale_s = math.inf  # until it is answered
            asking = self._asking = asyncio.wrap_future(self._ask())
            asking.add_done_callback(self._answered)
        await asyncio.wait([asking], timeout=limits.HTTP_ANSWER_S)
        if not asking.done():
            why = f"the master has not answered for {limits.HTTP_ANSWER_S:g} s: it stands still"
            raise Unanswered(HTTPStatus.SERVICE_UNAVAILABLE, why)
        if asking.exception() is not None:
            why = "the master cannot tell its status: its log says why"
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
        return Reply(HTTPStatus.OK, metrics.exposition(status).encode(), metrics.CONTENT_TYPE)
    return Reply(HTTPStatus.OK, b"ok\n")
