"""A peer's membership in a run: joining, ranks, calls in flight, rounds, and collectives."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from pccl import operands
from pccl.descriptors import ReduceOpDescriptor
from pccl.errors import (
    AGAIN,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    TooFewPeersError,
    error_for,
    not_picklable,
)
from pccl.operands import Ranks
from pccl.protocol.peer import effects
from pccl.protocol.peer.calls import place
from pccl.protocol.peer.state import Knowledge
from pccl.protocol.rounds import EXCLUSIVE, Grace
from pccl.protocol.tuning import choose
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, End, Note, error_of
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.connect import RetryPolicy, connect
from pccl.runtime.client.memory import Copies, Operands, Wide, nothing, on_host
from pccl.runtime.config import Config
from pccl.runtime.forks import FORKED
from pccl.runtime.signals import aside
from pccl.support import require, whole
from pccl.types import ReduceInfo, Result

log = logging.getLogger("pccl")

T = TypeVar("T")

TAGS = range(1 << 64)


def until_no_peer_leaves(call: Callable[[], T]) -> T:
    """Makes a call, and again whenever an exception has ended the call of another peer."""
    while True:
        try:
            return call()
        except PeerLostError as error:
            log.warning("the call begins again: %s", error)


class CallsInFlight:
    """The calls in progress, and which calls may begin beside them.

    A launched collective counts as in progress until it is awaited, or can no longer be awaited.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, for handles that are garbage-collected
        self._rounds: dict[str, Call] = {}
        self._tags: dict[int | str, Call] = {}
        self._user: threading.Thread | None = None  # the thread that made the latest call
        # whether two concurrent threads have made calls. If not, a thread makes no other call while
        # it waits in one, and its vote says so. Then the master can end the call if no other peer
        # will ever enter it.
        self.several_threads = False
        self.any_collective = False  # whether a collective has been launched since it was reset

    def enter(
        self, name: str, call: Call, tags: Collection[int] = (), pair: tuple[int, ...] = ()
    ) -> None:
        """Begins a call. A collective passes its tags; a send passes its two peers, too.

        Raises PCCLError: PENDING_ASYNC_OPS, INVALID_USAGE or INVALID_ARGUMENT: a call in progress
        excludes it.
        """
        with self._lock:
            if name in EXCLUSIVE and self._tags:
                in_use = sorted(self._tags, key=str)
                why = f"collectives were not awaited (tags {in_use}): wait() for them first"
                raise error_for(Result.PENDING_ASYNC_OPS, name, why)
            rounds = self._rounds.keys()
            others = rounds if name in EXCLUSIVE else rounds & (EXCLUSIVE | {name})
            if others:
                why = f"another thread of this peer is in {min(others)}()"
                raise error_for(Result.INVALID_USAGE, name, why)
            if not tags:
                self._rounds[name] = call
            self.any_collective |= bool(tags)
            for each in tags:
                tag = place(each, pair)
                if self._tags.setdefault(tag, call) is not call:
                    why = f"tag {tag} is in use by a collective: wait() for it, or use another tag"
                    raise error_for(Result.INVALID_ARGUMENT, name, why)

    def leave(self, call: Call) -> None:
        """Ends a call, if it began. Idempotent."""
        with self._lock:
            for name in [name for name, other in self._rounds.items() if other is call]:
                del self._rounds[name]
            for tag in [tag for tag, other in self._tags.items() if other is call]:
                del self._tags[tag]

    def note_thread(self) -> None:
        """Records that this thread makes a call."""
        with self._lock:
            user, self._user = self._user, threading.current_thread()
            self.several_threads |= user not in (None, self._user) and user.is_alive()


class KnownRanks:
    """The ring as the program saw it last: peers by rank.

    A call in which the program changes the membership updates the ranks of all threads when it
    returns. If one thread reads the ranks, or learns of a loss, the other threads keep the ranks
    that they have seen, because they may still use them. A thread that has not read the ranks uses
    those of the last update.
    """

    def __init__(self) -> None:
        self._order: tuple[int, ...] = ()
        self._updates = 0  # the number of updates of the ranks of all threads
        self._own = threading.local()

    def update(self, by_rank: tuple[int, ...]) -> None:
        """Updates the ranks of all threads."""
        self._order = by_rank
        self._updates += 1

    def see(self, by_rank: tuple[int, ...]) -> None:
        """Updates the ranks of this thread."""
        self._own.order, self._own.updates = by_rank, self._updates

    def lose(self, by_rank: tuple[int, ...]) -> None:
        """Updates the ranks of this thread, whose call has failed because a peer was lost."""
        self.see(by_rank)
        self._order = self._own.order

    @property
    def order(self) -> tuple[int, ...]:
        mine: tuple[int, ...] = getattr(self._own, "order", ())
        return mine if mine and self._own.updates == self._updates else self._order

    def of(self, number: int) -> Ranks:
        """The ranks of a peer, as this thread knows them."""
        return Ranks.of(self.order, number)


def info(end: effects.Answer) -> ReduceInfo:
    reduced = end.value
    assert isinstance(reduced, effects.Reduced)
    return ReduceInfo(reduced.world_size, reduced.tx_bytes, reduced.rx_bytes)


class AsyncReduceHandle:
    """A collective in progress, returned by the `_async` methods of `Communicator`.

    If the handle is garbage-collected before `wait()`, the collective continues, and its tag is
    free when it has ended; if it fails, the log has a warning.
    """

    _over = True  # no thread needs to await it

    def __init__(self, membership: Membership | None, name: str = "", *tags: int) -> None:
        """`_begin` launches the collective, whose tag is the first of the tags.

        Without a membership it has ended already.
        """
        self._made: Callable[[], Any] = nothing  # returns the result
        self._end: End | None = None  # the answer, once a thread has awaited it
        if membership is None:
            self._end = effects.Answer(0, effects.Reduced(1, 0, 0))
            return
        self._tags = [whole("tag", tag, TAGS, OverflowError) for tag in tags]
        self._client, self._name = membership.one_of_several(name), name
        self._calls, self._ranks = membership.calls, membership.ranks
        self._call = self._client.call()
        self._copies: Copies | None = None
        self._wide: Wide | None = None
        self._lock = threading.Lock()

    @property
    def result(self) -> Any:
        """The array, or list or dict of arrays, that holds the result.

        Its content is valid once `wait()` has reported success. Read-only arrays are replaced by
        new ones of their library, created when this is read.
        """
        return self._made()

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "its collective is under way in this process")

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome; later calls return the same outcome.

        An exception in this thread while it waits abandons the collective.

        Args:
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            (is_success, status, info): status is the value of a `Result`; after a failure, info is
            `ReduceInfo(0, 0, 0)` and the send buffer is unchanged.

        Raises:
            TypeError: `timeout` is not a number.
            ValueError: `timeout` is not a valid time.
        """
        deadline = Deadline(timeout)
        try:
            end = self._finish(deadline)
        except BaseException:
            self._cancel()
            raise
        if isinstance(end, effects.Fail):
            return False, end.result.value, ReduceInfo(0, 0, 0)
        return True, Result.SUCCESS.value, info(end)

    def done(self) -> bool:
        """True if `wait()` would return at once. Does not wait, and has no side effects.

        `result` is valid, and the tag is free, only after `wait()` has returned.
        """
        if self._end is not None:
            return True
        return self._call.end is not None or self._client.is_forked

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` as soon as `wait()` would return at once, possibly now.

        It runs in a thread of pccl and must return soon: it may set an event, for example. The
        caller keeps the handle, and calls `wait()`.
        """
        if self._end is not None:
            callback()
        else:
            self._client.on_end(self._call, lambda _: callback())

    def __await__(self) -> Generator[Any, None, tuple[bool, int, ReduceInfo]]:
        """`await handle`, in asyncio: returns what `wait()` returns, without blocking the loop.

        Unlike an exception in `wait()`, cancelling an await (as `asyncio.wait_for` does) does not
        abandon the collective, which continues and can be awaited again. To abandon it, call
        `wait(timeout=0)`. Any number of tasks may await it.
        """
        return self._outcome().__await__()

    async def _outcome(self) -> tuple[bool, int, ReduceInfo]:
        import asyncio  # here, so that importing pccl does not import it

        if not self.done():
            loop, ended = asyncio.get_running_loop(), asyncio.Event()

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(ended.set)

            self.add_done_callback(notify)
            await ended.wait()
        if self._end is None and self._copies is not None and not self._copies.are_settled:
            return await asyncio.to_thread(self.wait)
        return self.wait()

    @property
    def error(self) -> PCCLError | None:
        """The exception that the blocking call would raise.

        None before `wait()` has returned, or if the collective has succeeded.
        """
        end = self._end
        if isinstance(end, effects.Fail):
            return error_of(self._name, end, self._call.began_s)
        return None

    # ---- its steps ----

    def _begin(self, work: Operands, stuck: bool = False) -> None:
        """Launches it. `stuck`: the caller makes no other call before the answer."""
        self._over, self._made = False, work.result
        self._calls.enter(self._name, self._call, self._tags, work.pair)
        conditions = self._client.knowledge.conditions
        tuning = choose(work.work, work.nbytes, conditions)
        work, self._copies = on_host(work, tuning, conditions)
        if self._copies is not None:
            self._copies.begin()
        if tuning.wide:
            wide = Wide(work.each)
            work = replace(work, wide=wide)
            if self._copies is not None:
                self._copies.wide = wide
            else:
                self._wide = wide
        self._client.collective(self._call, self._tags[0], work, tuning, stuck)
        if self._copies is not None:
            self._copies.go_on(self._client, self._call)

    def _finish(self, deadline: Deadline) -> End:
        """Waits for the answer; several threads may wait."""
        if self._end is None and self._client.is_forked:  # its locks may be locked forever
            self._end, self._over = FORKED, True
        if self._end is None:
            note = deadline.next(self._client, self._call)
            assert isinstance(note, effects.Answer | effects.Fail)
            with self._lock:
                if self._end is None:
                    self._conclude(note)
                    self._end = note
        assert self._end is not None
        return self._end

    def _conclude(self, end: End) -> None:
        self._over = True
        self._calls.leave(self._call)
        if isinstance(end, effects.Fail):
            if end.result in AGAIN:
                self._ranks.lose(self._client.knowledge.by_rank)
        elif self._wide is not None:
            self._wide.narrow(info(end).world_size)
        if self._copies is not None:
            self._copies.settle()

    def _cancel(self) -> None:
        """Ends the collective after an exception in its caller, and frees its tag. Idempotent."""
        if self._end is not None:
            return
        try:
            self._over = True
            self._client.cancel(self._call)
            if self._copies is not None and not self._client.is_forked:
                aside(self._copies.cancel)
        finally:
            self._calls.leave(self._call)


class _Held(AsyncReduceHandle):
    """A handle that its caller may drop. Only this class has `__del__`, which loses exceptions."""

    def __del__(self) -> None:
        if not self._over and not sys.is_finalizing():
            calls, call, name = self._calls, self._call, self._name

            def ended(end: End) -> None:
                calls.leave(call)
                if isinstance(end, effects.Fail):
                    why = error_of(name, end, call.began_s)
                    log.warning("a collective whose handle was dropped has failed: %s", why)

            self._client.on_end(call, ended)


class Membership:
    """One peer's membership: before it begins, while it lasts, and after its end."""

    def __init__(self) -> None:
        self.calls = CallsInFlight()
        self.ranks = KnownRanks()  # as the program knows them
        self.revision = 0  # the shared state's revision after the last synchronization
        # since it joined: whether it has synchronized shared state, and called `admit`
        self.synced = self.has_admitted = False
        self._asked_s = -math.inf  # when `are_peers_pending` last returned False
        self._client: PeerClient | None = None
        self._finalizer: weakref.finalize[..., object] | None = None

    # ---- begin and end ----

    def begin(
        self,
        policy: RetryPolicy,  # the master, and the time limits of the attempts
        config: Config,  # timings and limits
        make: Callable[[str], PeerClient],  # makes a client of the master at an address
        owner: object,  # the object that uses this membership
    ) -> None:
        """Joins a run; see `connect`. Leaves it when `owner` is garbage-collected, or before.

        Raises PCCLError: INVALID_USAGE: this peer is in a run already; or as `connect`.
        """
        if self._client is not None and self._client.is_forked:
            raise error_of("connect", FORKED)
        if self._client is not None and self._client.over is None:
            why = "this communicator is connected already"
            raise error_for(Result.INVALID_USAGE, "connect", why)
        self.calls.note_thread()
        self.end()  # the previous membership is over, but its threads may remain

        def joined(client: PeerClient) -> None:
            self.ranks.update(client.knowledge.by_rank)
            self.synced = self.has_admitted = self.calls.any_collective = False
            why = "the communicator was deleted"
            self._finalizer = weakref.finalize(owner, client.close, why)
            self._client = client

        connect(policy, config, make, joined)

    def end(self) -> None:
        if self._client is not None:
            self._client.close("the communicator was closed")
        if self._finalizer is not None:
            self._finalizer.detach()

    @property
    def is_fresh(self) -> bool:
        """True until this peer makes its first `admit` or collective.

        The others are still in the `admit` that admitted this peer. So its own first `admit` skips
        the question for newcomers, and continues with the synchronization like the others.
        """
        return not (self.has_admitted or self.calls.any_collective)

    # ---- the peer, for a call ----

    def client(self, name: str) -> PeerClient:
        """The client, for the API call `name`.

        Raises PCCLError: INVALID_USAGE before `begin`; after the end, the reason for the end.
        """
        client = self._client
        if client is None:
            why = "this communicator is not connected: call connect() first"
            raise error_for(Result.INVALID_USAGE, name, why)
        if client.over is not None:
            raise error_of(name, client.over)  # before locks: a forked child cannot take them
        self.calls.note_thread()
        return client

    def last(self, name: str) -> PeerClient:
        """The client, even if its membership is over."""
        return self.client(name) if self._client is None else self._client

    def seen(self, name: str) -> Knowledge:
        """The peer's knowledge of the run. This thread thereby sees the current ranks."""
        known = self.client(name).knowledge
        self.ranks.see(known.by_rank)
        return known

    def one_of_several(self, name: str) -> PeerClient:
        """The client, if its group has other members.

        Raises PCCLError: TOO_FEW_PEERS, or as `client`.
        """
        client = self.client(name)
        if client.knowledge.world.local_size < 2:
            self.ranks.see(client.knowledge.by_rank)
            why = f"this peer is alone in its group of the run at {client.master}"
            raise error_for(Result.TOO_FEW_PEERS, name, why)
        return client

    def known_ranks(self, name: str) -> Ranks:
        return self.ranks.of(self.one_of_several(name).knowledge.number)

    def pair(self, name: str, rank: int, sends: bool) -> tuple[int, int]:
        """The numbers of this peer and of the peer with a rank, the sender first."""
        number = self.one_of_several(name).knowledge.number
        order = self.ranks.order
        rank = operator.index(rank)
        if not 0 <= rank < len(order) or order[rank] == number:
            own = order.index(number)
            raise ValueError(
                f"{rank} is not another peer's rank: they are 0 to {len(order) - 1}, "
                f"and this peer's is {own}"
            )
        return (number, order[rank]) if sends else (order[rank], number)

    def described(self, group: int) -> str:
        """This peer's name, rank and group as text; from any thread, without side effects."""
        client = self._client
        if client is None or client.over is not None:
            return f"group {group}, not connected"
        known = client.knowledge
        number, order = known.number, known.by_rank
        at = f"rank {order.index(number)} of {len(order)}" if number in order else "no rank"
        name = next((info.name for info in known.plan.peers if info.peer == number), "")
        return f"peer {number} ({name}), {at}, group {group}"

    def is_alone(self, name: str) -> bool:
        return self.client(name).knowledge.world.local_size < 2

    # ---- calls that are rounds ----

    def round(
        self,
        name: str,
        client: PeerClient,
        event: Callable[[int], list[effects.Effect]] | None,
        end_of: Callable[[PeerClient, Call], Note | None],
        aim: str = "",
        ranks: bool = False,
    ) -> Any:
        """Takes part in a round of the whole run until it ends, and returns its result.

        `event` makes the call, or else `end_of` does, which waits for the end. `ranks`: the program
        expects that the ranks change.
        """
        call = client.call()
        try:
            self.calls.enter(name, call)
            call.aim = aim
            if event is not None:
                client.begin(call, event)
            end = end_of(client, call)
            self.calls.leave(call)
        except BaseException:
            self.cancel(client, call)
            raise
        if isinstance(end, effects.Fail):
            raise error_of(name, end, call.began_s)
        assert isinstance(end, effects.Answer)
        if ranks:
            self.ranks.update(client.knowledge.by_rank)
        return end.value

    def cancel(self, client: PeerClient, call: Call) -> None:
        try:
            client.cancel(call)
        finally:
            self.calls.leave(call)

    # ---- rounds of the run ----

    def update_topology(self, deadline: Deadline) -> int:
        """Admits pending peers. Returns the new size of the group, the same on all peers."""
        client = self.client("update_topology")
        enter = client.peer.update_topology
        size: int = self.round("update_topology", client, enter, deadline.next, ranks=True)
        return size

    def are_peers_pending(self, deadline: Deadline) -> bool:
        return self.ask(deadline, limits.PENDING_PATIENCE_S if self.asks_again else 0.0)

    @property
    def asks_again(self) -> bool:
        """True if the program was told just now that no peer is pending: it may be polling."""
        return time.monotonic() - self._asked_s < limits.PENDING_AGAIN_S

    def ask(
        self, deadline: Deadline, patience_s: float, grace: Grace | None = None, aim: str = ""
    ) -> bool:
        """True if peers are pending. The answer False may come up to `patience_s` later.

        Members that have not entered when the `grace` is over are dropped from the run. None: this
        peer waits for all, and does not count among the `enough` of the others' grace.
        """
        client = self.client("are_peers_pending")
        stuck = not self.calls.several_threads and deadline.left_s is None

        def enter(number: int) -> list[effects.Effect]:
            return client.peer.are_peers_pending(number, stuck, patience_s > 0, grace)

        def end_of(client: PeerClient, call: Call) -> Note | None:
            if patience_s > 0:
                note = deadline.next(client, call, patience_s)
                if note is not None:
                    return note
                client.post(lambda: client.peer.hurry(call.number))
            return deadline.next(client, call)

        pending = bool(self.round("are_peers_pending", client, enter, end_of, aim))
        self._asked_s = -math.inf if pending else time.monotonic()
        return pending

    def repeat_until_enough(self, round_: Callable[[], T], wanted: int, timeout: float | None) -> T:
        """Makes a call that begins a run; while peers are too few, admits newcomers and repeats it.

        All members get the same answer, so all of them admit the next newcomers, and repeat the
        call together with them.
        """
        deadline = Deadline(timeout)
        client = self.client("sync_shared_state")
        while True:
            try:
                return round_()
            except TooFewPeersError:
                here = client.knowledge.world.local_size
                aim = f"min_peers is {wanted} (or more, for another peer), {here} here"
            try:
                while not self.await_newcomers(deadline, limits.FOREVER_S, aim):
                    pass
            except PCCLTimeoutError as error:
                why = f"the run has not begun after {timeout:g} s: {aim}"
                raise PCCLTimeoutError(error.result, "sync_shared_state", why) from None

    def await_newcomers(self, deadline: Deadline, patience_s: float, aim: str = "") -> int:
        """Waits for newcomers and admits them. Returns the group's new size, the same on all peers.

        Returns 0 if none have come before the `patience_s` of one of the peers is over.
        """
        return self.update_topology(deadline) if self.ask(deadline, patience_s, aim=aim) else 0

    # ---- collectives ----

    def launch(self, name: str, work: Operands, tag: int) -> AsyncReduceHandle:
        handle = _Held(self, name, tag)
        try:
            handle._begin(work)
            return handle
        except BaseException:
            handle._cancel()
            raise

    def run(self, name: str, work: Operands, tag: int, timeout: float | None) -> ReduceInfo:
        """Launches a collective and waits for it; raises an exception if it fails."""
        deadline = Deadline(timeout)
        one = AsyncReduceHandle(self, name, tag)
        try:
            one._begin(work, stuck=timeout is None and not self.calls.several_threads)
            end = one._finish(deadline)
        except BaseException:
            one._cancel()
            raise
        if isinstance(end, effects.Fail):
            raise error_of(name, end, one._call.began_s)
        found = info(end)
        object.__setattr__(found, "result", work.result())  # pypccl's constructor does not take it
        return found

    def run_all(
        self, name: str, works: Sequence[Operands], tag: int, timeout: float | None
    ) -> None:
        """Launches several collectives, waits for all, and raises the first failure."""
        deadline = Deadline(timeout)
        launches: list[AsyncReduceHandle] = []
        try:
            for work in works:
                launches.append(AsyncReduceHandle(self, name, tag))
                launches[-1]._begin(work)
            ends = [(one, one._finish(deadline)) for one in launches]
        except BaseException:
            for one in launches:
                one._cancel()
            raise
        for one, end in ends:
            if isinstance(end, effects.Fail):
                raise error_of(name, end, one._call.began_s)

    def run_with_retry(
        self,
        name: str,
        descriptors: Sequence[ReduceOpDescriptor],
        max_in_flight: int,
        timeout: float | None,
    ) -> ReduceInfo:
        """Runs several all-reduces, in bundles, and repeats each bundle until it commits."""
        deadline = Deadline(timeout)
        if not descriptors:
            raise error_for(Result.INVALID_ARGUMENT, name, "the list of descriptors is empty")
        for descriptor in descriptors:
            require("a descriptor", descriptor, ReduceOpDescriptor)
        if max_in_flight < 1:
            why = f"max_in_flight is {max_in_flight}: it must be at least 1"
            raise error_for(Result.INVALID_ARGUMENT, name, why)
        parts = operands.bundles(descriptors)
        waiting = list(range(len(parts)))
        in_flight: list[tuple[int, AsyncReduceHandle]] = []
        world_size = tx_bytes = rx_bytes = 0
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_in_flight:
                    index = waiting.pop(0)
                    tags = [each.reduce_descriptor.tag for each in parts[index]]
                    one = AsyncReduceHandle(self, name, *tags)
                    in_flight.append((index, one))
                    one._begin(operands.of_descriptors(parts[index]))
                index, one = in_flight[0]
                end = one._finish(deadline)
                del in_flight[0]
                if isinstance(end, effects.Answer):
                    found = info(end)
                    world_size = found.local_world_size
                    tx_bytes += found.tx_bytes
                    rx_bytes += found.rx_bytes
                elif end.again:
                    # In the order of the list, so that all peers have the same ones in flight.
                    waiting = sorted([*waiting, index])
                else:
                    for _, other in in_flight:
                        other._finish(Deadline(0.0))
                    raise error_of(name, end, one._call.began_s)
        except BaseException:
            for _, one in in_flight:
                one._cancel()
            raise
        return ReduceInfo(world_size, tx_bytes, rx_bytes)
