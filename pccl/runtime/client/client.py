"""The control thread of a peer, and the methods with which user threads give it commands.

User threads do only one thing themselves: they send the vote of a small collective, which saves one
thread switch (`collective`). No exception can interrupt this halfway. The command that enters the
call is queued first, and no later command overtakes it. Then a single C call sends the vote and
records that it was sent. Whatever happens next (the answer, a broken connection, an exception that
ends the call), the control thread first enters the call, and knows whether the vote was sent.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pccl.insight import Explanation, LinkFacts, explain
from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.calls import Collective
from pccl.protocol.ring import successors
from pccl.protocol.tuning import Settings, Tuning
from pccl.runtime import limits, tcp
from pccl.runtime.client.call import Call, CallMetrics, End
from pccl.runtime.client.connection import MasterConnection
from pccl.runtime.client.control import ControlThread, Driver, PendingCalls, System
from pccl.runtime.client.engine import (
    COMPLETE,
    PROGRESS,
    STREAM_LOST,
    WRITTEN,
    Engine,
    Event,
)
from pccl.runtime.client.memory import Operands, Pieces, Pool
from pccl.runtime.client.streams import Streams
from pccl.runtime.config import Config
from pccl.runtime.resources import streams_max
from pccl.runtime.signals import Latch, insist
from pccl.security import Security
from pccl.support import address_text
from pccl.types import Result

log = logging.getLogger("pccl")


class Progress:
    """Asks the engine for the progress of long ops, which the master shows.

    It checks from time to time, and asks about each op that runs at two checks in a row.
    """

    def __init__(self, engine: Engine, peer: Peer, now: Callable[[], float]) -> None:
        self._engine, self._peer, self._now = engine, peer, now
        self._before: set[int] = set()  # the ops that ran at the last check
        self.due_s = math.inf  # when to check next; inf: no op ran

    def started(self) -> None:
        """An op has started."""
        if self.due_s == math.inf:
            self._check()

    def tick(self) -> None:
        if self.due_s <= self._now():
            for op in self._before.intersection(self._peer.moving):
                self._engine.query(op)
            self._check()

    def _check(self) -> None:
        self._before = set(self._peer.moving)
        self.due_s = self._now() + limits.PROGRESS_LOOK_S if self._peer.moves else math.inf


class PeerDriver(Driver):
    """The driver of a peer."""

    def __init__(
        self,
        peer: Peer,
        engine: Engine,
        streams: Streams,
        master: MasterConnection,
        pending: PendingCalls,
        metrics: CallMetrics,
        now: Callable[[], float],  # the clock
    ) -> None:
        super().__init__(peer, engine, streams, master, pending)
        self._peer, self._metrics = peer, metrics
        self.progress = Progress(engine, peer, now)
        self.effects |= {
            effects.OpenStream: self._open_stream,
            effects.EagerOp: engine.start_eagerly,
            effects.StartOp: self._start,
            effects.StartTransfer: self._start_transfer,
            effects.Store: self._store,
            effects.Follow: pending.note,
            effects.Measure: pending.note,
            effects.Fetched: pending.note,
            effects.Waits: lambda effect: pending.warn(peer.number, effect),
            effects.Fail: self._fail,
            effects.MembersChanged: self._members_changed,
        }
        self.events |= {
            COMPLETE: self._complete,
            STREAM_LOST: self._stream_lost,
            PROGRESS: lambda event: peer.engine_progress(event.op, event.done),
            WRITTEN: self._written,
        }

    def _fail(self, effect: effects.Fail) -> None:
        why = m.personal(effect.why, self._peer.number)
        self.pending.answer(effect if why == effect.why else replace(effect, why=why))

    def _members_changed(self, change: effects.MembersChanged) -> None:
        number, now = self._peer.number, f"{change.size} in its group"
        for level, what, who in (
            (logging.INFO, "left", change.left),
            (logging.WARNING, "lost", change.lost),
            (logging.WARNING if change.begun else logging.INFO, "joined", change.joined),
        ):
            if who:
                more = f"; and {len(who) - m.GONE_MAX} more" if len(who) > m.GONE_MAX else ""
                names = "; ".join(who[: m.GONE_MAX]) + more
                log.log(level, "peer %d: %s: %s; %s now", number, what, names, now)

    def _complete(self, event: Event) -> list[Any]:
        self._metrics.held(event.op)
        return self._peer.engine_complete(event.op, event.settled, event.tx_bytes, event.rx_bytes)

    def _stream_lost(self, event: Event) -> list[Any]:
        to, unreached = self._streams.lost(event)
        text = self._streams.text(event)
        log.info("peer %d: its connection to %s: %s", self._peer.number, to, text)
        if to is None:
            return []
        todo = self._peer.unreached(to, text, event.stream) if unreached else []
        up = self._streams.was_up(event.stream)
        return todo + self._peer.stream_lost(event.stream, f"its connection to {to}: {text}", up)

    def _written(self, event: Event) -> list[Any]:
        memory = self.pending.memory.get(event.op)
        if isinstance(memory, Operands) and memory.written is not None:
            memory.written(event.done)
        return []

    def _open_stream(self, effect: effects.OpenStream) -> None:
        self._metrics.opened()
        self._streams.open(effect.stream, effect.to, effect.nonce, effect.shares)

    def _start(self, effect: effects.StartOp) -> None:
        self._engine.start(effect)
        memory = self.pending.memory[effect.op]
        assert isinstance(memory, Operands)
        self._metrics.started(effect.op, memory.work.what)
        self.progress.started()

    def _start_transfer(self, effect: effects.StartTransfer) -> None:
        self._engine.start_transfer(effect)
        self.progress.started()

    def _store(self, effect: effects.Store) -> None:
        memory = self.pending.memory[effect.call]
        assert isinstance(memory, Operands)
        self._metrics.stored(effect.call, memory.work.what)
        memory.store(effect.data)


class PeerClient(ControlThread):
    """One peer's membership in one run, from connect to the end.

    Attributes:
        peer: the state machine.
        knowledge: its knowledge of the run, as of the last answer.
        metrics: the cost of its calls.

    Raises:
        OSError: the engine cannot listen here.
        PCCLError: INVALID_USAGE: keys are missing or unsafe.
    """

    _driver: PeerDriver

    def __init__(
        self,
        host: str,
        port: int,
        address: str,
        config: Config,
        security: Security | None,
        group: int,
        team: tuple[int, int],
        pool_size: int,
        system: System | None = None,
    ) -> None:
        settings = Settings(config.inline_bytes, pool_size, config.lanes, streams_max())
        self.peer = peer = Peer(address_text(host, port), settings)
        self.knowledge = peer.knowledge
        super().__init__(
            host,
            port,
            address,
            config,
            security,
            peer,
            lanes=pool_size,
            group=group,
            team=team,
            system=system,
        )
        self.metrics = metrics = CallMetrics(self._engine.cpu_s)
        self._pending = PendingCalls(metrics.ended, peer.awaits_withdrawal)
        self._driver = PeerDriver(
            peer, self._engine, self._streams, self._master, self._pending, metrics, self.now
        )
        self._timers.append(self._driver.progress)
        self._start()

    # ---- called by user threads ----

    def explain(self) -> Explanation:
        """The limits of the last collectives, from the metrics and the kernel's facts about the
        connections; from any thread."""
        metrics, known = self.metrics, self.knowledge
        after = (*successors(known.plan.rings, known.number), 0)[0]
        ends = {address: to for to, address in self._streams.neighbors if to.peer == after}
        master = self._master.address, self._master.port
        found = tcp.connections({*ends, master})
        link = None
        for address, to in ends.items():
            lanes, moved_s = found.get(address, ()), metrics.moved_s
            if lanes and moved_s > 0:
                busy = min(1.0, max(lane.busy_s for lane in lanes) / moved_s)
                full = min(1.0, max(lane.rwnd_limited_s for lane in lanes) / moved_s)
                again = sum(lane.retransmits for lane in lanes)
                rtt_s = min(lane.min_rtt_s for lane in lanes)
                link = LinkFacts(str(to), rtt_s, busy, full, again)
        trips = [one.min_rtt_s for one in found.get(master, ())]
        return explain([*metrics.samples], link, min(trips, default=None))

    @property
    def backend(self) -> str:
        """The backend that fills the engine's function table."""
        return self._engine.backend

    def inquire(self, call: Call) -> None:
        """Logs which peers a call waits for."""
        self.post(lambda: self.peer.inquire(call.number))

    def collective(
        self, call: Call, tag: int, operands: Operands, tuning: Tuning, stuck: bool = False
    ) -> None:
        """Enters a collective. `stuck`: the caller makes no other call before the answer."""
        data = operands.contribution() if tuning.inline else None
        rows, pair, spec = operands.rows, operands.pair, tuning.spec
        one = Collective(call.number, tag, spec, data, stuck, rows, pair, tuning.nbytes)
        sent, entered = (ctypes.c_int32 * 1)(), False

        def begin(number: int) -> list[effects.Effect]:
            nonlocal entered
            entered = True
            self._pending.memory[number] = operands
            return self.peer.collective(one, bool(sent[0]))

        self.begin(call, begin, wakes=False)
        if data is not None:
            with self._working:
                if entered:
                    return
                heard = None if self._pending.closed else self.peer.heard_if_free
                if heard is not None:
                    self._driver.again.append(self._master.read)
                    if self._master.dealer.send_now(m.encode(one.vote(heard)), sent):
                        self._driver.again.pop()  # unless an exception comes in between
                        return
        self._inbox.signal()

    def ready(self, call: Call, offset: int, length: int) -> None:
        """Reports that a progressive collective's input is ready between these offsets."""
        self._inbox.post(lambda: self._engine.ready(call.number, offset, length))

    def sync(self, call: Call, manifest: m.Manifest, pieces: Pieces, owner: object) -> None:
        """Enters a synchronization. Notes before the answer: Plan, Leaf, Fetched, in any number."""
        pool = Pool(pieces, len(manifest.entries), owner, limit=self.serve_limit)
        self._serve(call, pool, lambda number, serve: self.peer.sync(number, serve, manifest))

    def optimize(self, call: Call, pieces: Pieces, owner: object) -> None:
        """Enters an optimization. Notes before the answer: Plan, Leaf, Fetched, in any number."""
        self._serve(call, Pool(pieces, 0, owner), self.peer.optimize)

    def _serve(
        self, call: Call, pool: Pool, enter: Callable[[int, int], list[effects.Effect]]
    ) -> None:
        call.serve_op = serve = next(self._numbers)

        def begin(number: int) -> list[effects.Effect]:
            self._pending.memory[serve] = pool
            return enter(number, serve)

        self.begin(call, begin)

    @property
    def serve_limit(self) -> int:
        """Bytes of shared state that this peer may send in SERVE_INTERVAL_S; 0: no limit."""
        return int((self._config.sync_mbits or 0) * 1e6 / 8 * limits.SERVE_INTERVAL_S)

    def allow(self, call: Call) -> None:
        """Lets a limited peer serve for another SERVE_INTERVAL_S."""
        self._inbox.post(lambda: self._engine.allow(call.serve_op, self.serve_limit))

    def fetch(self, call: Call, seq: int, pieces: Pieces, first_counted: int, owner: object) -> int:
        """Fetches the content of a plan into these pieces; returns the number of the op."""
        op = next(self._numbers)

        def begin() -> None:
            todo = self.peer.fetch(op, seq)
            if todo:
                self._pending.memory[op] = Pool(pieces, first_counted, owner, call.put)
            self._perform(todo)

        self._inbox.post(begin)
        return op

    def remind(self, op: int, limit: int) -> None:
        """Repeats the unanswered requests of a fetch; see `Engine.remind`."""
        self._inbox.post(lambda: self._engine.remind(op, limit))

    def time_out(self, call: Call, why: str) -> None:
        """Withdraws a call. Its answer, a result or a failure, follows soon."""
        self.post(lambda: self.peer.time_out(call.number, why))

    def abandon(self, call: Call) -> None:
        """The caller leaves by an exception. If the call has begun, its answer follows soon."""

        def leave() -> None:
            if call.number in self._pending:
                self._perform(self.peer.cancel(call.number))
            elif call.end is None:
                call.put(effects.Fail(call.number, Result.INVALID_USAGE, "it was never made"))

        self._inbox.post(leave)

    def cancel(self, call: Call) -> None:
        """Ends a call whose caller leaves by an exception, even before the call has begun.

        Returns when nothing refers to the caller's memory any more and a connected master has taken
        the vote back, so that no later call of another peer meets this one. If the master does not
        answer, it waits at most WITHDRAWAL_S.
        """
        withdrawn = Latch()

        def settle() -> None:
            if call.end is None:
                self.abandon(call)
                call.settle()

        if not self.is_forked:
            insist(settle)
            self._inbox.post(lambda: self._pending.watch(call.number, withdrawn))
            withdrawn.wait(limits.WITHDRAWAL_S)

    def on_end(self, call: Call, callback: Callable[[End], None]) -> None:
        """Calls `callback`, in a thread of pccl, when a call has ended."""

        def note() -> None:
            if call.end is None:
                call.callbacks.append(callback)
            else:
                callback(call.end)

        self._inbox.post(note)

    def _welcomed(self, welcome: m.Welcome) -> None:
        super()._welcomed(welcome)
        self._pending.welcomed(welcome)
