"""The master's loop and its thread.

No connection can end the service for the others: if a message makes the state machine fail, the
master logs the error and drops the connection. connections.py explains how connections are
identified.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import zmq
from msgspec.structs import replace

from pccl.errors import PCCLError
from pccl.protocol import messages as m
from pccl.protocol.master import Journal, Master, Status, effects, inputs
from pccl.protocol.master.membership import hosts
from pccl.protocol.master.status import EventStatus
from pccl.runtime import limits
from pccl.runtime.config import Config
from pccl.runtime.encryption import Zap, require_curve, secure_server
from pccl.runtime.inline_collectives import combine, keep_memory
from pccl.runtime.server.connections import Connections
from pccl.runtime.server.dial import Dialler, Target, dial_hosts
from pccl.runtime.server.eventlog import EventLog
from pccl.runtime.server.journal import JournalError, OnError, Scribe
from pccl.runtime.server.web import Web
from pccl.runtime.sockets import RouterMail, Waiter
from pccl.security import KeyPair, Security

log = logging.getLogger("pccl")


BATCH = 100  # messages read before lost connections are handled, even if more wait


Clock = Callable[[], float]


def elapsed() -> float:
    """Seconds, including the sleep of the machine. Setting the wall clock does not change it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":  # this clock counts sleep there; Python's monotonic() does not
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


class Pauses:
    """The pauses of this process, which must not count against peers: it was stopped, or asleep.

    The master uses three clocks. `time.monotonic` measures waits; on Linux and macOS it does not
    count the machine's sleep. `elapsed` does. The wall clock may be set at any moment, so it only
    dates texts for people. A pause counts if it is longer than half the timeout.

    Args:
        timeout_s: the time after which peers consider this process lost.
        running, elapsed: the clocks; tests pass others.
    """

    def __init__(
        self, timeout_s: float, running: Clock = time.monotonic, elapsed: Clock = elapsed
    ) -> None:
        self._timeout_s = timeout_s
        self._running, self._elapsed = running, elapsed
        self._checked = running(), elapsed()
        self._woke_s: float | None = None  # the end of the latest pause
        # the sum of all pauses by `time.monotonic`; without it, the clock shows how long the
        # process has run
        self.total_s = 0.0

    def check(self, waited_s: float = 0.0) -> None:
        """Looks for a pause since the last check.

        Call it after each wait, and before anything that depends on pauses.

        Args:
            waited_s: the time limit of the longest wait since the last check.
        """
        running_s, elapsed_s = self._checked
        self._checked = self._running(), self._elapsed()
        running_s = self._checked[0] - running_s - waited_s
        elapsed_s = self._checked[1] - elapsed_s - waited_s
        if max(running_s, elapsed_s) > self._timeout_s / 2:
            log.warning(
                "master: it did not run for %.1f s: its process was stopped, or the machine was "
                "asleep or busy",
                max(running_s, elapsed_s),
            )
            self.total_s += max(0.0, running_s)
            self._woke_s = self._running()

    @property
    def woke_lately(self) -> bool:
        """True if a pause of this process explains connections that break now."""
        return self._woke_s is not None and self._running() - self._woke_s < 2 * self._timeout_s

    def dealt_with(self) -> None:
        """The pause was handled: connections that break later have other reasons."""
        self._woke_s = None


def _nothing() -> None: ...


_ONLY_MESSAGES = [_nothing]


def _router(
    context: zmq.Context[zmq.Socket[bytes]], config: Config, *, ipv6: bool
) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    options = {
        zmq.LINGER: 0,
        zmq.ROUTER_MANDATORY: 1,  # sending to a lost connection is an error
        zmq.SNDHWM: limits.UNREAD_MAX,
        zmq.RCVHWM: limits.RECEIVED_MAX,
        zmq.MAXMSGSIZE: m.MESSAGE_BYTES_MAX,
        zmq.HANDSHAKE_IVL: int(config.handshake_timeout_s * 1000),  # limits a stranger's memory
        zmq.HEARTBEAT_IVL: config.heartbeat_ms,
        zmq.HEARTBEAT_TIMEOUT: config.heartbeat_timeout_ms,
        zmq.IPV6: int(ipv6),
    }
    for option, value in options.items():
        router.setsockopt(option, value)
    return router


class Server:
    """A master. It listens from construction on, and serves while a thread is in `serve`.

    `start` makes such a thread. `wait` waits for a future instead of `Thread.join`: if an exception
    such as KeyboardInterrupt ends a join, CPython 3.11 considers the thread dead, and the process
    could end before the thread has sent its last messages. A forked child has no such thread, so
    `stop` and `wait` do nothing there.

    Raises:
        OSError: it cannot listen at that address.
        JournalError: the journal cannot be used.
        EventLogError: the event log cannot be used.
        PCCLError: INVALID_USAGE: keys are missing or unsafe.
    """

    def __init__(
        self,
        host: str,  # to listen on; "0.0.0.0" or "::" for all interfaces
        port: int,  # to listen on; 0: any free one
        config: Config,  # timings and limits
        # the master's keys and those of allowed peers; None: nothing is encrypted
        security: Security | None = None,
        # the file of the journal; None: a restarted master asks the peers
        state: Path | None = None,
        # what to do if writing the journal fails later
        on_journal_error: OnError = OnError.CONTINUE,
        # the file that records all inputs of the state machine; None: no file
        event_log: Path | None = None,
        # host and port for HTTP, which `start` begins to serve; None: no HTTP
        http: tuple[str, int] | None = None,
    ) -> None:
        keys = None
        if security is not None:
            require_curve()
            security.allowed()  # raises if it cannot be read
            keys = security.master_keys()
        self._why_lost = (
            "its connection broke, because its process ended or because nothing was heard of it "
            f"for {config.heartbeat_timeout_ms / 1000:g} s"
        )
        self._straggler_s = config.straggler_s
        self._timeout_s = config.heartbeat_timeout_ms / 1000
        self._pauses = Pauses(self._timeout_s)
        self._faltered = ""  # why an event was not handled completely; the master then starts over
        self._tick_s = None if config.straggler_s is None else config.straggler_s / 10
        # messages of connections whose first message waits for the end of a dial
        self._arriving: dict[bytes, list[bytes | memoryview | None]] = {}
        self._security = security
        self._zap: Zap | None = None
        self._journal: Scribe | None = None
        self._events: EventLog | None = None
        self.web: Web | None = None
        self._ended: Future[None] = Future()  # of the thread of `start`
        self._pid = os.getpid()
        self._stop = False
        self._chores_due_s = 0.0
        self._ticked_s = self._awake_s()  # the time of the latest tick, without pauses
        self._asked: deque[Future[Status]] = deque()  # requests of other threads
        self._noted: deque[tuple[float, str]] = deque(maxlen=limits.HTTP_EVENTS)  # times and texts
        self._sent = False  # since the router was last found empty
        self._unsent: dict[bytes, list[bytes]] = {}  # messages by connection, until `_flush`
        run = secrets.randbits(62)
        try:
            with contextlib.ExitStack() as opened:
                self._open(opened, host, port, config, keys)
                if state is not None:
                    self._journal = Scribe(state, run, on_journal_error)
                    opened.callback(self._journal.close)
                if event_log is not None:
                    self._events = EventLog(event_log)
                    opened.callback(self._events.close)
                if http is not None:
                    self.web = Web(*http, self.ask)
                    opened.callback(self.web.close)
                self._opened = opened.pop_all()
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"ZeroMQ cannot make its sockets: {error}") from None
        remembered = None if self._journal is None else self._journal.remembered
        self._master = self._new_master(run, remembered)
        self.host = host
        self.port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _open(
        self,
        opened: contextlib.ExitStack,
        host: str,
        port: int,
        config: Config,
        keys: KeyPair | None,
    ) -> None:
        """Opens everything that needs descriptors; these may run out."""
        self._waiter = Waiter()
        opened.callback(self._waiter.close)
        self._connections = Connections(opened)
        self._context = zmq.Context()
        opened.callback(self._context.destroy, linger=0)  # `term` would wait for open sockets
        self._router = _router(self._context, config, ipv6=":" in host)
        opened.callback(self._router.close, linger=limits.FAREWELL_MS)
        self._mail = RouterMail(self._router)
        self._connections.watch(self._router, opened)
        if keys is not None:
            self._zap = Zap(self._context)
            opened.callback(self._zap.close)
            secure_server(self._router, keys)
        self._dialler = Dialler(self._waiter, self._context, keys, allowed=config.dial_back)
        opened.callback(self._dialler.close)
        bracketed = f"[{host}]" if ":" in host else host
        try:
            self._router.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            number = errno.EADDRINUSE if error.errno == zmq.EADDRINUSE else error.errno
            raise OSError(number, f"cannot listen on {host}:{port}: {error}") from None

    @property
    def peers(self) -> int:
        return len(self._master.peers)

    def stop(self) -> None:
        """Makes `serve` return: from any thread, from a signal handler, or before `serve`."""
        if os.getpid() == self._pid:
            self._stop = True
            self._waiter.wake()

    def start(self) -> None:
        """Serves in a thread. Raises RuntimeError, and closes everything, if there is none."""
        try:
            if self.web is not None:
                self.web.start()
            threading.Thread(target=self._work, name="pccl-master", daemon=True).start()
        except RuntimeError:
            self.close()
            self._ended.set_result(None)
            raise

    @property
    def over(self) -> bool:
        """True if the thread of `start` has ended, or is not of this process."""
        return os.getpid() != self._pid or self._ended.done()

    def wait(self) -> BaseException | None:
        """Returns when the thread of `start` has ended: the exception that ended it, if any."""
        while os.getpid() == self._pid:
            with contextlib.suppress(TimeoutError):
                return self._ended.exception(limits.SLICE_S)
        return None

    def _work(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def ask(self) -> Future[Status]:
        """Asks `serve` for the status of the run; from any thread. Cancelled if `serve` ends."""
        future: Future[Status] = Future()
        self._asked.append(future)
        self._waiter.wake()
        if self._stop:
            future.cancel()
        return future

    def close(self) -> None:
        """Closes everything, if no thread serves. The port can be bound again at once."""
        self._opened.close()

    def serve(self) -> None:
        """Serves until `stop`, then closes everything. The port can be bound again at once."""
        waiter = self._waiter
        waiter.add(self._router, _nothing)  # the loop reads it anyway
        waiter.add(self._connections.monitor, self._connections.read_monitor)
        if (zap := self._zap) is not None:
            waiter.add(zap.socket, lambda: zap.answer(self._allows))
        wait_s = 0.0
        keep_memory()
        try:
            while not self._stop:
                reads = waiter.wait(wait_s)
                now_s = self._master.now_s = time.monotonic()
                if reads != _ONLY_MESSAGES:
                    self._chores_due_s = now_s
                if now_s >= self._chores_due_s:
                    self._pauses.check(wait_s)
                for read in reads:
                    read()
                if self._connections.flooded:
                    self._connections.read_monitor()
                drained = self._converse()
                if now_s >= self._chores_due_s or not (drained and self._may_put_off_chores):
                    self._do_chores(drained)
                    wait_s = self._patience_s(drained)
            if self._journal is None:  # with a journal, peers wait for it to come back
                self._happen(inputs.Farewell())
                self._flush()
        except JournalError as error:
            log.error("the master ends: %s", error)
            raise
        except Exception:
            log.exception("the master failed")  # the peers try to reconnect: it may be restarted
            raise
        finally:
            self._stop = True
            for future in list(self._asked):
                future.cancel()
            self.close()

    def _converse(self) -> bool:
        """Reads messages and sends the answers. Returns True if no message is left.

        Sending may consume the socket's notice of the next message. So it sends the answers before
        it looks for the next message.
        """
        read = 0
        while read < BATCH:
            messages = self._read_router()
            if not messages:
                return True
            read += messages
            self._flush()
        return False

    @property
    def _may_put_off_chores(self) -> bool:
        """True if no time limit is near, so that chores can wait.

        Votes are most of a master's work, and the chores cost as much as a vote.
        """
        return not (
            self._faltered
            or self._connections.busy
            or self._dialler.busy
            or self._master.watches_time
        )

    def _do_chores(self, drained: bool) -> None:
        """Does all work that is due, except messages."""
        if self._faltered:
            why, self._faltered = self._faltered, ""
            self._begin_anew(why)
        now_s, awake_s = time.monotonic(), self._awake_s()
        self._chores_due_s = now_s + limits.MASTER_CHORES_S
        if self._master.recovering and self._connections.impaired:  # nobody can come back now
            self._pauses.total_s += awake_s - self._ticked_s
            awake_s = self._ticked_s
        self._ticked_s = awake_s
        self._handle_losses(now_s, drained)
        self._connections.cut(now_s, drained)
        self._dialler.tick(awake_s)
        self._happen(inputs.Tick(awake_s))
        self._flush()
        while self._asked:
            future = self._asked.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._status())
            except Exception as error:  # a request for the status must not end the service
                log.exception("master: the status of the run cannot be made")
                future.set_exception(error)

    def _patience_s(self, drained: bool) -> float:
        connections = self._connections
        if self._sent or connections.crowded or connections.flooded or not drained:
            return 0.0
        often = self._master.recovering or connections.busy or self._dialler.busy
        waits_s = [
            limits.MASTER_LOOK_S if often else self._timeout_s / 4,  # to notice pauses
            self._tick_s,
            connections.patience_s,
            self._master.patience_s,
        ]
        return min(wait_s for wait_s in waits_s if wait_s is not None)

    def _status(self) -> Status:
        """The status of the run, with the kernel's data about its connections."""
        status = self._master.status()
        silent_s = {
            number: self._connections.silent_s(peer.conn)
            for number, peer in self._master.peers.items()
        }
        peers = [replace(one, heartbeat_s=silent_s[one.peer]) for one in status.peers]
        now_s = self._master.now_s
        events = [EventStatus(now_s - at_s, text) for at_s, text in self._noted]
        return replace(status, peers=tuple(peers), events=tuple(events))

    # ---- pauses ----

    def _awake_s(self) -> float:
        """How long this process has run, without its pauses."""
        now_s = time.monotonic()
        self._pauses.check()
        return now_s - self._pauses.total_s

    def _new_master(
        self,
        run: int,
        journal: Journal | None,
        why: str = "",
        done: Sequence[effects.Effect] = (),
    ) -> Master:
        """The first master, or one that replaces another, with `why` and the old one's effects."""
        began = inputs.Began(run, self._straggler_s, journal, why)
        master = Master.began(began, combine, secrets.token_bytes(32))
        master.now_s = time.monotonic()
        if self._events is not None:
            self._events.note(master.now_s, began, [*done])
        return master

    def _feed(self, event: inputs.Event) -> list[effects.Effect]:
        if self._events is None:
            return self._master.feed(event)
        return self._events.feed(self._master, event)

    def _happen(self, event: inputs.Event) -> None:
        self._perform(self._feed(event))

    def _begin_anew(self, why: str) -> None:
        """Continues as after a restart: the master was away, not its peers."""
        old = self._master
        self._flush()
        log.warning("master: %s: it goes on as after a restart", why)
        journal, todo = old.reborn()
        self._master = self._new_master(old.run.number, journal, why, todo)
        self._perform(todo)
        for conn in self._connections.senders:
            if old.has_heard(conn):
                self._connections.drop_at_once(conn)  # the peer reconnects
        self._pauses.dealt_with()

    # ---- events ----

    def _allows(self, key: str) -> bool:
        """True if a peer with this public key may join. The list may change at any time."""
        assert self._security is not None
        try:
            return key in self._security.allowed()
        except PCCLError as error:
            log.warning("master: nobody can join: %s", error)
            return False

    def _handle_losses(self, now_s: float, drained: bool) -> None:
        lost = self._connections.take_lost(now_s, drained)
        if self._pauses.woke_lately and any(self._master.knows(conn) for conn in lost):
            self._begin_anew("connections broke while it did not run")
        for conn in lost:
            self._arriving.pop(conn, None)
        if lost:
            self._happen(inputs.Disconnected(tuple(lost), self._why_lost))

    def _read_router(self) -> int:
        """Reads a frame and handles its messages. Returns their number; 0: there was no frame."""
        taken = self._mail.take()
        if taken is None:
            self._sent = False
            return 0
        conn, data = taken
        connections = self._connections
        if conn not in connections.senders:
            self._chores_due_s = 0.0
            if not connections.has_ended(conn) and not connections.learn(conn, self._mail.origin()):
                return 1
        messages: Sequence[bytes | memoryview | None] = (None,)
        if data is not None:
            with contextlib.suppress(m.ProtocolError):
                messages = m.opened(data)
        if (sender := connections.senders.get(conn)) is not None:
            sender.hear()
        for message in messages:
            self._deliver(conn, message)
        return len(messages)

    def _deliver(self, conn: bytes, data: bytes | memoryview | None) -> None:
        """Handles a message, unless its connection is dropped or still being dialled back.

        `data` is None if a message was not one frame.
        """
        if not self._connections.is_heard(conn):
            return
        held = self._arriving.get(conn)
        if held is None:
            self._guarded(conn, lambda: self._receive(conn, data))
        elif len(held) < limits.ARRIVING_MAX:
            held.append(data)
        else:
            del self._arriving[conn]
            why = "it sent too many messages before the master had answered its first one"
            self._happen(inputs.Rejected(conn, why))

    def _guarded(self, conn: bytes, make: Callable[[], inputs.Event | None]) -> None:
        """Handles the event of a message. An exception ends only the sender's connection."""
        try:
            event = make()
            todo = [] if event is None else self._feed(event)
        except MemoryError:
            self._faltered = "it had no memory to handle a message"
            return
        except Exception:
            log.exception("master: a message of connection %s caused an internal error", conn.hex())
            why = "an internal error of the master: see the master's log"
            self._arriving.pop(conn, None)  # the result of its dial no longer counts
            todo = self._feed(inputs.Rejected(conn, why))
        self._perform(todo)

    def _dial(
        self,
        conn: bytes,
        hello: m.Hello | m.Examine,
        make: Callable[[str | None], inputs.Event],
    ) -> None:
        """Dials a connection's peer back, then handles the event that follows."""
        self._arriving[conn] = []

        def then(unreached: str | None) -> None:
            held = self._arriving.pop(conn, None)
            if held is None:
                return  # the connection is gone
            self._guarded(conn, lambda: make(unreached))
            for data in held:
                self._deliver(conn, data)

        seen = self._connections.senders[conn].host
        target = Target("", hello.port, hello.curve, hello.dial)
        dial_hosts(self._dialler, hosts(hello, seen), target, self._awake_s, then, seen)

    def _receive(self, conn: bytes, data: bytes | memoryview | None) -> inputs.Event | None:
        """The event for a message; None if the master first dials its sender."""
        try:
            if data is None:
                raise m.ProtocolError("not one frame of messages")
            if conn[0] != 0:
                raise m.ProtocolError("a name that the connection has given itself")
            message = m.decode_from_peer(data)
        except m.ProtocolError as error:
            return inputs.Rejected(conn, f"it sent bytes that are not a message: {error}")
        host = self._connections.senders[conn].host
        match message:
            case m.Hello() as hello:
                is_refused = self._master.knows(conn) or self._master.objection(hello, host)
                if is_refused or hello.outgoing:  # no dial can reach it
                    return inputs.Hello(conn, hello, host)
                self._dial(conn, hello, lambda why: inputs.Hello(conn, hello, host, why or ""))
                return None
            case m.Examine():
                self._dial(conn, message, lambda why: inputs.Examine(conn, host, why, time.time()))
                return None
            case m.Resume():
                self._expect(message)
                return inputs.Resume(conn, message, host)
        return inputs.Received(conn, message)

    def _expect(self, resume: m.Resume) -> None:
        """Handles the reason for a peer's return: this process had a pause, or has not handled the
        loss of the peer's earlier connection yet."""
        self._pauses.check()
        if self._master.deserted(resume):
            self._begin_anew("all peers were lost, and now they come back")
        elif self._pauses.woke_lately and self._master.misses(resume):
            self._begin_anew("connections broke while it did not run")
        earlier = self._master.back_on(resume)
        if earlier is not None and self._connections.has_lost(earlier):
            self._happen(inputs.Disconnected((earlier,), self._why_lost))

    # ---- effects ----

    def _perform(self, todo: list[effects.Effect]) -> None:
        last: m.MasterMessage | None = None
        data = b""
        dials: list[effects.Dial] = []  # last: a dial may end at once and have its own effects
        for effect in todo:
            match effect:
                case effects.Send(conn, message):
                    if message is not last:  # many peers get the same message
                        last, data = message, m.encode(message)
                    self._unsent.setdefault(conn, []).append(data)
                case effects.Remember() | effects.Forget() | effects.Adopt():
                    if self._journal is not None:
                        self._journal.record(effect)
                case effects.Dial():
                    dials.append(effect)
                case effects.Note(text, warns):
                    log.log(logging.WARNING if warns else logging.INFO, "master: %s", text)
                    self._noted.append((time.monotonic(), text))
                case effects.Drop(conn, why):
                    log.debug("master: connection %s dropped: %s", conn.hex(), why)
                    self._connections.drop(conn)
        if self._journal is not None:
            if not self._master.recovering:
                self._journal.recovered()
            self._journal.settle()
        for dial in dials:
            info = dial.info
            target = Target("", info.port, info.curve, dial.password)
            then = partial(self._dialled, info.peer)
            dial_hosts(self._dialler, info.hosts, target, self._awake_s, then)

    def _dialled(self, number: int, unreached: str | None) -> None:
        self._happen(inputs.Dialled(number, unreached))

    def _flush(self) -> None:
        """Sends each connection its messages, in as few frames as possible.

        The journal already has the changes behind these messages.
        """
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, {}
        for conn, messages in unsent.items():
            for frame in m.frames(messages):
                self._send(conn, frame)

    def _send(self, conn: bytes, data: bytes) -> None:
        if self._faltered:
            return  # an earlier message was not sent, so later ones make no sense
        self._sent = True
        try:
            self._mail.send(conn, data)
        except zmq.Again:
            if self._connections.is_heard(conn):
                log.warning("master: connection %s does not read what it is sent", conn.hex())
                self._connections.drop_at_once(conn)
        except zmq.ZMQError as error:
            if error.errno == errno.ENOMEM:
                self._faltered = "it had no memory for a message"
            else:
                log.debug("master: connection %s: %s", conn.hex(), error)
                self._connections.unreachable(conn)
