"""One peer's part in a synchronisation of the shared state, in the thread of the caller.

Offers what it has; fetches what the master's plan says into staging memory, proves it leaf by leaf,
votes; and only when all receivers have voted does it overwrite the caller's memory. So a call that
fails has changed nothing, at the cost of staging memory for the bytes that differ. A plan can be
replaced by another while it is carried out (a holder died).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, Leaf, Note
from pccl.runtime.client.client import Client
from pccl.runtime.client.staging import Region, Staging, Verdict, served
from pccl.runtime.digest import digests
from pccl.runtime.uninterrupted import aside
from pccl.types import SharedStateProgress

log = logging.getLogger("pccl")

Adopt: TypeAlias = Callable[[effects.Synced, tuple[int, ...]], None]
BATCH = 64  # verdicts on small entries that are given at once


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """What a caller asks of a synchronisation, beside what its shared state is.

    Attributes:
        strategy: a pccl.SharedStateSyncStrategy value.
        strict: content that has diverged is an error for all.
        progress: told now and then how far a transfer is.
        deadline: when to give up.
        min_peers: with fewer no shared state is to begin.
    """

    strategy: int
    strict: bool
    progress: Callable[[SharedStateProgress], None] | None
    deadline: Deadline
    min_peers: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a synchronisation ended, and what it cost to hash what this peer has.

    Attributes:
        error: what the caller's callback has raised. It ends the synchronisation, unless that was
            past the point of no return.
    """

    end: effects.Synced | effects.Fail
    error: Exception | None
    hashed_bytes: int
    hash_seconds: float


def synchronise(
    client: Client,
    call: Call,
    regions: Sequence[Region],
    revision: int,
    options: SyncOptions,
    owner: object,
    adopt: Adopt,
) -> Outcome:
    """Takes part in a synchronisation until it ends, and says how.

    An exception leaves the call as it stands, the caller's memory untouched or wholly overwritten:
    the caller lets go of it.

    Args:
        client: the peer.
        call: to be made.
        regions: the shared state; its memory must not change meanwhile.
        revision: of the shared state, as this peer has it.
        options: what else it asks for.
        owner: kept alive as long as the engine refers to the memory.
        adopt: told, at a success, which regions were overwritten.
    """
    began = time.monotonic()
    found = digests([(region.address, region.nbytes) for region in regions])
    hash_seconds = time.monotonic() - began
    pieces, tables = served(regions, found)
    entries = tuple(
        m.Entry(r.name, r.dtype, r.count, r.any_content, digest.root, r.layout)
        for r, digest in zip(regions, found, strict=True)
    )
    offer = m.Offer(revision, options.strategy, entries, options.strict, options.min_peers)
    client.sync(call, offer, pieces, (owner, found, tables))
    receiver = _Receiver(client, call, regions, options)
    end = receiver.receive(adopt)
    hashed_bytes = sum(region.nbytes for region in regions)
    return Outcome(end, receiver.error, hashed_bytes, hash_seconds)


class _Receiver:
    """Follows the notes of a synchronisation to its end."""

    def __init__(
        self, client: Client, call: Call, regions: Sequence[Region], options: SyncOptions
    ) -> None:
        self._client = client
        self._call = call
        self._regions = regions
        self._options = options
        self._staging: Staging | None = None
        self._plan = m.SyncPlan(0, 0, (), (), (), ())
        self._op = 0
        self._remind_at = 0.0
        self._complete = False  # all of the plan is in staging memory, and proven
        self._failure = ""  # why the fetch has failed, until the master is told
        self._fail_at = 0.0
        self._failures = 0
        self._verdicts: list[Verdict] = []
        self._progress = _Progress(options.progress)

    @property
    def error(self) -> Exception | None:
        """What the caller's callback has raised."""
        return self._progress.error

    def receive(self, adopt: Adopt) -> effects.Synced | effects.Fail:
        """Until the end, with the caller's memory overwritten if that is a success."""
        while True:
            match self._next():
                case effects.Follow(_, plan, resumed):
                    self._follow(plan, resumed)
                case Leaf(op, piece, leaf) if op == self._op and self._staging is not None:
                    self._verdicts += self._staging.judge(piece, leaf)
                case effects.Fetched(_, seq, True) if seq == self._plan.seq:
                    self._vote()
                case effects.Fetched(_, seq, False, why) if seq == self._plan.seq:
                    self._failure = why
                    self._fail_at = time.monotonic() + limits.TRANSFER_FAILURE_S * 4**self._failures
                    self._failures += 1
                case effects.Answer(_, effects.Synced() as synced):
                    self._install(synced, adopt)
                    return synced
                case effects.Fail() as fail:
                    return fail
            if self._verdicts and not (self._call.has_notes and len(self._verdicts) < BATCH):
                self._client.judge(self._op, self._verdicts)
                self._verdicts = []
            if not self._progress.report():
                why = "the callback of its caller has failed"
                self._client.withdraw(self._call, why)

    def _next(self) -> Note:
        """The next note.

        Meanwhile a peer that serves under a limit gives itself leave, one that fetches sees to its
        requests being answered, and one whose fetch has failed gives up if there is no other plan
        for it soon: mostly its holders have died, which the master is about to hear, and nobody is
        to blame.
        """
        deadline = self._options.deadline
        while True:
            pauses = []
            limited = bool(self._plan.serve) and self._client.serve_limit > 0
            if limited:
                pauses.append(limits.SERVE_INTERVAL_S)
            if self._failure:
                pauses.append(max(0.0, self._fail_at - time.monotonic()))
            if self._op and not self._complete:
                pauses.append(max(0.0, self._remind_at - time.monotonic()))
            if not pauses:
                return deadline.next(self._client, self._call)
            note = deadline.next_within(self._client, self._call, min(pauses))
            if note is not None:
                return note
            if limited:
                self._client.allow(self._call)
            if self._failure and time.monotonic() >= self._fail_at:
                self._client.fetched(self._plan.seq, False, self._failure)
                self._failure = ""
            if self._op and time.monotonic() >= self._remind_at:
                self._remind_at = time.monotonic() + limits.REMIND_S
                self._client.remind(self._op, limits.REMINDERS_MAX)

    def _follow(self, plan: m.SyncPlan, resumed: bool) -> None:
        self._plan, self._failure = plan, ""
        if resumed:
            return  # the staging memory holds what the plan asks for, or soon will
        self._staging, self._complete, self._op = None, False, 0
        self._verdicts.clear()
        if plan.fetch:
            self._staging = staging = Staging(plan, self._regions)
            self._op = self._client.fetch(
                self._call, plan.seq, staging.pieces(), len(self._regions), staging
            )
            self._remind_at = time.monotonic() + limits.REMIND_S
            self._progress.begin(staging)

    def _install(self, synced: effects.Synced, adopt: Adopt) -> None:
        staging = self._staging
        if staging is None:
            adopt(synced, ())
            return
        assert self._complete, "the master kept what this peer has not proven"
        # to the end, once begun: what is half overwritten is nobody's state
        aside(lambda: adopt(synced, staging.install()))

    def _vote(self) -> None:
        self._complete = True
        differences: tuple[m.Difference, ...] = ()
        if self._plan.diverged and self._staging is not None:
            described = itertools.islice(self._staging.differences(), m.DIFFERENCES_MAX)
            differences = tuple(described)
        self._client.fetched(self._plan.seq, True, "", differences)


class _Progress:
    """Tells the caller and the log how far a transfer is."""

    def __init__(self, callback: Callable[[SharedStateProgress], None] | None) -> None:
        self._callback = callback
        self._staging: Staging | None = None
        self._began = self._reported = self._logged = 0.0
        self._told = -1  # bytes, in the last call of the callback
        self.error: Exception | None = None

    def begin(self, staging: Staging) -> None:
        """A transfer begins."""
        self._staging, self._told = staging, -1
        self._began = self._logged = time.monotonic()
        self._reported = self._began - limits.PROGRESS_S

    def report(self) -> bool:
        """Tells, if it is time to. False once, when the callback has failed."""
        staging, now = self._staging, time.monotonic()
        if staging is None:
            return True
        done = staging.bytes_proven == staging.bytes_total
        progress = SharedStateProgress(
            staging.entries_proven,
            staging.entries_total,
            staging.bytes_proven,
            staging.bytes_total,
            now - self._began,
        )
        if now - self._logged >= limits.PROGRESS_LOG_S or (done and self._logged > self._began):
            self._logged = now
            log.info("shared state: %s", progress)
        due = now - self._reported >= limits.PROGRESS_S or done
        if due and self._callback is not None and self._told != staging.bytes_proven:
            self._reported, self._told = now, staging.bytes_proven
            try:
                self._callback(progress)
            except Exception as error:  # raised at the end: others wait for this peer meanwhile
                self.error, self._callback = error, None
                return False
        return True
