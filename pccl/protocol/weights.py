"""The state machine of a weights client: what it serves, fetches and publishes. No I/O.

A client fetches packages one after the other, along the path to the newest version with the fewest
bytes. It asks the master for a holder and fetches the package from there. When the caller has
applied the package, the client serves it to others. Both sides keep the stream to each other for
the next package: over a long link, opening a stream would take most of a small package's time. If
the holder is lost, or sends data that differs from the publication, the client asks for another
holder and keeps the data that it has. No other client can end it; if no client has the package, it
waits.

When the connection to the master breaks, transfers continue. The client joins the next master as a
newcomer, and reports the packages that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from msgspec.structs import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import (
    AbortOp,
    Answer,
    Arrange,
    CloseStream,
    CommitOp,
    Effect,
    End,
    Expect,
    Fail,
    Fault,
    OpenStream,
    Send,
    StartTransfer,
)
from pccl.protocol.peer.state import Outbox
from pccl.types import Result


class RegisterServe(Effect):
    """Register an op that serves a package; the caller has its memory."""

    op: int
    package: m.Package


class RegisterFetch(Effect):
    """Register an op that fetches a package; the caller provides the memory."""

    op: int
    package: m.Package


class Allow(Effect):
    """Accept the owner of this key while a stream is in use; an empty key: accept nobody."""

    stream: int
    curve: str


class Arrived(Effect):
    """A package is complete and verified; the caller calls `taken` when it has applied it."""

    package: m.Package


class Forgotten(Effect):
    """A package is no longer served; an op may still use its memory until it settles."""

    package: m.Package


class Backoff(Effect):
    """Call `retry` after a pause: an immediate attempt would fail for the same reason."""

    why: str


class News(Effect):
    """The available packages, or the newest version ever (`head`), have changed."""

    packages: tuple[m.Package, ...]
    head: int


class Over(Effect):
    """The client has ended after it had joined."""

    fail: Fail


KEPT_MAX = 200  # packages that a holder keeps; a message has room for a few more


def way(packages: Sequence[m.Package], version: int) -> tuple[m.Package, ...]:
    """The packages that lead from a version (0: none) to the newest with the fewest bytes."""
    cost, last = {version: 0}, dict[int, m.Package]()
    for package in sorted(packages, key=lambda one: one.key):
        if package.version <= version or not (package.base == 0 or package.base in cost):
            continue
        total = package.nbytes + (cost[package.base] if package.base else 0)
        if total < cost.get(package.version, total + 1):
            cost[package.version], last[package.version] = total, package
    at = max(cost)
    found: list[m.Package] = []
    while at != version:
        found.append(last[at])
        at = last[at].base or version
    return tuple(reversed(found))


def stale(packages: Sequence[m.Package], held: Sequence[m.Package]) -> list[m.Package]:
    """The packages that a holder need not keep, given the available ones.

    A new subscriber begins with the newest whole version. A subscriber that is a little behind may
    still need differences since the previous whole version. A holder keeps a whole version until it
    has a newer one.
    """
    wholes = sorted(one.version for one in packages if one.base == 0)
    own = max((one.version for one in held if one.base == 0), default=0)
    oldest = wholes[-2] if len(wholes) > 1 else 0
    oldest = max([oldest, *sorted(one.version for one in held)[:-KEPT_MAX]])
    return [one for one in held if (one.version < own if one.base == 0 else one.version <= oldest)]


SEQ = 1  # the sequence number of all transfers: an op has a single package
FAILURES_MAX = 3  # of a fetch, before another package may take its place
STREAMS_KEPT = 8  # to receivers that fetch nothing at present


@dataclass(slots=True)
class Held:
    package: m.Package
    op: int
    receivers: set[int] = field(default_factory=set)  # clients that fetch it now
    served: set[int] = field(default_factory=set)  # these, and others whose streams are still open


class BlobCache:
    """The packages that a client serves."""

    def __init__(self, number: Callable[[], int], do: Callable[[Effect], None]) -> None:
        self._number, self._do = number, do
        self._held: dict[tuple[int, int], Held] = {}
        self._ends: dict[int, End] = {}  # by receiver; those used last are at the end

    @property
    def packages(self) -> Sequence[m.Package]:
        return [one.package for one in self._held.values()]

    def put(self, package: m.Package) -> None:
        if package.key not in self._held:
            self._held[package.key] = held = Held(package, self._number())
            self._do(RegisterServe(held.op, package))

    def drop(self, package: m.Package) -> None:
        held = self._held.pop(package.key, None)
        if held is None:
            return
        for receiver in held.receivers:
            self._close(receiver)
        self._do(AbortOp(held.op))
        self._do(Forgotten(package))

    def drop_unused(self, packages: Sequence[m.Package]) -> bool:
        """Drops the packages that no client fetches. Returns whether there were any."""
        unused = [one for one in packages if not self._held[one.key].receivers]
        for package in unused:
            self.drop(package)
        return bool(unused)

    def fail(self, op: int) -> bool:
        """An op has failed: drops the package that it serves. Returns whether it serves one."""
        failed = [held.package for held in self._held.values() if held.op == op]
        for package in failed:
            self.drop(package)
        return bool(failed)

    def serve(self, serve: m.Serve) -> None:
        held = self._held.get((serve.version, serve.base))
        if held is None:
            return  # it was dropped, and the master has been told
        receiver, slot = serve.receiver.peer, serve.slot
        for other, end in list(self._ends.items()):
            # The slot's earlier receiver has gone, and this one did not get the package by its
            # stream.
            if receiver in held.served if other == receiver else end.slot == slot:
                self._close(other)
        end = self._ends.pop(receiver, End(0, slot))
        if not end.stream:
            end = End(self._number(), slot)
            self._do(OpenStream(end.stream, serve.receiver, serve.nonce))
        self._do(Allow(end.stream, serve.receiver.curve))
        self._ends[receiver] = end
        held.receivers.add(receiver)
        held.served.add(receiver)
        self._do(StartTransfer(held.op, SEQ, nonce_of(held.package), (end,)))

    def served(self, receiver: int) -> None:
        for held in self._held.values():
            held.receivers.discard(receiver)
        if receiver in self._ends:
            self._do(Allow(self._ends[receiver].stream, ""))
        busy = set[int]().union(*(held.receivers for held in self._held.values()))
        for idle in [each for each in self._ends if each not in busy][:-STREAMS_KEPT]:
            self._close(idle)

    def lose(self, stream: int) -> None:
        """A stream is lost; a receiver that fetches by it tells the master."""
        for receiver in [each for each, end in self._ends.items() if end.stream == stream]:
            self._close(receiver)

    def forget_receivers(self) -> None:
        for receiver in list(self._ends):
            self._close(receiver)

    def _close(self, receiver: int) -> None:
        for held in self._held.values():
            held.receivers.discard(receiver)
            held.served.discard(receiver)
        self._do(CloseStream(self._ends.pop(receiver).stream))


def nonce_of(package: m.Package) -> int:
    """The number in all requests for a package, and in all data of it."""
    return int.from_bytes(package.body[:8])


class State(Enum):
    SEEKING = auto()  # the master was asked for a holder
    FETCHING = auto()
    RESTING = auto()  # a pause before the master is asked again
    TAKING = auto()  # the package is complete, and the caller applies it


@dataclass(slots=True)
class Fetch:
    package: m.Package
    state: State = State.SEEKING
    op: int = 0  # 0: no memory yet
    liars: dict[int, None] = field(default_factory=dict)  # holders that sent other data
    failures: int = 0

    @property
    def goes_on(self) -> bool:
        """True if the fetch has begun, and should continue with another holder."""
        return self.op != 0 and not self.liars and self.failures < FAILURES_MAX


class WeightsMachine:
    """One weights client.

    Args:
        follows: whether it fetches what others publish.
        fits: whether the sizes of a package match the caller's tensors.
        relays: whether it serves what it has fetched to others.
    """

    idle = True  # `leave` need not wait for ops

    def __init__(self, follows: bool, relays: bool, fits: Callable[[m.Package], bool]) -> None:
        self._follows, self._relays, self._fits = follows, relays, fits
        self._hello: m.Hello | None = None
        self._joining: int | None = None  # the call
        self.number = 0  # until it is registered
        self.version = 0  # the version of its weights
        self.over: Fail | None = None  # why it has ended
        self._connected = False  # to a master that knows it
        self._available: tuple[m.Package, ...] = ()
        self._next = 0  # number of an op or stream
        self._outbox = Outbox()
        self._do = self._outbox.do
        self._cache = BlobCache(self._number, self._do)
        self._fetch: Fetch | None = None
        self._holder = self._stream = 0  # of the latest fetch; 0: no stream is open
        self._publishing: dict[int, tuple[m.Package, ...]] = {}
        self._by_type: dict[type, Callable[[Any], None]] = {
            m.Welcome: self._welcomed,
            m.Refused: lambda one: self._end(one.result, f"the master refused this: {one.why}"),
            m.Kicked: lambda one: self._end(one.result, f"the master dropped this: {one.why}"),
            m.Available: self._changed,
            m.Source: self._sourced,
            m.Serve: lambda one: self._cache.serve(one),
            m.Served: self._served,
            m.RendezvousJoin: lambda one: self._do(Arrange(one)),
            m.RendezvousResult: lambda one: self._do(Arrange(one)),
            m.Published: lambda one: self._published(Answer(one.call, None)),
            m.CallError: lambda one: self._published(Fail(one.call, Result(one.result), one.why)),
        }

    # ---- calls ----

    def join(self, call: int, hello: m.Hello) -> list[Effect]:
        """Asks to be registered; answered when registered and told the available packages."""
        if self.over is not None:
            return self._take(replace(self.over, call=call))
        self._joining, self._hello = call, hello
        return self._take(Send(hello))

    def objection(self, version: int) -> str:
        """Why it cannot publish a version with this number; empty if it can."""
        if self.over is not None:
            return self.over.why
        pending = max((each[0].version for each in self._publishing.values()), default=0)
        if version <= pending:
            return f"version {pending} is under way, since a call that has timed out"
        if version <= self.version:
            return f"version {version} is not newer than version {self.version}, which is here"
        return ""

    def publish(self, call: int, packages: tuple[m.Package, ...]) -> list[Effect]:
        for package in packages:
            self._cache.put(package)
        self._publishing[call] = packages
        if self._connected:
            self._do(Send(m.Publish(call, packages)))
        return self._take()

    def taken(self, package: m.Package, version: int) -> list[Effect]:
        """The caller has applied a package and now has `version`; 0: it has none."""
        fetch, self._fetch = self._fetch, None
        assert fetch is not None and fetch.package == package
        self.version = version
        if version and self._relays:
            self._cache.put(package)
        else:
            self._do(Forgotten(package))
        self._tidy()
        self._send_holds()
        self._aim()
        return self._take()

    def keep(self, package: m.Package) -> list[Effect]:
        """The caller has made another package, which is served from now on."""
        self._cache.put(package)
        self._tidy()
        self._send_holds()
        return self._take()

    def rendezvous(self, request: m.RendezvousRequest) -> list[Effect]:
        return self._take(Send(request)) if self._connected else self._take()

    def leave(self, why: str) -> list[Effect]:
        if self.over is None:
            self._do(Send(m.Leave()))
            self._end(Result.INVALID_USAGE.value, why, Fault.OTHER)
        return self._take()

    # ---- the connection to the master ----

    def received(self, message: m.MasterMessage) -> list[Effect]:
        handler = self._by_type.get(type(message))
        if handler is not None and self.over is None:
            handler(message)
        return self._take()

    def disconnected(self, why: str) -> list[Effect]:
        self._connected = False
        if self.number == 0:
            self._end(Result.MASTER_CONNECTION_FAILED.value, why)
        return self._take()

    def reconnected(self) -> list[Effect]:
        return self._take() if self._hello is None else self._take(Send(self._hello))

    def lost_master(self, why: str) -> list[Effect]:
        self._end(Result.MASTER_CONNECTION_FAILED.value, why)
        return self._take()

    def broken(self, why: str, result: Result = Result.INTERNAL_ERROR) -> list[Effect]:
        self._end(result.value, why, Fault.OTHER)
        return self._take()

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.number, self._connected = welcome.peer, True
        self._do(Expect(welcome.peer, welcome.nonce, ()))
        self._cache.forget_receivers()  # they came from an earlier master
        self._send_holds()
        for call, packages in self._publishing.items():
            self._do(Send(m.Publish(call, packages)))
        fetch = self._fetch
        self._part()
        if fetch is not None and fetch.state is not State.TAKING:
            fetch.liars.clear()  # its holders have other numbers now
            self._seek(fetch)

    def _end(self, result: int, why: str, fault: Fault = Fault.KICKED) -> None:
        if self.over is not None:
            return
        if result == Result.MASTER_CONNECTION_FAILED.value:
            fault = Fault.MASTER_LOST
        self.over = over = Fail(0, Result(result), why, fault)
        self._connected = False
        for call in list(self._publishing):
            self._published(replace(over, call=call))
        if self._joining is not None:
            self._do(replace(over, call=self._joining))
            self._joining = None
        else:
            self._do(Over(over))

    # ---- available packages ----

    def _changed(self, available: m.Available) -> None:
        self._available = tuple(filter(self._fits, available.packages))
        self._do(News(available.packages, available.head))
        if self._joining is not None:
            self._do(Answer(self._joining, None))
            self._joining = None
        self._tidy()
        fetch = self._fetch
        waits = fetch is not None and fetch.state in (State.SEEKING, State.RESTING)
        if fetch is not None and waits and fetch.package not in self._available:
            self._drop(fetch)
        self._aim()

    def _tidy(self) -> None:
        """Drops packages that no client needs; those that are being fetched are dropped later."""
        old = stale(self._available, self._cache.packages)
        if self._cache.drop_unused(old):
            self._send_holds()

    def _served(self, served: m.Served) -> None:
        self._cache.served(served.receiver)
        self._tidy()

    def _aim(self) -> None:
        """Begins to seek the next package, or a better one if no holder gives the current one."""
        if not (self._follows and self._connected):
            return
        fetch = self._fetch
        if fetch is not None and (fetch.state is not State.SEEKING or fetch.goes_on):
            return
        found = way(self._available, self.version)
        if not found or (fetch is not None and fetch.package == found[0]):
            return
        if fetch is not None:
            self._drop(fetch)
        self._fetch = fetch = Fetch(found[0])
        self._seek(fetch)

    def _seek(self, fetch: Fetch) -> None:
        if fetch.package not in self._available:
            self._drop(fetch)  # nobody has it any more
            return
        fetch.state = State.SEEKING
        avoid = tuple(fetch.liars)[-m.AVOIDED_MAX :]
        self._do(Send(m.Seek(*fetch.package.key, avoid)))

    # ---- a fetch ----

    def _sourced(self, source: m.Source) -> None:
        fetch = self._fetch
        if fetch is None or fetch.package.key != (source.version, source.base):
            return
        if fetch.state not in (State.SEEKING, State.FETCHING, State.RESTING):
            return
        again = fetch.state is State.FETCHING or source.holder.peer != self._holder
        fetch.state = State.FETCHING
        if again:
            self._part()
        if not self._stream:
            self._holder, self._stream = source.holder.peer, self._number()
            self._do(OpenStream(self._stream, source.holder, source.nonce))
        self._do(Allow(self._stream, source.holder.curve))
        if not fetch.op:
            fetch.op = self._number()
            self._do(RegisterFetch(fetch.op, fetch.package))
        ends = (End(self._stream, source.slot),)
        self._do(StartTransfer(fetch.op, SEQ, nonce_of(fetch.package), ends))

    def _part(self) -> None:
        """Closes the stream to the holder."""
        if self._stream:
            self._do(CloseStream(self._stream))
        self._stream = self._holder = 0

    def _drop(self, fetch: Fetch) -> None:
        self._fetch = None
        if fetch.op:
            self._do(AbortOp(fetch.op))

    def slow(self) -> list[Effect]:
        """The fetch has taken long: it gives its place at the holder to others."""
        fetch = self._fetch
        if fetch is not None and fetch.state is State.FETCHING and self._connected:
            self._do(Send(m.Slow()))
        return self._take()

    def retry(self) -> list[Effect]:
        fetch = self._fetch
        if fetch is not None and fetch.state is State.RESTING and self._connected:
            self._seek(fetch)
            self._aim()  # elsewhere, if the holder has lied and another package will do
        return self._take()

    # ---- the engine ----

    def engine_complete(self, op: int, settled: bool, tx: int, rx: int) -> list[Effect]:
        """A fetch is complete and verified. `settled`: no op uses its memory."""
        fetch = self._fetch
        if fetch is not None and fetch.op == op:
            fetch.state = State.TAKING
            self._do(Allow(self._stream, ""))
            self._do(Arrived(fetch.package) if settled else CommitOp(op))
        return self._take()

    def measured(self, op: int, rate: int) -> list[Effect]:
        """An op has fetched everything, at `rate` bytes per second."""
        fetch = self._fetch
        if fetch is not None and fetch.op == op and self._connected:
            self._do(Send(m.Got(rate)))
        return self._take()

    def engine_failed(
        self, op: int, why: str, starved: int = 0, cause: m.Cause = m.Cause.OTHER
    ) -> list[Effect]:
        """An op has failed. `starved`: it only lacks a stream, and can start again."""
        fetch = self._fetch
        if fetch is not None and fetch.op == op:
            self._part()
            if not starved:
                self._do(AbortOp(op))
                fetch.op = 0
            fetch.state = State.RESTING
            fetch.failures += 1
            self._do(Backoff(why))
        elif not starved and self._cache.fail(op):
            self._send_holds()
        return self._take()

    def engine_settled(self, op: int, tx: int, rx: int) -> list[Effect]:
        fetch = self._fetch
        if fetch is not None and fetch.op == op and fetch.state is State.TAKING:
            self._do(Arrived(fetch.package))
        return self._take()

    def stream_lost(self, stream: int, lied: bool) -> list[Effect]:
        """A stream is lost. `lied`: because its data differed from the publication."""
        fetch = self._fetch
        if stream == self._stream:
            if lied and fetch is not None:
                fetch.liars[self._holder] = None
            if fetch is None or fetch.state is not State.FETCHING:  # else its op fails now
                self._part()
        else:
            self._cache.lose(stream)
        return self._take()

    # ---- publications ----

    def _published(self, end: Answer | Fail) -> None:
        packages = self._publishing.pop(end.call, None)
        if packages is None:
            return
        if isinstance(end, Fail):
            for package in packages:
                self._cache.drop(package)
        else:
            self.version = packages[0].version
        self._tidy()
        self._do(end)

    def _send_holds(self) -> None:
        if self._connected:
            self._do(Send(m.Holds(tuple(self._cache.packages), self.version)))

    # ---- effects ----

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _take(self, *more: Effect) -> list[Effect]:
        return [*self._outbox.take(), *more]
