"""The client that publishes or follows weights, and packages in memory.

Like a peer it has a control thread and an engine. A second thread hashes what arrives, and passes
complete packages to the caller's `BlobStore`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pccl.errors import PCCLTimeoutError
from pccl.ext import address_of, ffi
from pccl.protocol import messages as m
from pccl.protocol import weights
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Leaf
from pccl.runtime.client.connect import RetryPolicy, connect
from pccl.runtime.client.control import ControlThread, Driver, PendingCalls
from pccl.runtime.client.engine import COMPLETE, LIED, STREAM_LOST, Engine, Event
from pccl.runtime.client.memory import Pool
from pccl.runtime.client.sync import Staging, served
from pccl.runtime.config import Config
from pccl.runtime.digest import digests
from pccl.security import Security
from pccl.support import parse_address, parse_advertised, parse_ports
from pccl.tensors import Buffer
from pccl.types import DataType, Result

ENTRIES = 2  # the head and the body; pieces with lower numbers are their tables of digests
RUN = 1  # the run number of all transfers, the only ops of this engine

log = logging.getLogger("pccl")


class Blob:
    """A package and its two parts, in memory that does not change."""

    def __init__(
        self, version: int, base: int, content: bytes, head: memoryview, body: memoryview
    ) -> None:
        self.head, self.body = head, body
        self._found = digests([(_address(part), part.nbytes) for part in (head, body)])
        roots = [each.root for each in self._found]
        self.package = m.Package(
            version, base, content, head.nbytes, roots[0], body.nbytes, roots[1]
        )

    @property
    def pool(self) -> Pool:
        pieces, tables = served(_buffers(self.package, self.head, self.body), self._found)
        return Pool(pieces, ENTRIES, (self, tables))


def _buffers(package: m.Package, *parts: memoryview) -> list[Buffer]:
    addresses = [_address(part) for part in parts] or [0, 0]
    sizes = (package.head_bytes, package.body_bytes)
    return [Buffer(*one, DataType.UINT8, None) for one in zip(addresses, sizes, strict=True)]


def _address(part: memoryview) -> int:
    return address_of(ffi.from_buffer("char[]", part))


class BlobStore:
    """Stores and serves packages for a client; this class fetches none.

    The verifying thread calls `work_in`, the control thread the other methods.
    """

    def fits(self, package: m.Package) -> bool:
        """True if the sizes of a package match these tensors."""
        return False

    def work_in(self, blob: Blob) -> tuple[int, Blob | None]:
        """Applies a package. An exception ends the client.

        Returns:
            The version that it now has (0: none), and another package that it can serve, if any.
        """
        return 0, None

    def news(self, packages: tuple[m.Package, ...], head: int) -> str:
        """Handles new available packages, or a new newest version (`head`).

        Returns:
            The reason why it can follow no more versions; empty: it can.
        """
        return ""

    def over(self, fail: effects.Fail) -> None:
        """Handles the end of the client."""
        log.info("weights: %s", fail.why)


class Options:
    """The options for reaching the master and others: arguments of Publisher and Subscriber."""

    def __init__(
        self,
        master: str,
        security: Any,
        advertise: str | None,
        port_range: str | None,
        connect_timeout: float | None,
    ) -> None:
        self.host, self.port = parse_address(master)
        self.security = Security.of(security)
        config = Config.from_env()
        if advertise is not None:
            config = replace(config, advertise=parse_advertised(advertise, "advertise"))
        if port_range is not None:
            config = replace(config, ports=parse_ports(port_range, "port_range"))
        self.config = config
        if connect_timeout is not None and not connect_timeout > 0:
            raise ValueError(f"connect_timeout is {connect_timeout!r}: it must be positive")
        self.timeout_s = limits.WEIGHTS_JOIN_S if connect_timeout is None else connect_timeout


class WeightsClient(ControlThread):
    """A client that publishes or follows weights, from the first connection to the end.

    It fetches published versions if it `follows`, and serves them to others if it `relays`.
    """

    def __init__(
        self, options: Options, address: str, store: BlobStore, *, follows: bool, relays: bool
    ) -> None:
        self._store = store
        self._weights = machine = weights.WeightsMachine(follows, relays, store.fits)
        at, config = (options.host, options.port, address), options.config
        super().__init__(*at, config, options.security, machine, client=True)
        self._blobs: dict[tuple[int, int], Blob] = {}
        # by package: the fetching op, and its memory
        self._incoming: dict[tuple[int, int], tuple[int, Staging]] = {}
        self._expect = effects.Expect(0, 0, ())
        self._keys: dict[int, str] = {}  # by stream: the key of the client that may connect
        self._pace = _Pace(self._engine, lambda: self._perform(machine.slow()))
        self._backoff = _Backoff(lambda: self._perform(machine.retry()))
        self._timers += [self._pace, self._backoff]
        self._driver = driver = Driver(
            machine, self._engine, self._streams, self._master, PendingCalls()
        )
        self._memory = driver.pending.memory
        driver.effects |= {
            effects.Expect: self._expected,
            weights.Allow: self._allow,
            effects.OpenStream: lambda one: self._streams.open(one.stream, one.to, one.nonce),
            effects.CloseStream: self._close_stream,
            effects.StartTransfer: self._start_transfer,
            effects.AbortOp: self._abort,
            weights.RegisterServe: lambda one: self._register(
                one.op, one.package, self._blobs[one.package.key].pool
            ),
            weights.RegisterFetch: self._register_fetch,
            weights.Arrived: self._arrived,
            weights.Forgotten: lambda one: self._blobs.pop(one.package.key, None),
            weights.Backoff: lambda one: self._backoff.begin(one.why),
            weights.News: self._news,
            weights.Over: lambda one: store.over(one.fail),
        }
        driver.events |= {
            COMPLETE: lambda one: [
                *machine.measured(one.op, self._pace.rate(one.op, one.rx_bytes)),
                *machine.engine_complete(one.op, one.settled, one.tx_bytes, one.rx_bytes),
            ],
            STREAM_LOST: self._stream_lost,
        }
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work_jobs, name="pccl-weights", daemon=True)
        try:
            self._start(self._worker)
        except BaseException:
            self._jobs.put(None)
            raise

    @property
    def _own_threads(self) -> Sequence[threading.Thread]:
        return self._thread, self._worker

    @property
    def _name(self) -> str:
        return "weights"

    @property
    def _done(self) -> bool:
        return self._weights.over is not None

    # ---- called by user threads ----

    def inquire(self, call: Call) -> None:
        """Does nothing, because no call of a client waits for others."""

    def time_out(self, call: Call, why: str) -> None:
        """Does nothing, because a publication cannot be withdrawn."""

    def publish(self, call: Call, blobs: tuple[Blob, ...]) -> None:
        def begin(number: int) -> list[Any]:
            if why := self._weights.objection(blobs[0].package.version):
                return [effects.Fail(number, Result.INVALID_USAGE, why)]
            self._blobs.update((blob.package.key, blob) for blob in blobs)
            return self._weights.publish(number, tuple(blob.package for blob in blobs))

        self.begin(call, begin)

    # ---- the verifying thread ----

    def _work_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except ValueError as error:
                self._fail(str(error), Result.INVALID_ARGUMENT)
            except BaseException as error:
                log.error("weights: a package could not be applied", exc_info=error)
                self._fail(f"an internal error of pccl, {error!r}; the log has it")

    def _fail(self, why: str, result: Result = Result.INTERNAL_ERROR) -> None:
        self.post(lambda: self._weights.broken(why, result))

    def _take(self, package: m.Package, staging: Staging) -> None:
        parts = [memoryview(staging.content(i)) for i in range(ENTRIES)]
        blob = Blob(package.version, package.base, package.content, *parts)
        version, more = self._store.work_in(blob)

        def notify() -> None:
            self._blobs[blob.package.key] = blob
            self._perform(self._weights.taken(blob.package, version))
            if more is not None:
                self._blobs[more.package.key] = more
                self._perform(self._weights.keep(more.package))

        self._inbox.post(notify)

    # ---- effects ----

    def _expected(self, effect: effects.Expect) -> None:
        """Accepts connections only from the clients of current transfers."""
        self._expect = effect
        self._engine.expect(effect.number, effect.nonce, sorted({*self._keys.values()}))

    def _allow(self, effect: weights.Allow) -> None:
        before = self._keys.pop(effect.stream, "")
        if effect.curve:
            self._keys[effect.stream] = effect.curve
            self._engine.admit(effect.curve)
        elif before not in ("", *self._keys.values()):
            self._expected(self._expect)

    def _close_stream(self, effect: effects.CloseStream) -> None:
        self._streams.close(effect.stream)
        self._allow(weights.Allow(effect.stream, ""))

    def _register_fetch(self, effect: weights.RegisterFetch) -> None:
        package = effect.package
        plan = m.SyncPlan(0, 0, (), (), (0, 1), (package.head, package.body))
        staging = Staging(plan, _buffers(package))

        def arrived(leaf: Leaf) -> None:
            self._jobs.put(lambda: self.verified(leaf.op, staging.verify(leaf.piece, leaf.leaf)))

        self._incoming[package.key] = effect.op, staging
        self._register(effect.op, package, Pool(staging.pieces(), ENTRIES, staging, arrived))
        self._pace.fetches(effect.op)

    def _register(self, op: int, package: m.Package, pool: Pool) -> None:
        self._memory[op] = pool
        tag = 2 * package.version + (package.base == 0)
        self._perform([effects.RegisterOp(op, RUN, tag, 0)])

    def _start_transfer(self, effect: effects.StartTransfer) -> None:
        self._engine.start_transfer(effect)
        self._pace.began(effect.op)

    def _abort(self, effect: effects.AbortOp) -> None:
        self._engine.abort(effect.op)
        self._pace.ended(effect.op)
        for key in [key for key, (op, _) in self._incoming.items() if op == effect.op]:
            del self._incoming[key]

    def _arrived(self, effect: weights.Arrived) -> None:
        _, staging = self._incoming.pop(effect.package.key)
        self._jobs.put(lambda: self._take(effect.package, staging))

    def _news(self, effect: weights.News) -> None:
        if why := self._store.news(effect.packages, effect.head):
            self._perform(self._weights.broken(why, Result.INVALID_ARGUMENT))

    # ---- events ----

    def _stream_lost(self, event: Event) -> list[Any]:
        to, _ = self._streams.lost(event)
        log.info("weights: the connection to %s: %s", to, event.text)
        if event.status == LIED:
            log.warning("weights: %s sends data that differs from the published data", to)
        return self._weights.stream_lost(event.stream, event.status == LIED)

    def end(self) -> None:
        self._jobs.put(None)
        super().end()


def client(
    options: Options, store: BlobStore, name: str, *, follows: bool, relays: bool
) -> WeightsClient:
    at, limit_s = (options.host, options.port), options.timeout_s
    policy = RetryPolicy(*at, 1, limit_s, None, name=name, waits_for_others=False)
    found: list[WeightsClient] = []
    connect(
        policy,
        options.config,
        lambda address: WeightsClient(options, address, store, follows=follows, relays=relays),
        found.append,
    )
    return found[0]


def timed_out(what: str, timeout: float, why: str) -> PCCLTimeoutError:
    return PCCLTimeoutError(Result.TIMEOUT, what, f"{why} within {timeout:g} s")


class _Backoff:
    """The pause before a fetch continues elsewhere."""

    def __init__(self, retry: Callable[[], None]) -> None:
        self._retry = retry
        self.due_s = math.inf

    def begin(self, why: str) -> None:
        log.info("weights: a fetch continues elsewhere: %s", why)
        self.due_s = time.monotonic() + limits.WEIGHTS_REST_S

    def tick(self) -> None:
        if self.due_s <= time.monotonic():
            self.due_s = math.inf
            self._retry()


class _Pace:
    """Measures a fetch, and repeats its unanswered requests.

    It calls `slow`, once for each holder, when a fetch takes long.
    """

    def __init__(self, engine: Engine, slow: Callable[[], None]) -> None:
        self._engine, self._slow = engine, slow
        self._op = 0  # the op of the fetch; 0: none
        self.due_s = math.inf  # when to repeat them; inf: there is no fetch
        self._first_s = 0.0  # when the fetch began
        self._since_s = 0.0  # when it began with its present holder
        self._is_slow = False

    def fetches(self, op: int) -> None:
        self._op, self._first_s = op, time.monotonic()

    def began(self, op: int) -> None:
        if op == self._op:
            self._is_slow, now = False, time.monotonic()
            self._since_s, self.due_s = now, now + limits.REMIND_S

    def ended(self, op: int) -> None:
        if op == self._op:
            self._op, self.due_s = 0, math.inf

    def rate(self, op: int, nbytes: int) -> int:
        """Ends a complete fetch. Returns its bytes per second."""
        seconds = max(1e-3, time.monotonic() - self._first_s)
        self.ended(op)
        return int(nbytes / seconds)

    def tick(self) -> None:
        """Repeats requests, and reports a slow fetch, when these are due."""
        now = time.monotonic()
        if self.due_s > now:
            return
        self._engine.remind(self._op, limits.WEIGHTS_REMINDERS_MAX)
        self.due_s = now + limits.REMIND_S
        if not self._is_slow and now - self._since_s >= limits.WEIGHTS_SLOW_S:
            self._is_slow = True
            self._slow()
