"""The control thread of a client: a peer, or a client that publishes or follows weights.

An exception can be raised between any two bytecodes of a user thread: by a signal handler in the
main thread, by `PyThreadState_SetAsyncExc` in any thread. During protocol work, it would separate a
change of state from its messages and commands, and leave an inconsistent state. So user threads do
a single atomic thing: they append a command to the inbox, and wait on a `Call`. The control thread
does the work. It runs no signal handlers and is unknown to the program. It never blocks, and
handles no bulk data.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import zmq
from msgspec.structs import replace

from pccl.kernels import arithmetic_digest
from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.peer import effects
from pccl.runtime import forks
from pccl.runtime.client.call import Call, End, Leaf
from pccl.runtime.client.connection import Dealer, Identity, Machine, MasterConnection
from pccl.runtime.client.engine import (
    FAILED,
    LEAF,
    NO_MEMORY,
    SETTLED,
    STARVED,
    STREAM_UP,
    Engine,
    EngineOptions,
    Event,
    Ids,
    Part,
)
from pccl.runtime.client.memory import Operands, Pool, wire_format
from pccl.runtime.client.rendezvous import Rendezvous, RendezvousPoint
from pccl.runtime.client.streams import Refused, Streams, shortage
from pccl.runtime.config import Config, default_name, machine_id
from pccl.runtime.digest import LEAF_BYTES
from pccl.runtime.resolve import Resolver, everywhere, further_hosts
from pccl.runtime.signals import Latch, aside, insist
from pccl.runtime.sockets import Waiter
from pccl.security import Security
from pccl.types import TRAITS, CollectiveKind, Result
from pccl.version import __version__

log = logging.getLogger("pccl")

Command: TypeAlias = Callable[[], None]


class Inbox:
    """Commands in the order in which they were queued.

    The control thread calls `may_wait` when it is about to wait, and then checks for commands once
    more. So a command wakes the thread only if it waits. The thread carries out commands that
    arrive while it works with the earlier ones, and sends their messages together.

    Args:
        wake: wakes the control thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._commands: deque[Command] = deque()
        self._ended = self._forked = self._waits = False
        self._wake = wake

    def post(self, command: Command) -> None:
        """Queues a command, and wakes the control thread if it waits."""
        self.leave(command)
        self.signal()

    def leave(self, command: Command) -> None:
        """Queues a command without waking the control thread; see `signal`."""
        if not self._forked:
            self._commands.append(command)

    def signal(self) -> None:
        """Wakes the control thread; after its end, runs the commands in this thread."""
        if self._waits and not (self._ended or self._forked):
            self._wake()
        if self._ended:
            self.carry_out()

    def may_wait(self) -> bool:
        """The control thread may wait until `carry_out`. Returns True if there are no commands."""
        self._waits = True
        return not self._commands

    def forked(self) -> None:
        """In a forked child there is no control thread: commands are dropped."""
        self._forked = True
        self._commands.clear()

    def carry_out(self) -> None:
        """Runs the commands; the control thread waits no more."""
        self._waits = False
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # after the end, another thread may have come first
                return
            try:
                command()
            except BaseException:
                if not self._ended:  # `end` repeats the command: its call may not be known yet
                    self._commands.appendleft(command)
                raise

    def end(self) -> None:
        """The control thread ends. Later commands run in the thread that posts them."""
        self._ended = True
        while self._commands:
            try:
                self.carry_out()
            except Exception:  # the others still get their turn
                log.debug("a command failed after the end", exc_info=True)


class Timer(Protocol):
    """Work that is due at some time."""

    @property
    def due_s(self) -> float:
        """When `tick` must be called next; inf: not at all."""

    def tick(self) -> None:
        """Does whatever is due."""


class System:
    """The parts of the operating system that a client uses. A simulation passes another one.

    Attributes:
        now: the clock for all time limits, in seconds.
        token: makes a secret.
        aside: does work that no exception may interrupt.
        shortage: says why the system provides no socket.
        waiter, engine, point: make these.

    Raises:
        OSError: there is no descriptor left.
    """

    now = staticmethod(time.monotonic)
    token = staticmethod(lambda: os.urandom(16).hex())
    aside, shortage = staticmethod(aside), staticmethod(shortage)
    waiter, engine, point = Waiter, Engine, RendezvousPoint

    def __init__(self) -> None:
        try:
            self._context = zmq.Context()
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot begin: {error}") from None

    def dealer(
        self, address: str, port: int, config: Config, secure: Callable[[zmq.Socket[bytes]], None]
    ) -> Dealer:
        """Begins to connect to a master. The arguments are those of a Dealer."""
        return Dealer(self._context, address, port, config, secure)

    def start(self, thread: threading.Thread) -> None:
        """Starts a thread.

        Raises:
            OSError: the system provides none.
        """
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"cannot begin: {error}") from None

    def close(self) -> None:
        """Closes what is still open, and returns when the last messages are on their way."""
        self._context.destroy(linger=0)


def _parts(memory: Operands) -> list[Part]:
    if memory.wide is not None:
        memory.wide.is_used = True
        wide = memory.wide.parts
    else:
        wide = [None] * len(memory.each)
    # The engine writes the result only on the root, but needs an address on every peer.
    unused = memory.work.what is CollectiveKind.REDUCE
    return [
        Part(
            each.send.address,
            each.recv.address or (each.send.address if unused else 0),
            each.count,
            each.send.dtype.value,
            0 if each.error is None else each.error.address,
        )
        if copied is None
        else Part(*copied)
        for each, copied in zip(memory.each, wide, strict=True)
    ]


class PendingCalls:
    """Calls by number, and memory by op.

    Args:
        ended: called with the end of a call, and the time of its beginning.
        withdraws: whether the master is still asked to take back the vote of a call.
    """

    def __init__(
        self,
        ended: Callable[[End, float], None] = lambda end, began_s: None,
        withdraws: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._ended, self._withdraws = ended, withdraws
        # op -> the memory that the engine uses, or is about to use
        self.memory: dict[int, Operands | Pool] = {}
        # whether the control thread has ended; callers' threads then answer their own calls
        self.closed = False
        self._calls: dict[int, Call] = {}
        self._answered: list[tuple[Call, End]] = []  # not notified yet
        self._withdrawing: dict[int, Latch] = {}  # set when the vote is taken back

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, call: Call) -> None:
        self._calls[call.number] = call

    def welcomed(self, message: m.Welcome) -> None:
        """Tells all calls that the master has registered this peer."""
        for call in self._calls.values():
            call.put(message)

    def note(self, effect: effects.Follow | effects.Measure | effects.Fetched) -> None:
        """Gives a call a note that is not its answer."""
        self._calls[effect.call].put(effect)

    def warn(self, peer: int, effect: effects.Waits) -> None:
        """Logs which peers a call waits for."""
        call = self._calls.get(effect.call)
        if call is not None:
            waited_s = time.monotonic() - call.began_s
            why = f"{effect.why}; {call.aim}" if call.aim else effect.why
            log.warning("peer %d has waited %.0f s %s", peer, waited_s, why)

    def answer(self, effect: effects.Answer | effects.Fail) -> None:
        """Ends a call; `notify` then delivers the answer."""
        self.memory.pop(effect.call, None)  # no op of the engine needs it any more
        call = self._calls.pop(effect.call, None)
        if call is not None:
            self._ended(effect, call.began_s)
        if call is not None and self.closed:  # made after the end, in the caller's own thread
            call.put(effect)
        elif call is not None:
            self._answered.append((call, effect))

    def notify(self) -> None:
        """Delivers the answers. This comes last, because woken callers compete for the GIL."""
        answered, self._answered = self._answered, []
        for call, end in answered:
            call.put(end)
        if self._withdrawing:
            for number in [n for n in self._withdrawing if not self._withdraws(n)]:
                self._withdrawing.pop(number).set()

    def watch(self, number: int, withdrawn: Latch) -> None:
        """Sets the event when the master has taken back the vote of an abandoned call."""
        self._withdrawing[number] = withdrawn
        self.notify()

    def fail_all(self, over: effects.Fail | None) -> None:
        ended = effects.Fail(0, Result.INTERNAL_ERROR, "the communicator has ended")
        for number in list(self._calls):
            self.answer(replace(over or ended, call=number))
        self.notify()


class Driver:
    """Performs the effects of a state machine in their order, and reads the engine's events.

    Only the control thread uses it, until that thread has ended. Peers and clients of weights add
    their own entries to its two tables.

    Attributes:
        pending: the calls, and their memory.
        again: reads what may have arrived without a further signal.
        effects: the function that performs an effect, by the effect's type.
        events: the function that handles an event, by the event's kind; it returns effects.
    """

    def __init__(
        self,
        machine: Machine,  # the state machine
        engine: Engine,  # moves bulk data
        streams: Streams,  # opens and closes the engine's streams
        master: MasterConnection,  # the connection to it
        pending: PendingCalls,  # the calls, and their memory
    ) -> None:
        self.again: list[Callable[[], None]] = []
        self.pending = pending
        self._machine, self._engine, self._streams, self._master = machine, engine, streams, master
        self.effects: dict[type, Callable[[Any], object]] = {
            effects.Send: lambda effect: master.dealer.send(effect.message),
            effects.Expect: lambda one: engine.expect(one.number, one.nonce, one.keys),
            effects.CloseStream: lambda effect: streams.close(effect.stream),
            effects.Arrange: lambda effect: streams.arranged(effect.message),
            effects.RegisterOp: self._register,
            effects.CommitOp: lambda effect: engine.commit(effect.op),
            effects.AbortOp: lambda effect: engine.abort(effect.op),
            effects.Answer: pending.answer,
            effects.Fail: pending.answer,
        }
        self.events: dict[int, Callable[[Event], list[Any]]] = {
            FAILED: self._failed,
            SETTLED: lambda one: machine.engine_settled(one.op, one.tx_bytes, one.rx_bytes),
            LEAF: self._leaf,
            STREAM_UP: self._stream_up,
        }

    def perform(self, todo: list[Any]) -> None:
        for effect in todo:
            self.effects[type(effect)](effect)

    def flush(self) -> None:
        """Sends all commands, and then all messages, which may depend on the commands."""
        if self._engine.unsent and self._engine.flush():
            self.again.append(self.read)
        if self._master.dealer.unsent and self._master.dealer.flush():
            self.again.append(self._master.read)

    def read(self) -> None:
        """Reads all events of the engine that have arrived.

        Raises:
            RuntimeError: the engine has stopped; the text says why.
            Refused: this process gets no sockets for its streams.
        """
        for event in self._engine.events():
            todo = self.events[event.kind](event)
            if event.settled or event.kind == SETTLED:
                self.pending.memory.pop(event.op, None)
            self.perform(todo)
        if self._engine.broken and not self.pending.closed:
            raise RuntimeError(self._engine.broken)

    def _failed(self, event: Event) -> list[Any]:
        starved = event.seq if event.status == STARVED else 0
        cause = m.Cause.MEMORY if event.status == NO_MEMORY else m.Cause.OTHER
        return self._machine.engine_failed(event.op, self._streams.why(event), starved, cause)

    def _leaf(self, event: Event) -> list[Any]:
        memory = self.pending.memory.get(event.op)
        if isinstance(memory, Pool) and memory.reader is not None:
            memory.reader(Leaf(event.op, event.piece, event.leaf))
        return []

    def _stream_up(self, event: Event) -> list[Any]:
        self._streams.up(event.stream)
        return []

    def _register(self, effect: effects.RegisterOp) -> None:
        """Registers an op. Its memory belongs to the engine until the op is settled."""
        memory, engine = self.pending.memory[effect.op], self._engine
        ids: Ids = {"run": effect.run, "tag": effect.tag, "min_seq": effect.min_seq}
        if isinstance(memory, Pool):
            pieces, first, op = memory.pieces, memory.first_counted, effect.op
            if memory.reader is None:
                limit = memory.limit
                engine.register_serve(op, pieces=pieces, first_counted=first, limit=limit, **ids)
            else:
                engine.register_fetch(
                    op, pieces=pieces, first_counted=first, leaf_bytes=LEAF_BYTES, **ids
                )
        elif TRAITS[memory.work.what].exchange:
            rows = memory.send_rows, memory.recv_rows
            members = max(map(len, rows))
            parts = _parts(memory)
            engine.register_exchange(effect.op, members=members, parts=parts, rows=rows, **ids)
        else:
            engine.register_collective(
                effect.op,
                what=memory.work.what,
                redop=memory.work.redop,
                members=memory.work.members,
                parts=_parts(memory),
                format=wire_format(memory.work),
                rows=memory.work.rows,
                window=memory.step,
                **ids,
            )


class ControlThread:
    """The base of each client of a master: engine, streams, sockets, and their thread.

    A subclass makes its driver, and then calls `_start`.

    Raises:
        OSError: the engine cannot listen here.
        PCCLError: INVALID_USAGE: keys are missing or unsafe.
    """

    _driver: Driver
    _perform: Callable[[list[Any]], None]
    _thread: threading.Thread

    def __init__(
        self,
        host: str,  # host of the master
        port: int,  # port of the master
        address: str,  # current address of that host; to reconnect, the name is resolved again
        config: Config,  # timings and limits
        security: Security | None,  # the keys; None: nothing is encrypted
        machine: Machine,  # the state machine
        *,
        lanes: int = 0,  # to each neighbor; 0: chosen by the engine
        group: int = 0,  # the peer's group
        team: tuple[int, int] = (0, 0),  # the peer's team, and the team's size
        client: bool = False,  # whether it is a client of weights, not a peer
        system: System | None = None,  # its parts of the operating system; None: the real ones
    ) -> None:
        self._config, self._address, self._machine = config, address, machine
        self._identity, here = Identity.of(security), everywhere(address)
        self._system = system = system or System()
        self.now, self.aside = system.now, system.aside
        self.failure: BaseException | None = None
        self._numbers = itertools.count(1)
        self._ended = Latch()
        self.is_forked = False  # whether this process is a forked child, without a control thread
        self._leaving = False
        self._due_s = math.inf  # when a timer is due
        self._working = threading.RLock()  # its holder uses the connection to the master
        options = EngineOptions(
            heartbeat_ms=config.heartbeat_ms, heartbeat_timeout_ms=config.heartbeat_timeout_ms
        )
        with contextlib.ExitStack() as opened:  # closed if the start fails
            opened.callback(system.close)
            self._waiter = system.waiter()
            opened.callback(self._waiter.close)
            self._inbox = Inbox(self._waiter.wake)
            opened.callback(self._inbox.end)
            self._engine = system.engine(
                self._identity.guard(options),
                host=here,
                ports=config.ports,
                stopped=lambda: self._inbox.post(self._driver.read),
            )
            opened.callback(self._engine.close)
            self._engine.together = True
            self._resolver = Resolver(self._inbox.post)
            self._rendezvous = Rendezvous(
                self._engine,
                self._resolver,
                config,
                partial(system.point, here),
                system.token,
                lambda request: self._perform(machine.rendezvous(request)),
            )
            opened.callback(self._rendezvous.close)
            this_machine = machine_id()
            self._streams = Streams(
                self._engine,
                self._resolver,
                config,
                lanes,
                self._local,
                self._rendezvous,
                self.now,
                system.shortage,
                this_machine,
            )
            self._master = MasterConnection(
                host,
                port,
                config,
                self._identity,
                machine,
                self._waiter,
                self._resolver,
                system.dealer,
                self.now,
            )
            self._timers: list[Timer] = [self._streams, self._master]
            self.hello = m.Hello(
                m.PROTOCOL_VERSION,
                __version__,
                group,
                config.first_host,
                self._engine.port,
                self._engine.ipc if config.ipc else "",
                this_machine,
                b"" if client else arithmetic_digest(),
                self._identity.curve,
                self._identity.token,
                *team,
                client,
                config.outgoing,
                0 if client else self._rendezvous.port,
                further_hosts(config, address),
                config.name or default_name(),
            )
            self._opened = opened.pop_all()

    def _start(self, *others: threading.Thread) -> None:
        """Opens the first connection to the master, and starts the threads.

        Raises OSError: the system provides no socket, or no thread.
        """
        self._perform = self._driver.perform
        self._thread = threading.Thread(target=self._run, name="pccl-control", daemon=True)
        forks.watch(self)
        try:
            self._master.begin(self._address, self._read_master, self._perform)
            self._waiter.add(self._engine.socket, self._driver.read)
            for thread in (*others, self._thread):
                self._system.start(thread)
        except BaseException:
            self._opened.close()
            raise

    def _local(self, info: m.PeerInfo) -> bool:
        return reach.local(self.hello, info)

    # ---- called by user threads ----

    @property
    def master(self) -> str:
        """`host:port` of the master."""
        return self._master.name

    @property
    def over(self) -> effects.Fail | None:
        """Why it is no longer in the run; None while it is."""
        return forks.FORKED if self.is_forked else self._machine.over

    def forked(self) -> None:
        """Called in a forked child, which must not use its parent's sockets."""
        self.is_forked = True
        self._inbox.forked()
        others = {*self._streams.ends, (self._master.address, self._master.port)}
        forks.close_inherited({self._engine.port, self._rendezvous.port}, self._engine.ipc, others)

    def call(self) -> Call:
        """A new call, which has not been made yet."""
        return Call(next(self._numbers))

    def join(self, call: Call) -> None:
        """Asks to join; answered when this client is registered, and a peer also accepted."""
        self.begin(call, lambda number: self._machine.join(number, self.hello))

    def leave(self, why: str) -> None:
        """Leaves the run; waiting calls fail with `why`."""

        def leave() -> None:
            self._leaving = True
            self._perform(self._machine.leave(why))

        if not self._ended.is_set:
            self._inbox.post(leave)

    def close(self, why: str) -> None:
        """Leaves the run, and returns when nothing refers to users' memory any more. Idempotent."""

        def wait() -> None:
            self.leave(why)
            # a client may be garbage-collected in a thread of its own
            if threading.current_thread() not in self._own_threads:
                self._ended.wait()

        if not self.is_forked:
            insist(wait)

    @property
    def _own_threads(self) -> Sequence[threading.Thread]:
        """Threads of this client: `close` does not wait for its end in one of them."""
        return (self._thread,)

    def begin(self, call: Call, event: Callable[[int], list[Any]], wakes: bool = True) -> None:
        """Makes a call: an event of the state machine, which receives the call's number.

        `wakes`: whether it wakes the control thread. If not, the caller does (`Inbox.signal`).
        """

        def begin() -> None:
            if call.end is None:  # else it is repeated, and its call was answered
                self._driver.pending.add(call)
                self._perform(event(call.number))

        self._inbox.leave(begin)
        if wakes:
            self._inbox.signal()

    def post(self, event: Callable[[], list[Any]]) -> None:
        """Makes the control thread carry out an event of the state machine."""
        self._inbox.post(lambda: self._perform(event()))

    def verified(self, op: int, results: Sequence[tuple[int, int, bool]]) -> None:
        """Tells a fetch which leaves (piece, leaf) are correct."""

        def notify() -> None:
            for piece, leaf, good in results:
                self._engine.verified(op, piece, leaf, good)

        self._inbox.post(notify)

    # ---- the control thread ----

    @property
    def _done(self) -> bool:
        """True if it has left, and nothing refers to users' memory."""
        return self._leaving and self._machine.idle

    def _run(self) -> None:
        try:
            while self.turn(self._waiter.wait(self.pause())):
                pass
        except BaseException as error:  # any kind: waiting callers need an answer
            self._break_down(error)
        self.end()

    def pause(self) -> float | None:
        """How long the control thread waits if nothing happens; None: nothing has a time limit."""
        self._due_s = min([timer.due_s for timer in self._timers])
        if not self._inbox.may_wait():
            return 0.0
        if self._due_s == math.inf or self._machine.over is not None:
            return None
        return max(0.0, self._due_s - self.now())

    def turn(self, ready: Sequence[Callable[[], object]]) -> bool:
        """Runs commands, reads sockets, and performs effects until nothing is left to do.

        `ready`: reads what has arrived. Returns False if the thread must end.
        """
        driver = self._driver
        with self._working:
            try:
                self._inbox.carry_out()  # first: a message may answer a command (send_now)
                driver.flush()  # each call of a socket may cost a wait for the global lock
                for read in ready:
                    read()
                if self.now() >= self._due_s:
                    for timer in self._timers:
                        timer.tick()
                driver.flush()
                while driver.again:
                    driver.again.pop()()
                    driver.flush()
            except Exception as error:
                self._break_down(error)
        driver.pending.notify()
        return not (self.failure or self._done)

    def _break_down(self, error: BaseException) -> None:
        """Ends the membership after an internal error, with its reason."""
        self.failure = error
        if self._engine.broken:
            why = self._engine.broken
        elif isinstance(error, Refused):
            why = str(error)
        elif isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
            why = "this process has no memory left for pccl's own work"
        else:
            log.error("the control thread of %s failed", self._name, exc_info=error)
            why = f"an internal error of pccl, {type(error).__name__}: {error}; the log has it"
        with contextlib.suppress(Exception):  # `end` answers the remaining calls
            self._perform(self._machine.broken(why))

    @property
    def _name(self) -> str:
        """This client's name in the log."""
        return f"peer {self._machine.number}"

    def _read_master(self) -> None:
        for message in self._master.dealer.receive():
            todo = self._machine.received(message)
            if isinstance(message, m.Resumed | m.Welcome):
                self._master.answered()
            if isinstance(message, m.Welcome):
                self._welcomed(message)
            self._perform(todo)

    def _welcomed(self, welcome: m.Welcome) -> None:
        """The master has registered this client."""
        if welcome.warning:
            log.warning("%s: %s", self._name, welcome.warning)

    # ---- the end ----

    def end(self) -> None:
        """Releases everything and answers all waiting calls, whatever fails on the way."""
        pending = self._driver.pending
        with self._working:
            pending.closed = True
        with contextlib.ExitStack() as last:  # runs in reverse order
            last.callback(self._ended.set)
            last.callback(lambda: pending.fail_all(self._machine.over))
            last.callback(pending.notify)
            last.callback(self._inbox.end)
            last.callback(pending.memory.clear)
            last.callback(self._waiter.close)
            last.callback(self._system.close)
            last.callback(self._rendezvous.close)
            last.callback(self._engine.close)  # restores and releases what is not settled
            last.callback(self._streams.clear)
            last.callback(self._resolver.forget)
            last.callback(self._master.close)
