"""The control thread of a peer: the DEALER to the master, the lane engine, the peer core.

Everything that touches a socket happens under one lock. The control thread holds it but while it
waits, which touches descriptors only. Threads of the user post commands and wait on a `Call`: who
posts when nobody works does the work itself, at once, instead of waking the control thread. Nothing
under the lock blocks, and bulk data never passes here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import zmq

from pccl.protocol import messages as m
from pccl.protocol import peer as core
from pccl.runtime.call import Call, Leaf
from pccl.runtime.config import MIB, Config, chunk_bytes, high_water_mark, lanes
from pccl.runtime.curve import new_keys, require_curve, secure_client
from pccl.runtime.digest import LEAF_BYTES
from pccl.runtime.engine import (
    ANOTHER,
    COMPLETE,
    FAILED,
    LEAF,
    SETTLED,
    STARVED,
    UNREACHABLE,
    Engine,
    EngineOptions,
    Part,
    Ring,
)
from pccl.runtime.inline import store
from pccl.runtime.link import Link, LinkEvent
from pccl.runtime.memory import Operands, Pieces, Pool
from pccl.runtime.quantization import wire_format
from pccl.runtime.waiter import Waiter, readable
from pccl.security import KeyPair, Security
from pccl.text import address_text
from pccl.types import Result

log = logging.getLogger("pccl")

SERVE_INTERVAL_S = 0.02  # a limit on what is served is kept in each such time
RETRY_S = 0.2  # between attempts to reach a master that is gone
SILENT = (core.Store, core.Answer, core.Fail, core.Plan, core.Fetched)  # they touch no socket


class Client:
    """One peer's membership in one run, from connect to the end.

    Args:
        host: of the master.
        port: of the master.
        hello: makes the first message from the engine's port and ipc address.
        pool_size: lanes to each neighbour; 0: choose.
        config: timings and limits.
        security: whose keys to use; None: nothing is encrypted.
        ipv6: whether the master is reached by IPv6, as others then reach this peer.

    Raises:
        OSError: no lane engine can listen here.
        PCCLError: INVALID_USAGE when keys are missing or unsafe.
    """

    def __init__(
        self,
        host: str,
        port: int,
        hello: Callable[[int, str], m.Hello],
        pool_size: int,
        config: Config,
        security: Security | None = None,
        ipv6: bool = False,
    ) -> None:
        self._config = config
        self._ipv6 = ipv6
        self._pool_size = pool_size
        self._core = core.Peer()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._memory: dict[int, Operands | Pool] = {}  # op -> what the engine refers to
        self._opened: dict[int, m.PeerInfo] = {}  # streams, and to whom
        self._inbox: deque[Callable[[], None]] = deque()
        self._closed = threading.Event()
        self._leaving = self._failed = False
        self._working = threading.Lock()
        options = EngineOptions(
            heartbeat_ms=config.heartbeat_ms, heartbeat_timeout_ms=config.heartbeat_timeout_ms
        )
        self._keys: KeyPair | None = None
        curve, token = "", secrets.token_hex(16)
        if security is None:
            options = replace(options, dialler=token.encode())
        else:
            require_curve()
            self._keys, self._master_key = security.peer_keys(), security.master_key()
            lane_keys = new_keys()  # of this peer alone: a stream knows by them whom it has reached
            curve = lane_keys.public
            options = replace(
                options,
                curve_public=curve.encode(),
                curve_secret=lane_keys.secret.encode(),
                dialler=self._master_key.encode(),
            )
        self._engine = Engine(options, host="::" if ipv6 else "0.0.0.0", ports=config.ports)
        said = hello(self._engine.port, self._engine.ipc if config.ipc else "")
        self._hello = msgspec.structs.replace(said, curve=curve, dial=token)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._context = zmq.Context()
        self._master = (host, port)
        self._retry_at: float | None = None
        self._give_up_at = 0.0
        self._waiter = Waiter()
        self._sent = True  # since the sockets were last read
        self._link = self._open_link()
        self._perform_by_type: dict[type, Callable[..., None]] = {
            core.Send: self._send,
            core.RegisterOp: self._register,
            core.StartOp: self._start,
            core.CommitOp: lambda action: self._engine.commit(action.op),
            core.AbortOp: lambda action: self._engine.abort(action.op),
            core.Store: self._store,
            core.OpenStream: self._open_stream,
            core.CloseStream: self._close_stream,
            core.Answer: self._answer,
            core.Fail: self._answer,
            core.Plan: self._note,
            core.Fetched: self._note,
        }
        self._thread = threading.Thread(target=self._run, name="pccl-control", daemon=True)
        self._thread.start()

    def _open_link(self) -> Link:
        link = Link(self._context, *self._master, self._config, self._secure, self._ipv6)
        self._waiter.add(link.socket, self._read_link)
        self._waiter.add(link.monitor, self._read_monitor)
        return link

    def _close_link(self) -> None:
        self._waiter.remove(self._link.socket)
        self._waiter.remove(self._link.monitor)
        self._link.close()

    def _secure(self, dealer: zmq.Socket[bytes]) -> None:
        if self._keys is not None:
            secure_client(dealer, self._keys, self._master_key)

    # ---- for the threads of the user ----

    @property
    def master(self) -> str:
        """`host:port` of the master."""
        return address_text(*self._master)

    @property
    def world(self) -> m.World:
        """The world sizes as of the last answer."""
        return self._core.world

    @property
    def plan(self) -> m.Plan:
        """The group's peers and rings as of the last answer."""
        return self._core.plan

    @property
    def number(self) -> int:
        """This peer's number."""
        return self._core.number

    @property
    def over(self) -> core.Fail | None:
        """Why this peer is out of the run, if it is."""
        return self._core.over

    @property
    def filling(self) -> str:
        """Which filling of the engine's function table is active."""
        return self._engine.filling

    def join(self) -> Call:
        """Asks to join. Notes: Welcome, then the answer when this peer is accepted."""
        return self._begin(lambda call: self._core.join(call, self._hello))

    def update_topology(self) -> Call:
        """Enters the round that admits pending peers."""
        return self._begin(self._core.update_topology)

    def are_peers_pending(self, stuck: bool = False) -> Call:
        """Asks, with all others. `stuck`: until the answer the caller makes no other call."""
        return self._begin(lambda call: self._core.are_peers_pending(call, stuck))

    def collective(self, tag: int, operands: Operands, stuck: bool = False) -> Call:
        """Enters a collective. `stuck`: until the answer the caller makes no other call."""
        data = operands.inline(self._config.inline_bytes)

        def begin(call: int) -> list[core.Action]:
            self._memory[call] = operands
            return self._core.collective(call, tag, operands.work, data, stuck)

        return self._begin(begin)

    def sync(self, offer: m.Offer, pieces: Pieces, owner: object) -> Call:
        """Enters a synchronisation. Notes: Plan, Leaf, Fetched, any number, before the answer."""
        pool = Pool(pieces, len(offer.entries), owner, limit=self.serve_limit)
        return self._serve(pool, lambda call, serve: self._core.sync(call, serve, offer))

    def optimize(self, pieces: Pieces, owner: object) -> Call:
        """Enters an optimisation. Notes: Plan, Leaf, Fetched, any number, before the answer."""
        return self._serve(Pool(pieces, 0, owner), self._core.optimize)

    def _serve(self, pool: Pool, enter: Callable[[int, int], list[core.Action]]) -> Call:
        serve = next(self._numbers)

        def begin(call: int) -> list[core.Action]:
            self._memory[serve] = pool
            return enter(call, serve)

        entered = self._begin(begin)
        entered.serve_op = serve
        return entered

    @property
    def serve_limit(self) -> int:
        """Bytes of shared state that this peer may send in SERVE_INTERVAL_S; 0: no limit."""
        return int((self._config.sync_mbits or 0) * 1e6 / 8 * SERVE_INTERVAL_S)

    def allow(self, call: Call) -> None:
        """Lets a limited peer serve for another SERVE_INTERVAL_S."""

        def tell() -> None:
            self._sent = True
            self._engine.allow(call.serve_op, self.serve_limit)

        self._post(tell)

    def fetch(self, call: Call, seq: int, pieces: Pieces, first_counted: int, owner: object) -> int:
        """Fetches what a Plan says into staging memory; returns the op that does it."""
        op = next(self._numbers)

        def begin() -> None:
            actions = self._core.fetch(op, seq)
            if actions:
                self._memory[op] = Pool(pieces, first_counted, owner, call)
            self._perform(actions)

        self._post(begin)
        return op

    def judge(self, op: int, verdicts: list[tuple[int, int, bool]]) -> None:
        """Says of some leaves of a fetch (piece, leaf) whether they are right."""

        def tell() -> None:
            self._sent = True
            for piece, leaf, good in verdicts:
                self._engine.judge(op, piece, leaf, good)

        self._post(tell)

    def fetched(
        self, seq: int, ok: bool, why: str, differences: tuple[m.Difference, ...] = ()
    ) -> None:
        """Says that what a plan wanted is here, or cannot be had; and what was here before."""
        self._post(lambda: self._perform(self._core.fetched(seq, ok, why, differences)))

    def measured(self, seq: int, rate: int, delay_us: int) -> None:
        """Says what a probe has found, and ends it; see `Measured`."""
        self._post(lambda: self._perform(self._core.measured(seq, rate, delay_us)))

    def withdraw(self, call: Call, why: str) -> None:
        """Waits no longer for a call, which is answered soon, one way or the other."""
        self._post(lambda: self._perform(self._core.withdraw(call.number, why)))

    def close(self, why: str) -> None:
        """Leaves the run; calls that wait fail with `why`. Idempotent.

        Returns when no memory is referred to any more.
        """

        def leave() -> None:
            self._leaving = True
            self._perform(self._core.leave(why))

        if not self._closed.is_set():
            self._post(leave)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _begin(self, event: Callable[[int], list[core.Action]]) -> Call:
        call = Call(next(self._numbers))

        def begin() -> None:
            self._calls[call.number] = call
            self._perform(event(call.number))

        self._post(begin)
        return call

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        # it is locked by this very thread when a communicator is collected amid its work
        if self._working.acquire(blocking=False):
            try:
                if not self._closed.is_set():
                    self._work()
                    if not (self._leaving or self._failed) and self._retry_at is None:
                        return
            finally:
                self._working.release()
        self._wake()

    def _wake(self) -> None:
        """Has the control thread look."""
        try:
            self._wake_out.send(b"\0")
        except BlockingIOError:
            pass  # full: it is awake
        except OSError:
            self._drain_after_end()  # the thread has ended and closed it

    # ---- the control thread, or whoever works in its place ----

    def _run(self) -> None:
        self._waiter.add(self._wake_in, self._read_wake)
        self._waiter.add(self._engine.socket, self._read_engine)
        while not (self._failed or (self._leaving and self._core.idle)):
            ready = self._waiter.wait(self._patience_s())
            with self._working:
                self._work(ready)
                if self._patience_s() == 0:
                    self._retry()
        with self._working:
            self._shut_down()

    def _work(self, ready: Sequence[Callable[[], object]] = ()) -> None:
        """Does all there is to do."""
        try:
            for read in ready:
                read()
            self._run_commands()
            while self._sent:
                self._sent = False
                self._read_link()
                self._read_engine()
        except BaseException as error:  # Ctrl-C may come when a caller does this work
            why = "an internal error of pccl; the log has it"
            if isinstance(error, Exception):
                log.exception("the control thread of peer %d failed", self._core.number)
            else:
                why = "it was interrupted in the middle of its work for pccl"
            self._perform(self._core.lost_master(why))
            self._failed = True
            if not isinstance(error, Exception):
                self._wake()
                raise

    def _read_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._inbox.popleft()
            except IndexError:
                return
            command()

    def _read_link(self) -> None:
        while readable(self._link.socket):
            message = m.decode_from_master(self._link.socket.recv(zmq.DONTWAIT))
            actions = self._core.received(message)
            if isinstance(message, m.Plan):
                keys = [info.curve for info in message.peers] if self._keys is not None else []
                self._engine.expect(self._core.number, message.nonce, keys)
            if isinstance(message, m.Resumed | m.Welcome):
                self._give_up_at = 0.0
            if isinstance(message, m.Welcome):
                for call in self._calls.values():
                    call.put(message)
                if message.warning:
                    log.warning("peer %d: %s", message.peer, message.warning)
            self._perform(actions)

    def _read_engine(self) -> None:
        for event in self._engine.events():
            if event.kind == COMPLETE:
                actions = self._core.engine_complete(
                    event.op, event.settled, event.tx_bytes, event.rx_bytes
                )
            elif event.kind == FAILED:
                starved = event.seq if event.status == STARVED else 0
                actions = self._core.engine_failed(event.op, self._named(event.text), starved)
            elif event.kind == LEAF:
                self._leaf(Leaf(event.op, event.piece, event.leaf))
                continue
            elif event.kind == SETTLED:
                actions = self._core.engine_settled(event.op, event.tx_bytes, event.rx_bytes)
            else:
                log.info("peer %d: %s", self._core.number, event.text)
                to = self._opened.get(event.stream)
                if event.status in (UNREACHABLE, ANOTHER) and to is not None:
                    self._perform(self._core.unreached(to, event.text))
                why = f"its connection to {to}: {event.text}"
                self._perform(self._core.stream_lost(event.stream, why))
                continue
            if event.settled or event.kind == SETTLED:
                self._memory.pop(event.op, None)
            self._perform(actions)

    def _named(self, text: str) -> str:
        """What the engine says of a stream, with the name of who is at its other end."""
        found = re.match(r"stream (\d+)", text)
        to = self._opened.get(int(found[1])) if found else None
        return (
            text if found is None or to is None else f"its connection to {to}{text[found.end() :]}"
        )

    def _leaf(self, leaf: Leaf) -> None:
        memory = self._memory.get(leaf.op)
        if isinstance(memory, Pool) and memory.reader is not None:
            memory.reader.put(leaf)

    def _read_monitor(self) -> None:
        for event in self._link.events():
            self._linked(event)

    def _linked(self, event: LinkEvent) -> None:
        match event:
            case LinkEvent.UP:
                if self._give_up_at:  # this is a new link, not the first one
                    self._perform(self._core.linked())
            case LinkEvent.BROKEN:
                self._read_link()  # what came last says why, if the master ended in good order
                self._break(
                    f"the connection to the master at {self.master} broke"
                    if self._core.number
                    else "it closed the connection without an answer: it is no pccl master"
                )
            case LinkEvent.NOT_ALLOWED if self._keys is not None:
                why = f"its list `allowed` does not have this peer's key, {self._keys.public}"
                refused = m.Refused(Result.INVALID_USAGE.value, why)
                self._perform(self._core.received(refused))
            case _ if self._give_up_at:  # a proxy may answer for a master that is down
                self._break(self._handshake_problem())
            case _:
                self._perform(self._core.lost_master(self._handshake_problem()))

    def _handshake_problem(self) -> str:
        if self._keys is not None:
            return "the handshake failed: the master does not encrypt, or master.key is not its key"
        return (
            "the handshake failed: the master wants encryption (pass security=, or set "
            "PCCL_CURVE_DIR), or it is no pccl master"
        )

    # ---- the way back to the master ----

    def _break(self, why: str) -> None:
        """The link is gone: tries to get another one, for as long as the configuration says."""
        if self._retry_at is not None or self._core.over is not None:
            return
        now = time.monotonic()
        patience_s = self._config.master_patience_s
        if not self._give_up_at:
            self._give_up_at = now + patience_s
            if self._core.number:
                log.warning("peer %d: %s; trying for %g s", self._core.number, why, patience_s)
            self._perform(self._core.link_lost(why))
        if now >= self._give_up_at:
            self._perform(
                self._core.lost_master(f"{why}, and it did not come back within {patience_s:g} s")
            )
        else:
            self._retry_at = now + RETRY_S

    def _patience_s(self) -> float | None:
        """How long to wait for events; None when there is nothing to do without one."""
        if self._retry_at is None or self._core.over is not None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def _retry(self) -> None:
        self._retry_at = None
        self._close_link()
        self._link = self._open_link()

    # ---- actions ----

    def _perform(self, actions: list[core.Action]) -> None:
        for action in actions:
            kind = type(action)
            self._sent |= kind not in SILENT
            self._perform_by_type[kind](action)

    def _send(self, action: core.Send) -> None:
        try:
            self._link.socket.send(m.encode(action.message), zmq.DONTWAIT)
        except zmq.Again:
            pass  # the connection broke: the monitor, which knows why, is about to be read

    def _register(self, action: core.RegisterOp) -> None:
        memory = self._memory[action.op]
        ids = {"run": action.run, "tag": action.tag, "min_seq": action.min_seq}
        if isinstance(memory, Pool):
            ids["first_counted"] = memory.first_counted
        if isinstance(memory, Operands):
            self._engine.register_collective(
                action.op,
                what=memory.work.what,
                redop=memory.work.redop,
                members=memory.work.members,
                parts=[
                    Part(each.send.address, each.recv.address, each.count, each.send.dtype.value)
                    for each in memory.each
                ],
                format=wire_format(memory.work),
                **ids,
            )
        elif memory.reader is None:
            self._engine.register_serve(action.op, pieces=memory.pieces, limit=memory.limit, **ids)
        else:
            self._engine.register_fetch(
                action.op, pieces=memory.pieces, leaf_bytes=LEAF_BYTES, **ids
            )

    def _start(self, action: core.StartOp) -> None:
        memory = self._memory[action.op]
        local = all(self._local(info) for info in self._core.plan.peers)
        members = action.rings[0].members if action.rings else 1
        total, quantized = members * 4 * MIB, False
        if isinstance(memory, Operands):
            total = memory.nbytes
            quantized = bool(memory.work.algorithm)
        self._engine.start(
            action.op,
            seq=action.seq,
            nonce=action.nonce,
            chunk_bytes=chunk_bytes(total, members, local, quantized),
            rings=[
                Ring(r.stream, r.members, r.position, r.begin, r.count, r.root, r.ranks)
                for r in action.rings
            ],
        )

    def _local(self, info: m.PeerInfo) -> bool:
        hello = self._hello
        return bool(hello.ipc and info.ipc) and info.machine == hello.machine

    def _open_stream(self, action: core.OpenStream) -> None:
        to, local = action.to, self._local(action.to)
        self._opened[action.stream] = to
        endpoint = f"ipc://{to.ipc}" if local else f"tcp://{address_text(to.host, to.port)}"
        self._engine.open_stream(
            action.stream,
            endpoint,
            lanes=lanes(local, self._pool_size, self._config),
            hwm=high_water_mark(local),
            peer=to.peer,
            nonce=self._core.plan.nonce,
            curve_server=to.curve,
        )

    def _store(self, action: core.Store) -> None:
        memory = self._memory[action.call]
        assert isinstance(memory, Operands)
        for operand in memory.each:
            store(operand.recv, action.data)

    def _close_stream(self, action: core.CloseStream) -> None:
        self._opened.pop(action.stream, None)
        self._engine.close_stream(action.stream)

    def _answer(self, action: core.Answer | core.Fail) -> None:
        self._memory.pop(action.call, None)  # no op of the engine needs it any more
        call = self._calls.pop(action.call, None)
        if call is not None:
            call.put(action)

    def _note(self, action: core.Plan | core.Fetched) -> None:
        self._calls[action.call].put(action)

    # ---- the end ----

    def _shut_down(self) -> None:
        self._close_link()
        self._engine.close()  # restores and lets go of what is not settled
        self._context.term()
        self._waiter.close()
        self._memory.clear()
        self._closed.set()
        self._wake_out.close()
        self._wake_in.close()
        self._drain_after_end()

    def _drain_after_end(self) -> None:
        """Fails every call that no one will answer any more."""
        self._run_commands()
        for number in list(self._calls):
            ended = core.Fail(0, Result.INTERNAL_ERROR, "the communicator has ended")
            self._answer(replace(self._core.over or ended, call=number))
