"""A peer's part in a synchronisation of the shared state.

The peer serves its offer from its vote on. A plan says which entries to fetch from which holders.
The master may replace it (if a holder died, or another receiver failed). If the new plan requires
the same content, the fetch continues with the new holders; otherwise it is void. What a fetch in
place may have overwritten is never offered again, neither by this peer nor by the master.
"""

from __future__ import annotations

from dataclasses import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail, Fault, Follow
from pccl.protocol.peer.failures import WHY_MAX
from pccl.protocol.peer.ghosts import Ghosts
from pccl.protocol.peer.knowledge import Knowledge
from pccl.protocol.peer.outbox import Outbox
from pccl.protocol.peer.transfers import Transfer, Transfers
from pccl.protocol.rounds import WITHDRAWN, Kind
from pccl.types import Result, SharedStateSyncStrategy

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value


class Synchronisations:
    """Handles plans and results of synchronisations."""

    def __init__(
        self, knowledge: Knowledge, outbox: Outbox, ghosts: Ghosts, transfers: Transfers
    ) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._ghosts, self._transfers = ghosts, transfers
        self._plan: m.SyncPlan | None = None

    # ---- plans ----

    def planned(self, plan: m.SyncPlan) -> None:
        """The master has sent a plan."""
        one = self._transfers.of(plan.call)
        if one is None:
            return
        if plan.in_place:
            one.overwritten.update(plan.fetch)
        content = plan.fetch, plan.digests
        resumed = bool(one.fetch_op) and one.planned and one.content == content
        if not resumed:
            self._transfers.void_fetch(one)
        holders = plan.holders if resumed and not one.fetched else None
        self._transfers.plan(one, plan.seq, plan.nonce, content, plan.serve, holders)
        self._plan = plan
        # when its streams are open, even if there is nothing to fetch
        self._outbox.do(Follow(one.call, plan, resumed))
        if resumed and one.fetched:
            self._transfers.report(one, True, "")

    def fetch(self, op: int, seq: int) -> None:
        """The caller has memory for a plan; ignored if the plan is not the current one."""
        one, plan = self._transfers.by(seq), self._plan
        if one is not None and plan is not None and plan.call == one.call:
            self._transfers.fetch(one, op, plan.holders)

    def fetched(self, seq: int, ok: bool, why: str, differences: m.Differences) -> None:
        """The caller has fetched what a plan requires, or has failed."""
        one = self._transfers.current
        if one is not None and one.planned and one.seq == seq:
            self._outbox.say(m.FetchedVote(seq, ok, why[:WHY_MAX], differences))

    # ---- the end ----

    def synced(self, result: m.SyncResult) -> None:
        """All receivers hold the elected content, or nothing was synchronised."""
        one = self._transfers.current
        ours = one is not None and one.call == result.call
        without = self._without_us(one, result) if one is not None and ours else None
        self._knowledge.learn(
            sync=result.round,
            revision=result.revision,
            plan=result.plan,
            holds=without is None and result.call not in self._ghosts,
            short=result.short,
        )
        self._knowledge.veteran |= without is None
        self._ghosts.lay(result.call)
        if one is not None and ours:
            self._transfers.end(one, without or result)

    def _without_us(self, one: Transfer, result: m.SyncResult) -> Fail | None:
        """Why this peer had no part in a synchronisation that is over; None if it had.

        Derived from its offer and the result, so that a peer that missed the result and learns it
        from a restarted master concludes the same as one that was told.
        """
        assert isinstance(one.vote, m.SyncVote)
        offer = one.vote.offer
        if result.short:
            why = (
                f"the shared state is to begin with {result.short} peers, and its group has "
                f"{len(self._knowledge.plan.peers)}"
            )
            return Fail(one.call, Result.TOO_FEW_PEERS, why, Fault.TOO_FEW_PEERS, one.phase)
        stood = offer.strategy != RECEIVE_ONLY and not (offer.torn or one.overwritten)
        if stood and offer.revision > result.revision:
            why = (
                f"this peer offers revision {offer.revision}, and the others of its group are at "
                f"{result.revision}, which they have synchronised without this peer: offer that "
                "one or a lower one to receive what they have, or start them from this peer's"
            )
            return Fail(one.call, Result.INVALID_ARGUMENT, why, phase=one.phase)
        return None

    def release(self, one: Transfer, fail: Fail) -> None:
        """A caller leaves before its synchronisation has ended."""
        result = WITHDRAWN[Kind.SYNC]
        self._transfers.release(one, replace(fail, result=result, phase=one.phase))

    # ---- a restarted master ----

    def missed(self, done: m.Done) -> None:
        """The synchronisation that others have completed since, if this peer's caller has left."""
        if self._knowledge.done.sync != done.sync:
            self._knowledge.learn(
                sync=done.sync, revision=done.revision, plan=done.plan, holds=False
            )

    def resume(self, one: Transfer, before: m.Done, done: m.Done) -> None:
        """Continues with a restarted master, which knows `done`; this peer knew `before`."""
        void = m.SyncPlan(one.call, 0, (), (), (), ())
        if before.sync == done.sync:
            if one.planned:  # whatever it said, the next election begins anew
                self.planned(void)
            assert isinstance(one.vote, m.SyncVote)
            offer = one.vote.offer.overwritten(one.overwritten)
            one.vote = m.SyncVote(one.vote.call, offer, self._knowledge.done.holds)
            self._outbox.say(one.vote)
            return
        if one.planned and one.seq != done.plan:
            # the last plan was lost too: it required no fetch here, or this peer would have voted
            self.planned(m.SyncPlan(one.call, done.plan, (), (), (), ()))
        self.synced(m.SyncResult(one.call, done.revision, done.sync, done.plan, short=done.short))
