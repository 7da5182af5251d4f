"""A collective in progress, for torch: a Work, futures of its result, and threads for callbacks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import Work as BaseWork
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.futures import Future, collect_all

from pccl.errors import (
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    RanksChangedError,
    TooFewPeersError,
)
from pccl.extension import Deadline
from pccl.runtime import forks
from pccl.torch.members import Members
from pccl.types import Result

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

IDLE_S = 5.0  # an idle thread ends after this time

_log = logging.getLogger("pccl.torch")


def eager(function: C) -> C:
    """Makes torch.compile call a function, and all functions that it calls, uncompiled.

    torch.compiler.disable uses a wrapper, and imports torch._dynamo, which takes a second.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class CallbackPool:
    """Runs each job at once, in an idle thread or a new one.

    A callback of a future may wait for another collective, which needs a thread here to end. With a
    limited number of threads, or callbacks in the thread that ends collectives, they could wait for
    each other forever. Idle threads end after a while, and no thread delays the end of the process.
    """

    def __init__(self) -> None:
        self.forked()
        forks.watch(self)

    def forked(self) -> None:
        """Begins without threads, as a forked child does."""
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, job: Callable[[], None]) -> None:
        """Runs a job soon, without waiting."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            work = threading.Thread(target=self._work, args=(inbox,), name="pccl-torch")
            work.daemon = True
            work.start()
        inbox.put(job)

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                job = inbox.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                job = inbox.get()  # just given to this thread
            try:
                job()
            except Exception:  # a callback has failed; its future also has the exception
                _log.exception("a callback of a collective has failed")
            del job
            with self._lock:
                self._idle.append(inbox)


POOL = CallbackPool()


class TimeLimits:
    """Ends works whose time is up, even if nobody waits for them, except by their futures."""

    def __init__(self) -> None:
        self.forked()
        forks.watch(self)

    def forked(self) -> None:
        """Begins without a thread, as a forked child does."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # not safe to enter: see Latch
        self._due_s: dict[Work, float] = {}
        self._looks_s = 0.0  # when it looks next
        self._is_running = False

    def add(self, work: Work, left_s: float) -> None:
        with self._lock:
            self._due_s[work] = due_s = time.monotonic() + left_s
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="pccl-torch", daemon=True).start()
            elif due_s < self._looks_s:
                self._changed.notify()

    def discard(self, work: Work) -> None:
        with self._lock:
            self._due_s.pop(work, None)

    def _run(self) -> None:
        with self._lock:
            while self._due_s:
                now_s = time.monotonic()
                for work in [one for one, due_s in self._due_s.items() if due_s <= now_s]:
                    del self._due_s[work]
                    POOL.run(work.drive_and_notify)
                self._looks_s = min([now_s + IDLE_S, *self._due_s.values()])
                self._changed.wait(self._looks_s - now_s)
            self._is_running = False


TIME_LIMITS = TimeLimits()


def in_pool(job: Callable[[], T]) -> futures.Future[T]:
    """Runs a job in the pool. Returns a future of its result, or of its exception."""
    future: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    POOL.run(work)
    return future


class Handle(Protocol):
    """A launched collective, like `pccl.AsyncReduceHandle`."""

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, Any]: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None: ...

    @property
    def error(self) -> Exception | None: ...


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Task:
    """The description of a call.

    Attributes:
        name: for messages.
        launch: launches it with a tag; raises TooFewPeersError if this peer is alone.
        result: the value of its future.
        alone: a function that does the work of a group of one.
        settle: a function that copies the result to the caller's tensors; called once, after
            success.
        failed: called once, after a failure.
        ended: called once, with True after success, else False.
        again: whether it may be relaunched if a peer is lost in it.
        source: torch's rank of the sender of a received message.
        counts: whether all members launch it, so that it has a tag from their sequence.
    """

    name: str
    launch: Callable[[int], Handle]
    result: Any
    alone: Callable[[], None] = nothing
    settle: Callable[[], object] = nothing
    failed: Callable[[], None] = nothing
    ended: Callable[[bool], object] = lambda well: None
    again: bool = False
    source: Callable[[], int] = lambda: -1
    counts: bool = True


class Work(BaseWork):
    """A task in progress, driven by a thread that waits for it, or by one of the callback pool.

    Attributes:
        task: its description.
        error: the reason for its failure; None: it has not failed, or not yet.
        contributors: number of contributors to the result; the same on all of them.
    """

    def __init__(self, task: Task, tag: int, members: Members, timeout_s: float | None) -> None:
        super().__init__()
        self.task = task
        self.error: Exception | None = None
        self.contributors = 1
        self._tag = tag
        self._members = members
        self._timeout_s, self._deadline = timeout_s, Deadline(timeout_s)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._is_followed = False
        self._future: Future[Any] | None = None
        self._to_notify: Future[None] | None = None  # completes `_future`
        self._under_way: set[Work] = set()

    def begin(self, under_way: set[Work]) -> None:
        """Launches it; it is in `under_way` until it ends.

        The future and `wait` report a failure, because C++ does not survive a call that raises, for
        example in the middle of a backward pass. Wrong arguments do raise.
        """
        try:
            self._launch()
        except PCCLError as error:
            self._finish(error)
            return
        self._under_way = under_way
        under_way.add(self)
        if self._handle is None:
            self.drive()

    def follow(self) -> None:
        """Lets the pool end it when its collective ends or its time is up, though nobody waits."""
        if self._handle is not None and not self._is_followed:
            self._is_followed = True
            if (left_s := self._deadline.left_s) is not None:
                TIME_LIMITS.add(self, left_s)
            self._handle.add_done_callback(lambda: POOL.run(self.drive_and_notify))

    def _launch(self) -> None:
        """Launches it, or does the work alone in a group of one."""
        self._handle = None
        while self._handle is None:
            try:
                self._handle = self.task.launch(self._tag)
            except PeerLostError:  # in a call before its collective
                self._members.refresh()
                if not self.task.again:
                    raise
            except TooFewPeersError as error:
                before = self._members.size
                self._members.refresh()
                if before > 1 and not self.task.again:
                    why = f"all {before - 1} other members of the group are lost"
                    lost = Result.RANK_CONNECTION_LOST
                    raise PeerLostError(lost, self.task.name, why) from error
                self.task.alone()
                return

    def drive(self, timeout_s: float | None = None) -> None:
        """Waits for its end and settles it; `error` is set afterwards if it has failed."""
        try:
            self._end(timeout_s)
        finally:  # in the pool, because callbacks of the future may wait, but the caller must not
            if self._ended.is_set() and self._to_notify is not None:
                POOL.run(self._notify)

    def drive_and_notify(self) -> None:
        """Like `drive`, in a thread of the pool, which callbacks may occupy."""
        self._end(None)
        TIME_LIMITS.discard(self)
        self._notify()

    def _notify(self) -> None:
        """Completes the future, if there is an incomplete one."""
        with self._lock:
            future, self._to_notify = self._to_notify, None
        if future is not None:
            future.set_result(None)

    def _end(self, timeout_s: float | None) -> None:
        """Waits for its end and settles it, unless another thread has done so."""
        with self._lock:
            if self._ended.is_set():
                return
            failure: Exception | None = None
            try:
                self._conclude(timeout_s)
            except Exception as error:
                failure = error
            except BaseException as error:  # raised in this thread, which abandons the collective
                why = f"{type(error).__name__} in the thread that waited for it"
                failure = PeerLostError(Result.RANK_CONNECTION_LOST, self.task.name, why)
                raise
            finally:
                self._finish(failure)
                self._under_way.discard(self)

    def _finish(self, error: Exception | None) -> None:
        if error is not None:
            self.error = _in_words_of_torch(error)
            self._members.failed |= self.task.counts
            self.task.failed()
        self.task.ended(error is None)
        self._ended.set()

    def _conclude(self, timeout_s: float | None) -> None:
        while self._handle is not None:
            limits = [one for one in (timeout_s, self._deadline.left_s) if one is not None]
            well, _, info = self._handle.wait(timeout=min(limits, default=None))
            if well:
                if self.task.counts:
                    self.contributors = info.local_world_size
                    if self.contributors != self._members.size:
                        self._members.refresh()
                break
            error = self._handle.error
            assert error is not None
            if isinstance(error, PeerLostError):
                self._members.refresh()
            if isinstance(error, PCCLTimeoutError) and self._deadline.left_s == 0:
                # the words that torch programs look for
                why = f"Timed out waiting {self._timeout_s:g} s, the limit of this call or of its "
                why += f"group: {error.message}"
                raise PCCLTimeoutError(error.result, self.task.name, why) from error
            reordered = isinstance(error, RanksChangedError) and self.task.counts
            if not (reordered or (self.task.again and isinstance(error, PeerLostError))):
                raise error
            self._launch()
        self.task.settle()

    # ---- torch's Work ----

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end; a timeout of zero is no limit. Raises the error if it has failed."""
        seconds = None if timeout is None else timeout.total_seconds()
        self.drive(seconds if seconds and seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    @eager
    def get_future(self) -> Future[Any]:
        """A future of the result.

        To fail, it raises in a callback: C++ would take an exception that the future's own methods
        set for the result.
        """
        with self._lock:
            if self._future is None:
                self._to_notify = Future()
                self._future = self._to_notify.then(self._outcome)
        if self._ended.is_set():
            self._notify()
        self.follow()
        return self._future

    def _outcome(self, _: Future[None]) -> Any:
        if self.error is not None:
            raise self.error
        return self.task.result

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[Tensor]:
        found = self.task.result
        return [found] if isinstance(found, Tensor) else found

    def synchronize(self) -> None:
        pass

    def source_rank(self) -> int:
        return self.task.source()

    _source_rank = source_rank


def _in_words_of_torch(error: Exception) -> Exception:
    """Adds gloo's words for a lost peer, because programs look for them."""
    if not isinstance(error, PeerLostError):
        return error
    why = f"Connection closed by peer: {error.message}"
    found = type(error)(error.result, error.func_name, why)
    found.__cause__ = error.__cause__
    return found


class CoalescedWork(BaseWork):
    """Several Works as one, which has ended if there are none.

    Attributes:
        works: in the order of their calls.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self.works = list(works)

    @eager
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all within `timeout`; zero means no limit. Raises the first error."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        deadline = Deadline(seconds if seconds > 0 else None)
        for work in self.works:
            work.drive(deadline.left_s)
        error = self.exception()
        if error is not None:
            raise error
        return True

    @eager
    def get_future(self) -> Future[Any]:
        """A future of all results, which fails if one of them fails."""
        collected: Future[Any] = collect_all([work.get_future() for work in self.works])

        def results(done: Future[list[Future[Any]]]) -> list[Any]:
            return [each.value() for each in done.value()]  # raises the error of a failed one

        return collected.then(results)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> Exception | None:
        return next((error for work in self.works if (error := work.exception())), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self.works for tensor in work.result()]

    def synchronize(self) -> None:
        pass
