"""A process that publishes or follows weights: its control thread, and packages in memory.

The control thread is as that of a peer (client.py), but an associate has an engine of its own: who
fetches weights has no connection to the streams of the run's peers. The other thread hashes what
arrives, and hands whole packages to the caller's `Keeper`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pccl.ext import ffi
from pccl.protocol import messages as m
from pccl.protocol.follower import Follower, machine
from pccl.protocol.peer import effects as common
from pccl.protocol.strategy import TRANSFER_BYTES, chunk_bytes
from pccl.runtime import forks, limits
from pccl.runtime.client.endpoint import Endpoint, Hello
from pccl.runtime.client.engine import (
    COMPLETE,
    FAILED,
    LEAF,
    LIED,
    SETTLED,
    STARVED,
    STREAM_UP,
    Event,
)
from pccl.runtime.client.memory import Pieces
from pccl.runtime.client.streams import Refused
from pccl.runtime.client.sync import LeafResult, Region, Staging, served
from pccl.runtime.config import Config
from pccl.runtime.digest import LEAF_BYTES, Digest, digests
from pccl.security import Security
from pccl.types import Result

ENTRIES = 2  # the head and the body, whose tables are the pieces below this


@dataclass(frozen=True, slots=True)
class Blob:
    """A package and its two parts, in memory that does not change."""

    package: m.Package
    head: memoryview
    body: memoryview
    found: tuple[Digest, ...]

    @classmethod
    def of(
        cls, version: int, base: int, content: bytes, head: memoryview, body: memoryview
    ) -> Blob:
        """Makes a package; its digests are computed here."""
        found = digests([(_address(part), part.nbytes) for part in (head, body)])
        package = m.Package(
            version, base, content, head.nbytes, found[0].root, body.nbytes, found[1].root
        )
        return cls(package, head, body, tuple(found))

    def pieces(self) -> tuple[Pieces, object]:
        """What is served, and what keeps it in memory."""
        pieces, tables = served(_regions(self.package, self.head, self.body), self.found)
        return pieces, (self, tables)


class Incoming:
    """A package that is being fetched: memory for it, and the verification of its leaves."""

    def __init__(self, package: m.Package) -> None:
        self.package = package
        plan = m.SyncPlan(0, 0, (), (), (0, 1), (package.head, package.body))
        self._staging = Staging(plan, _regions(package))

    def pieces(self) -> Pieces:
        """The memory into which the engine writes."""
        return self._staging.pieces()

    def verify(self, piece: int, leaf: int) -> list[LeafResult]:
        """As Staging.verify."""
        return self._staging.verify(piece, leaf)

    def parcel(self) -> Blob:
        """What has arrived, when all of it is proven."""
        head, body = (memoryview(self._staging.content(i)) for i in range(ENTRIES))
        found = digests([(_address(part), part.nbytes) for part in (head, body)])
        return Blob(self.package, head, body, tuple(found))


def _regions(package: m.Package, *parts: memoryview) -> list[Region]:
    addresses = [_address(part) for part in parts] or [0, 0]
    sizes = (package.head_bytes, package.body_bytes)
    return [
        Region("", 0, nbytes, False, address, nbytes)
        for address, nbytes in zip(addresses, sizes, strict=True)
    ]


def _address(part: memoryview) -> int:
    array: Any = ffi.from_buffer("char[]", part)
    return int(ffi.cast("uintptr_t", array))


log = logging.getLogger("pccl")

RUN = 1  # of all transfers: an engine of associates serves nothing else


class BlobStore(Protocol):
    """What the caller does with packages; in a thread of pccl, except `over` and `news`."""

    def fits(self, package: m.Package) -> bool:
        """Whether a package can be one for these tensors, by its sizes."""

    def work_in(self, parcel: Blob) -> tuple[int, Blob | None]:
        """Works a package in. Returns the version that it has now (0: none), and what else it can
        serve. An exception ends the associate."""

    def news(self, packages: tuple[m.Package, ...], head: int) -> str:
        """What can be had has changed, and the newest version ever.

        Returns why nothing more can be followed, or nothing.
        """

    def over(self, fail: common.Fail) -> None:
        """It is no associate any more."""


class Associate:
    """One associate of a run, from the first connection to the end.

    Args:
        host: host of the master.
        port: port of the master.
        address: current address of that host.
        hello: makes its first message from the engine's port and ipc address.
        config: timings and limits.
        security: the keys; None: nothing is encrypted.
        keeper: works packages in; None: it only publishes.
        relays: whether it serves to others what it has fetched.

    Raises:
        OSError: the engine cannot listen here.
        PCCLError: INVALID_USAGE: keys are missing or unsafe.
    """

    def __init__(
        self,
        host: str,
        port: int,
        address: str,
        hello: Hello,
        config: Config,
        security: Security | None,
        keeper: BlobStore,
        *,
        follows: bool,
        relays: bool,
    ) -> None:
        self._keeper = keeper
        self._endpoint = endpoint = Endpoint(
            address,
            config,
            security,
            lanes=0,
            read_engine=self._read_engine,
            say=lambda meet: self._perform(self._machine.meet(meet)),
        )
        with contextlib.ExitStack() as opened:  # what a start that fails closes
            opened.callback(endpoint.abandon)
            self._inbox, self._waiter = endpoint.inbox, endpoint.waiter
            self._engine, self._streams = endpoint.engine, endpoint.streams
            said = endpoint.introduce(hello, associate=True)
            self._machine = Follower(said, follows, relays, keeper.fits)
            self._master = endpoint.reach(host, port, self._machine)
            self._parcels: dict[tuple[int, int], Blob] = {}
            self._incoming: dict[tuple[int, int], Incoming] = {}
            self._memory: dict[int, object] = {}  # that the engine refers to, by op
            self._door = machine.Door(0, 0)
            self._keys: dict[int, str] = {}  # of those who may connect, by the stream to them
            self._answers: dict[int, queue.SimpleQueue[str]] = {}
            self._pace = _Pace()
            self._calls = 0
            self._again_at: float | None = None  # when to seek again
            self._leaving = self._sent = self._forked = False
            # how the attempt to be registered has ended: None, or why it failed
            self.welcome: queue.SimpleQueue[common.Fail | None] = queue.SimpleQueue()
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._run, name="pccl-associate", daemon=True)
            self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._worker = threading.Thread(target=self._work_in, name="pccl-weights", daemon=True)
            opened.callback(self._jobs.put, None)
            forks.watch(self)
            endpoint.begin(self._read_master, self._perform, self._worker, self._thread)
            opened.pop_all()
        self._inbox.post(lambda: self._perform(self._machine.join()))

    # ---- called by user threads ----

    @property
    def over(self) -> common.Fail | None:
        """Why it is no associate any more; None while it is."""
        return forks.FORKED if self._forked else self._machine.over

    @property
    def master(self) -> str:
        """`host:port` of the master."""
        return self._master.name

    def publish(self, parcels: tuple[Blob, ...]) -> queue.SimpleQueue[str]:
        """Publishes a version; the queue receives why that failed, or an empty text."""
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()

        def tell() -> None:
            why = self._machine.objection(parcels[0].package.version)
            if why:
                answer.put(why)
                return
            self._calls += 1
            self._answers[self._calls] = answer
            self._parcels.update((parcel.package.key, parcel) for parcel in parcels)
            packages = tuple(parcel.package for parcel in parcels)
            self._perform(self._machine.publish(self._calls, packages))

        self._inbox.post(tell)
        return answer

    def forked(self) -> None:
        """Called in a forked child, which must not use the parent's associate."""
        self._forked = True
        self._endpoint.forked()

    def close(self, why: str) -> None:
        """Leaves; returns when nothing refers to any memory any more. Idempotent."""

        def leave() -> None:
            self._leaving = True
            self._perform(self._machine.leave(why))

        if self._forked:
            return
        if not self._ended.is_set():
            self._inbox.post(leave)
        if threading.current_thread() not in (self._thread, self._worker):
            self._ended.wait()

    # ---- the thread that verifies ----

    def _work_in(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except ValueError as error:
                self._fail(str(error), Result.INVALID_ARGUMENT)
            except BaseException as error:
                log.error("the weights could not be worked in", exc_info=error)
                self._fail(f"an internal error of pccl, {error!r}; the log has it")

    def _fail(self, why: str, result: Result = Result.INTERNAL_ERROR) -> None:
        self._inbox.post(lambda: self._perform(self._machine.broken(why, result)))

    def _judge(self, incoming: Incoming, event: Event) -> None:
        results = incoming.verify(event.piece, event.leaf)

        def tell() -> None:
            self._sent = True
            for piece, leaf, good in results:
                self._engine.verified(event.op, piece, leaf, good)

        self._inbox.post(tell)

    def _take(self, incoming: Incoming) -> None:
        parcel = incoming.parcel()
        version, more = self._keeper.work_in(parcel)

        def tell() -> None:
            self._parcels[parcel.package.key] = parcel
            self._perform(self._machine.taken(parcel.package, version))
            if more is not None:
                self._parcels[more.package.key] = more
                self._perform(self._machine.keep(more.package))

        self._inbox.post(tell)

    # ---- the control thread ----

    def _run(self) -> None:
        try:
            self._waiter.add(self._inbox.socket, self._inbox.clear_signal)
            self._waiter.add(self._engine.socket, self._read_engine)
            while self._machine.over is None:
                ready = self._waiter.wait(self._patience_s() if self._inbox.may_wait() else 0.0)
                self._inbox.works()
                self._inbox.carry_out()
                for read in ready:
                    read()
                self._inbox.carry_out()
                self._tick()
                while self._sent:
                    self._sent = False
                    self._master.dealer.flush()
                    self._read_master()
                    self._read_engine()
        except BaseException as error:
            self._break_down(error)
        self._shut_down()

    def _break_down(self, error: BaseException) -> None:
        why = self._engine.broken or str(error)
        if not (self._engine.broken or isinstance(error, Refused)):
            log.error("the control thread of an associate failed", exc_info=error)
            why = f"an internal error of pccl, {error!r}; the log has it"
        with contextlib.suppress(Exception):
            self._perform(self._machine.broken(why))

    def _read_master(self) -> None:
        for message in self._master.dealer.heard():
            if isinstance(message, m.Welcome):
                self._master.answered()
                if message.warning:
                    log.warning("weights: %s", message.warning)
            self._perform(self._machine.received(message))
            if isinstance(message, m.Available):
                self.welcome.put(None)  # only the first one is read

    def _read_engine(self) -> None:
        for event in self._engine.events():
            if event.kind == LEAF:
                self._leaf(event)
            elif event.kind == COMPLETE:
                rate = self._pace.rate(event.op, event.rx_bytes)
                self._perform(self._machine.engine_complete(event.op, event.settled, rate))
            elif event.kind == FAILED:
                starved = event.status == STARVED
                why = self._streams.why(event)
                self._perform(self._machine.engine_failed(event.op, why, starved))
            elif event.kind == STREAM_UP:
                self._streams.up(event.stream)
            elif event.kind != SETTLED:
                to, _ = self._streams.lost(event)
                log.info("weights: the connection to %s: %s", to, event.text)
                if event.status == LIED:
                    log.warning("weights: %s gives other data than what was published", to)
                lied = event.status == LIED
                self._perform(self._machine.stream_lost(event.stream, lied))
            else:
                self._perform(self._machine.engine_settled(event.op))
            if event.settled or event.kind == SETTLED:
                self._memory.pop(event.op, None)
        if self._engine.broken:
            raise RuntimeError(self._engine.broken)

    def _leaf(self, event: Event) -> None:
        incoming = self._memory.get(event.op)
        if isinstance(incoming, Incoming):
            self._jobs.put(lambda: self._judge(incoming, event))

    # ---- time ----

    def _patience_s(self) -> float | None:
        due = (self._master.due_s, self._streams.due_s, self._pace.due_s, self._again_at)
        known = [each for each in due if each is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _tick(self) -> None:
        now = time.monotonic()
        if self._streams.waits:
            self._streams.tick()
        self._master.tick()
        if self._again_at is not None and self._again_at <= now:
            self._again_at = None
            self._perform(self._machine.rested())
        if self._pace.due_s is not None and self._pace.due_s <= now:
            self._sent = True
            self._engine.remind(self._pace.op, limits.WEIGHTS_REMINDERS_MAX)
            if self._pace.remind(now):
                self._perform(self._machine.slow())

    # ---- effects ----

    def _perform(self, todo: list[machine.Effect]) -> None:
        for effect in todo:
            self._sent = True
            self._perform_one(effect)

    def _perform_one(self, effect: machine.Effect) -> None:
        match effect:
            case common.Send(message):
                self._master.dealer.say(message)
            case machine.Door():
                self._door = effect
                self._admit()
            case machine.Reach(stream, to, nonce):
                if to.curve:
                    self._keys[stream] = to.curve
                    self._engine.admit(to.curve)
                self._streams.open(stream, to, nonce)
            case common.CloseStream(stream):
                self._streams.close(stream)
                if self._keys.pop(stream, "") not in ("", *self._keys.values()):
                    self._admit()
            case common.Arrange(message):
                self._streams.arranged(message)
            case machine.Offer(op, package):
                self._offer(op, self._parcels[package.key])
            case machine.Gather(op, package):
                self._gather(op, package)
            case common.StartTransfer(op, seq, nonce, ends):
                size = chunk_bytes(TRANSFER_BYTES, 1, False, False)
                self._engine.start_transfer(op, seq=seq, nonce=nonce, chunk_bytes=size, ends=ends)
                self._pace.began(op)
            case common.CommitOp(op):
                self._engine.commit(op)
            case common.AbortOp(op):
                self._pace.ended(op)
                self._engine.abort(op)
                incoming = self._memory.get(op)
                if isinstance(incoming, Incoming):  # else it would be kept until it has arrived
                    self._incoming.pop(incoming.package.key, None)
            case machine.Rest(why):
                log.info("weights: a fetch goes on elsewhere: %s", why)
                self._again_at = time.monotonic() + limits.WEIGHTS_REST_S
            case _:
                self._tell(effect)

    def _admit(self) -> None:
        """Those to whom streams lead may connect, and nobody else any more."""
        self._engine.expect(self._door.number, self._door.nonce, sorted({*self._keys.values()}))

    def _tell(self, effect: machine.Effect) -> None:
        """Performs what concerns the caller."""
        match effect:
            case machine.Arrived(package):
                incoming = self._incoming.pop(package.key)
                self._jobs.put(lambda: self._take(incoming))
            case machine.Forgotten(package):
                self._parcels.pop(package.key, None)
            case machine.Answered(call, why):
                self._answers.pop(call).put(why)
            case machine.News(packages, head):
                if why := self._keeper.news(packages, head):
                    self._perform(self._machine.broken(why, Result.INVALID_ARGUMENT))
            case machine.Over(fail):
                if self._machine.number:
                    self._keeper.over(fail)
                else:
                    self.welcome.put(fail)

    def _offer(self, op: int, parcel: Blob) -> None:
        pieces, self._memory[op] = parcel.pieces()
        self._engine.register_serve(
            op, run=RUN, tag=_tag(parcel.package), min_seq=0, pieces=pieces, first_counted=ENTRIES
        )

    def _gather(self, op: int, package: m.Package) -> None:
        incoming = self._incoming[package.key] = Incoming(package)
        self._memory[op] = incoming
        self._engine.register_fetch(
            op,
            run=RUN,
            tag=_tag(package),
            min_seq=0,
            pieces=incoming.pieces(),
            first_counted=ENTRIES,
            leaf_bytes=LEAF_BYTES,
        )
        self._pace.fetches(op)

    # ---- the end ----

    def _shut_down(self) -> None:
        with contextlib.ExitStack() as last:  # runs in reverse order
            last.callback(self._ended.set)
            last.callback(self._inbox.end)
            last.callback(self._jobs.put, None)
            last.callback(self._memory.clear)
            last.callback(self._endpoint.close)


class _Pace:
    """The time that a fetch takes.

    Attributes:
        op: of the fetch; 0: there is none.
        due_s: when to remind its holder; None: there is none.
    """

    def __init__(self) -> None:
        self.op = 0
        self.due_s: float | None = None
        self._first_s = 0.0  # when it began
        self._since_s = 0.0  # when it was sent to its present holder
        self._slow = False

    def fetches(self, op: int) -> None:
        """Another fetch begins."""
        self.op, self._first_s = op, time.monotonic()

    def began(self, op: int) -> None:
        """An op has begun, or goes on with another holder."""
        if op == self.op:
            self._slow, now = False, time.monotonic()
            self._since_s, self.due_s = now, now + limits.REMIND_S

    def ended(self, op: int) -> None:
        """An op has ended."""
        if op == self.op:
            self.op, self.due_s = 0, None

    def rate(self, op: int, nbytes: int) -> int:
        """Bytes per second of a fetch that is complete; it has ended."""
        seconds = max(1e-3, time.monotonic() - self._first_s)
        self.ended(op)
        return int(nbytes / seconds)

    def remind(self, now: float) -> bool:
        """A reminder was sent. Returns, once for each holder, whether the fetch takes long."""
        self.due_s = now + limits.REMIND_S
        if self._slow or now - self._since_s < limits.WEIGHTS_SLOW_S:
            return False
        self._slow = True
        return True


def _tag(package: m.Package) -> int:
    return 2 * package.version + (package.base == 0)
