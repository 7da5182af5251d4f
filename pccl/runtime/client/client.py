"""The control thread of a peer: drives its state machine, its engine and the master's connection.

User threads post commands and wait on a `Call`; inbox.py says why, and shortcut.py describes the
one thing that they do themselves. The control thread never blocks, and handles no bulk data.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from pccl.insight import Explanation, LinkFacts, explain
from pccl.protocol import messages as m
from pccl.protocol.peer import Peer, effects
from pccl.protocol.rounds import Grace
from pccl.protocol.strategy import Conditions, Settings, Strategy
from pccl.runtime import forks, limits, tcp
from pccl.runtime.client.call import Call, End
from pccl.runtime.client.call_metrics import CallMetrics
from pccl.runtime.client.endpoint import Endpoint, Hello
from pccl.runtime.client.memory import Operands, Pieces, Pool
from pccl.runtime.client.ops import EngineEvents, PendingCalls, Performer
from pccl.runtime.client.progress import Progress
from pccl.runtime.client.shortcut import Shortcut
from pccl.runtime.client.streams import Refused
from pccl.runtime.config import Config
from pccl.runtime.uninterrupted import insist
from pccl.security import Security
from pccl.support.text import address_text
from pccl.types import Result

log = logging.getLogger("pccl")


class Client:
    """One peer's membership in one run, from connect to the end.

    Args:
        host: host of the master.
        port: port of the master.
        address: current address of that host; to reconnect, the name is resolved again.
        hello: makes the first message from the engine's port and ipc address.
        pool_size: lanes to each neighbour; 0: chosen by the engine.
        config: timings and limits.
        security: the keys; None: nothing is encrypted.

    Attributes:
        figures: what its calls have cost.

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
        pool_size: int,
        config: Config,
        security: Security | None = None,
    ) -> None:
        self._config = config
        settings = Settings(config.inline_bytes, pool_size, config.lanes)
        self._peer = Peer(address_text(host, port), settings)
        self._numbers = itertools.count(1)
        self._ended = threading.Event()
        self._leaving = self._failed = self._forked = False
        self._withdrawing: dict[int, threading.Event] = {}  # calls that the master may still have
        self._working = threading.RLock()  # its holder uses the connection to the master
        self._endpoint = endpoint = Endpoint(
            address,
            config,
            security,
            lanes=pool_size,
            read_engine=lambda: self._events.read(),
            say=lambda meet: self._perform(self._peer.meet(meet)),
        )
        with contextlib.ExitStack() as opened:  # what a start that fails closes
            opened.callback(endpoint.abandon)
            self._inbox, self._waiter = endpoint.inbox, endpoint.waiter
            self._engine, self._streams = endpoint.engine, endpoint.streams
            self._master = endpoint.reach(host, port, self._peer)
            self._hello = endpoint.introduce(hello, relay=endpoint.meetings.port)
            self.figures = CallMetrics(lambda: self._engine.cpu_s)
            self._pending = PendingCalls(self.figures)
            self._performer = Performer(
                self._peer,
                self._engine,
                self._streams,
                self._master,
                self._pending,
                self.figures,
            )
            self._perform = self._performer.perform
            self._events = EngineEvents(
                self._engine, self._peer, self._streams, self._pending, self._perform, self.figures
            )
            self._engine.together = True
            self._progress = Progress(self._engine, self._peer)
            self._thread = threading.Thread(target=self._run, name="pccl-control", daemon=True)
            forks.watch(self)
            endpoint.begin(self._read_master, self._perform, self._thread)
            opened.pop_all()

    # ---- called by user threads ----

    @property
    def master(self) -> str:
        """`host:port` of the master."""
        return self._master.name

    @property
    def world(self) -> m.World:
        """The world sizes as of the last answer."""
        return self._peer.world

    @property
    def plan(self) -> m.Plan:
        """The group's peers and rings as of the last answer."""
        return self._peer.plan

    @property
    def number(self) -> int:
        """This peer's number."""
        return self._peer.number

    def explain(self) -> Explanation:
        """What limits the last collectives, by the figures and by what the kernel knows of the
        connections; from any thread."""
        figures, number, plan = self.figures, self.number, self.plan
        order = plan.rings[0].order if plan.rings else ()
        after = order[(order.index(number) + 1) % len(order)] if number in order else 0
        ends = {address: to for to, address in self._streams.neighbours if to.peer == after}
        master = self._master.address, self._master.port
        found = tcp.connections({*ends, master})
        link = None
        for address, to in ends.items():
            lanes, moved_s = found.get(address, ()), figures.moved_s
            if lanes and moved_s > 0:
                busy = min(1.0, max(lane.busy_s for lane in lanes) / moved_s)
                full = min(1.0, max(lane.rwnd_limited_s for lane in lanes) / moved_s)
                again = sum(lane.retransmits for lane in lanes)
                rtt_s = min(lane.min_rtt_s for lane in lanes)
                link = LinkFacts(str(to), rtt_s, busy, full, again)
        trips = [one.min_rtt_s for one in found.get(master, ())]
        return explain([*figures.samples], link, min(trips, default=None))

    @property
    def over(self) -> effects.Fail | None:
        """Why this peer is no longer in the run; None while it is."""
        return forks.FORKED if self._forked else self._peer.over

    def forked(self) -> None:
        """Called in a forked child, which must not use the parent's peer."""
        self._forked = True
        self._endpoint.forked()

    @property
    def backend(self) -> str:
        """The backend that fills the engine's function table."""
        return self._engine.backend

    def call(self) -> Call:
        """A new call, which has not been made yet."""
        return Call(next(self._numbers))

    def join(self, call: Call) -> None:
        """Asks to join. Notes: Welcome, then the answer when this peer is accepted."""
        self._begin(call, lambda number: self._peer.join(number, self._hello))

    def update_topology(self, call: Call) -> None:
        """Enters the round that admits pending peers."""
        self._begin(call, self._peer.update_topology)

    def finish(self, call: Call) -> None:
        """Enters the round that ends the run."""
        self._begin(call, self._peer.finish)

    def are_peers_pending(
        self, call: Call, stuck: bool = False, patient: bool = False, grace: Grace | None = None
    ) -> None:
        """Enters the round that asks. `stuck`: the caller makes no other call before the answer.

        `patient`: while all callers are patient, "no" is not answered (see `hurry`). `grace`: who
        is not there when it is over is dropped from the run.
        """
        peer = self._peer
        self._begin(call, lambda number: peer.are_peers_pending(number, stuck, patient, grace))

    def hurry(self, call: Call) -> None:
        """The caller of `are_peers_pending` is no longer patient."""
        self._inbox.post(lambda: self._perform(self._peer.hurry(call.number)))

    def inquire(self, call: Call) -> None:
        """Logs which peers a call waits for."""
        self._inbox.post(lambda: self._perform(self._peer.inquire(call.number)))

    @property
    def conditions(self) -> Conditions:
        """On which it depends how a collective travels, as of the last answer."""
        return self._peer.knowledge.conditions

    def collective(
        self, call: Call, tag: int, operands: Operands, strategy: Strategy, stuck: bool = False
    ) -> None:
        """Enters a collective. `stuck`: the caller makes no other call before the answer."""
        work, data = strategy.spec, operands.contribution() if strategy.inline else None
        shortcut = Shortcut()

        def begin(number: int) -> list[effects.Effect]:
            shortcut.entered = True
            self._pending.memory[number] = operands
            rows, pair, nbytes = operands.rows, operands.pair, operands.nbytes
            return self._peer.collective(
                number, tag, work, data, stuck, shortcut.sent, rows, pair, nbytes
            )

        self._leave_to_begin(call, begin)
        if data is not None:
            with self._working:
                if shortcut.entered:
                    return
                heard = None if self._pending.closed else self._peer.heard_if_free
                if heard is not None:
                    vote = m.StartVote(call.number, tag, work, data, heard, stuck)
                    before, self._performer.heard = self._performer.heard, True
                    if shortcut.send(self._master.dealer, m.encode(vote)):
                        self._performer.heard = before  # unless an exception comes in between
                        return
        self._inbox.signal()

    def ready(self, call: Call, offset: int, length: int) -> None:
        """Says that a progressive collective's input is in its memory between these offsets."""
        self._inbox.post(lambda: self._engine.ready(call.number, offset, length))

    def sync(self, call: Call, manifest: m.Manifest, pieces: Pieces, owner: object) -> None:
        """Enters a synchronisation. Notes before the answer: Plan, Leaf, Fetched, in any number."""
        pool = Pool(pieces, len(manifest.entries), owner, limit=self.serve_limit)
        self._serve(call, pool, lambda number, serve: self._peer.sync(number, serve, manifest))

    def optimize(self, call: Call, pieces: Pieces, owner: object) -> None:
        """Enters an optimization. Notes before the answer: Plan, Leaf, Fetched, in any number."""
        self._serve(call, Pool(pieces, 0, owner), self._peer.optimize)

    def _serve(
        self, call: Call, pool: Pool, enter: Callable[[int, int], list[effects.Effect]]
    ) -> None:
        call.serve_op = serve = next(self._numbers)

        def begin(number: int) -> list[effects.Effect]:
            self._pending.memory[serve] = pool
            return enter(number, serve)

        self._begin(call, begin)

    @property
    def serve_limit(self) -> int:
        """Bytes of shared state that this peer may send in SERVE_INTERVAL_S; 0: no limit."""
        return int((self._config.sync_mbits or 0) * 1e6 / 8 * limits.SERVE_INTERVAL_S)

    def allow(self, call: Call) -> None:
        """Lets a limited peer serve for another SERVE_INTERVAL_S."""

        def tell() -> None:
            self._engine.allow(call.serve_op, self.serve_limit)

        self._inbox.post(tell)

    def fetch(self, call: Call, seq: int, pieces: Pieces, first_counted: int, owner: object) -> int:
        """Fetches what a plan lists into these pieces; returns the number of the op."""
        op = next(self._numbers)

        def begin() -> None:
            todo = self._peer.fetch(op, seq)
            if todo:
                self._pending.memory[op] = Pool(pieces, first_counted, owner, call)
            self._perform(todo)

        self._inbox.post(begin)
        return op

    def remind(self, op: int, limit: int) -> None:
        """Repeats the unanswered requests of a fetch; see `Engine.remind`."""

        def tell() -> None:
            self._engine.remind(op, limit)

        self._inbox.post(tell)

    def verified(self, op: int, results: list[tuple[int, int, bool]]) -> None:
        """Tells a fetch which leaves (piece, leaf) are correct."""

        def tell() -> None:
            for piece, leaf, good in results:
                self._engine.verified(op, piece, leaf, good)

        self._inbox.post(tell)

    def fetched(
        self, seq: int, ok: bool, why: str, differences: tuple[m.Difference, ...] = ()
    ) -> None:
        """Reports whether a plan's content has arrived, and how the old content differed."""
        self._inbox.post(lambda: self._perform(self._peer.fetched(seq, ok, why, differences)))

    def measured(self, seq: int, rate: int, delay_us: int) -> None:
        """Reports the result of a probe, and ends it; see `Measured`."""
        self._inbox.post(lambda: self._perform(self._peer.measured(seq, rate, delay_us)))

    def time_out(self, call: Call, why: str) -> None:
        """Withdraws a call, which is then answered soon, with its result or a failure."""
        self._inbox.post(lambda: self._perform(self._peer.time_out(call.number, why)))

    def cancel(self, call: Call) -> None:
        """Ends a call whose caller is leaving by an exception; it may not even have begun.

        Returns when nothing refers to the caller's memory any more and, if the master is connected,
        it has taken the vote back: no call that another peer makes from then on meets this one.
        A master that does not answer is waited for no longer than WITHDRAWAL_S.
        """
        withdrawn = threading.Event()

        def leave() -> None:
            if call.number in self._pending:
                self._perform(self._peer.cancel(call.number))
            elif call.end is None:
                call.put(effects.Fail(call.number, Result.INVALID_USAGE, "it was never made"))

        def settle() -> None:
            if call.end is None:
                self._inbox.post(leave)
                call.settle()

        def watch() -> None:
            self._withdrawing[call.number] = withdrawn
            self._tell_withdrawn()

        if not self._forked:
            insist(settle)
            self._inbox.post(watch)
            withdrawn.wait(limits.WITHDRAWAL_S)

    def on_end(self, call: Call, told: Callable[[End], None]) -> None:
        """Calls `told`, in a thread of pccl, when a call has ended."""

        def note() -> None:
            if call.end is None:
                call.callbacks.append(told)
            else:
                told(call.end)

        self._inbox.post(note)

    def close(self, why: str) -> None:
        """Leaves the run; waiting calls fail with `why`. Idempotent.

        Returns when nothing refers to users' memory any more.
        """

        def leave() -> None:
            self._leaving = True
            self._perform(self._peer.leave(why))

        def wait() -> None:
            if not self._ended.is_set():
                self._inbox.post(leave)
            # a communicator may be garbage-collected in the control thread itself
            if threading.current_thread() is not self._thread:
                self._ended.wait()

        if not self._forked:
            insist(wait)

    def _begin(self, call: Call, event: Callable[[int], list[effects.Effect]]) -> None:
        self._leave_to_begin(call, event)
        self._inbox.signal()

    def _leave_to_begin(self, call: Call, event: Callable[[int], list[effects.Effect]]) -> None:
        def begin() -> None:
            self._pending.add(call)
            self._perform(event(call.number))

        self._inbox.leave(begin)

    # ---- the control thread ----

    def _run(self) -> None:
        try:
            self._waiter.add(self._inbox.socket, self._inbox.clear_signal)
            self._waiter.add(self._engine.socket, self._events.read)
            while not (self._failed or (self._leaving and self._peer.idle)):
                ready = self._waiter.wait(self._patience_s() if self._inbox.may_wait() else 0.0)
                self._inbox.works()
                with self._working:
                    self._work(ready)
                self._pending.tell()
                if self._withdrawing:
                    self._tell_withdrawn()
        except BaseException as error:  # of any kind: waiting callers need an answer
            self._break_down(error)
        with self._working:
            self._pending.closed = True
        self._shut_down()

    def _tell_withdrawn(self) -> None:
        """Tells those who wait for it that the master has taken back the vote of their call."""
        for number in [n for n in self._withdrawing if not self._peer.awaits_withdrawal(n)]:
            self._withdrawing.pop(number).set()

    def _work(self, ready: Sequence[Callable[[], object]]) -> None:
        """Runs commands, reads sockets, and performs effects until nothing is left to do."""
        try:
            self._inbox.carry_out()  # first: a message may answer a queued command (shortcut.py)
            self._performer.flush()  # each call of a socket may cost a wait for the global lock
            for read in ready:
                read()
            self._inbox.carry_out()
            self._tick()
            while self._exchange():
                pass
        except Exception as error:
            self._break_down(error)

    def _exchange(self) -> bool:
        """Sends what there is to send, and reads what has come. Whether anything was read."""
        performer = self._performer
        performer.flush()
        heard, performer.heard = performer.heard, False
        told, performer.told = performer.told, False
        if heard:
            self._read_master()
        if told:
            self._events.read()
        return heard or told

    def _break_down(self, error: BaseException) -> None:
        """Ends the membership after an internal error, with its reason."""
        self._failed = True
        if self._engine.broken:
            why = self._engine.broken
        elif isinstance(error, Refused):
            why = str(error)
        elif isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
            why = "this process has no memory left for pccl's own work"
        else:
            log.error("the control thread of peer %d failed", self._peer.number, exc_info=error)
            why = f"an internal error of pccl, {type(error).__name__}: {error}; the log has it"
        with contextlib.suppress(Exception):  # `_shut_down` answers the remaining calls
            self._perform(self._peer.broken(why))

    def _read_master(self) -> None:
        for message in self._master.dealer.heard():
            todo = self._peer.received(message)
            self._notice(message)
            self._perform(todo)

    def _notice(self, message: m.MasterMessage) -> None:
        """Does what a message means for this client, beside the effects of the state machine."""
        if isinstance(message, m.Plan):
            keys = (info.curve for info in message.peers if info.curve)
            self._engine.expect(self._peer.number, message.nonce, keys)
        if isinstance(message, m.Resumed | m.Welcome):
            self._master.answered()
        if isinstance(message, m.Welcome):
            self._pending.welcomed(message)
            if message.warning:
                log.warning("peer %d: %s", message.peer, message.warning)

    def _patience_s(self) -> float | None:
        """How long to wait for events; None if nothing has a time limit."""
        if self._peer.over is not None:
            return None
        all_due = self._master.due_s, self._streams.due_s, self._progress.due_s
        due = [each for each in all_due if each is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tick(self) -> None:
        """Does whatever is due."""
        if self._streams.waits:
            self._streams.tick()
        self._master.tick()
        self._progress.tick()

    # ---- the end ----

    def _shut_down(self) -> None:
        """Releases everything and answers all waiting calls, whatever fails on the way."""
        with contextlib.ExitStack() as last:  # runs in reverse order
            last.callback(self._ended.set)
            last.callback(lambda: self._pending.fail_all(self._peer.over))
            last.callback(self._tell_withdrawn)
            last.callback(self._inbox.end)
            last.callback(self._pending.memory.clear)
            last.callback(self._endpoint.close)
