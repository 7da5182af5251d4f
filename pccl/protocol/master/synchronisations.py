"""Synchronisations of the shared state between their election and their end."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.election import Decision, Rejection, elect
from pccl.protocol.master.ledger import Group, Ledger, Sync
from pccl.protocol.rounds import WITHDRAWN, Kind, Round
from pccl.types import Result

STALLS_MAX = 8  # connections that break while they serve, in one synchronisation
SYNC_ATTEMPTS_MAX = 3  # failed fetches in one synchronisation that a peer may have a part in


class Synchronisations(Ledger):
    """Elects, tells who serves whom, and repeats that when a member is lost or a fetch fails."""

    def _begin_sync(self, round_: Round[object]) -> None:
        group_number = round_.id.group
        assert group_number is not None
        members = {n: round_.votes[n] for n in self._accepted(group_number)}
        sync = Sync(members)  # type: ignore[arg-type]
        group = self._groups[group_number]
        wanted = max(vote.payload.min_peers for vote in sync.members.values())
        if group.revision is None and len(members) < wanted:
            self._fall_short(group, sync, wanted)
            return
        group.sync = sync
        self._elect(group_number, sync)

    def _fall_short(self, group: Group, sync: Sync, wanted: int) -> None:
        """Nothing begins: more peers are to be let in first. A result that all must know alike."""
        self._count(group)
        group.last_plan, group.short = 0, wanted
        for number, vote in sync.members.items():
            self._send(number, m.SyncResult(vote.call, 0, group.syncs, 0, short=wanted))

    def _elect(self, group_number: int, sync: Sync) -> None:
        """Decides who sends what to whom among the members that are left, and tells them."""
        group = self._groups[group_number]
        if not sync.members:
            group.sync = None
            return
        offers = {number: vote.payload for number, vote in sync.members.items()}
        joined = frozenset(sync.members.keys() - group.holders)
        try:
            decision = elect(offers, group.revision, joined, group.grown)
        except Rejection as error:
            group.sync = None
            for number, vote in sync.members.items():
                self._fail(number, vote.call, error.result, str(error))
            return
        if decision.kicks:
            self._remove_all(decision.kicks, Result.INVALID_ARGUMENT)  # elects among the others
            return
        sync.revision, sync.refused = decision.revision, decision.refused
        sync.transfers, sync.fetching = decision.transfers, set(decision.transfers)
        if sync.fetching or sync.seq:  # a plan that was sent before must be replaced in any case
            sync.seq = self._take_seq()
            self._send_plans(sync, decision)
        if not sync.fetching:
            self._end_sync(group, sync)

    def _count(self, group: Group) -> None:
        self._syncs += 1
        group.syncs = self._syncs

    def _send_plans(self, sync: Sync, decision: Decision) -> None:
        for number, vote in sync.members.items():
            own = decision.transfers.get(number)
            serve = tuple(p for p, t in decision.transfers.items() if number in t.holders)
            plan = m.SyncPlan(
                vote.call,
                sync.seq,
                serve,
                own.holders if own else (),
                own.entries if own else (),
                own.digests if own else (),
                own.diverged if own else False,
                self._nonces.of_call(sync.seq),
            )
            self._send(number, plan)

    def _fetched(self, number: int, vote: m.FetchedVote) -> None:
        seq, why = vote.seq, vote.why
        group_number = self.peers[number].info.group
        group = self._groups[group_number]
        sync = group.sync
        if sync is None or sync.seq != seq or number not in sync.fetching:
            if seq >= self._next_seq:
                self._remove(
                    number, f"it voted on transfer {seq} out of turn", Result.INTERNAL_ERROR
                )
            return  # a transfer that a newer plan made void, while the vote was on its way
        if vote.ok:
            sync.differences[number] = vote.differences
            sync.fetching.discard(number)
            if not sync.fetching:
                self._end_sync(group, sync)
            return
        self._note(f"{self.peers[number].info} could not fetch the shared state: {why}")
        holders = sync.transfers[number].holders
        suspects = (number, *holders) if len(holders) == 1 else (number,)
        for suspect in suspects:  # who gets it from none of several has himself to blame
            sync.failures[suspect] = sync.failures.get(suspect, 0) + 1
        guilty = [s for s in suspects if sync.failures[s] >= SYNC_ATTEMPTS_MAX]
        if len(guilty) == 2:
            verdict = group.blame.between(number, holders[0], self._proven(group_number))
        else:
            verdict = None
        if verdict is not None:
            self._convict(group, verdict)
        elif guilty:  # of two that only accuse each other, the one that came last
            why = f"it took part in {SYNC_ATTEMPTS_MAX} failed transfers of shared state: {why}"
            self._remove(max(guilty), why, Result.RANK_CONNECTION_FAILED)
        else:
            self._elect(group_number, sync)

    def _stalled_sync(self, number: int, stalled: m.Stalled) -> None:
        """Somebody's data may have been lost on the way: planned anew, over new streams.

        What receivers have, they keep. Nobody is to blame for a connection that breaks; so when it
        breaks again and again, all are told.
        """
        group_number = self.peers[number].info.group
        sync = self._groups[group_number].sync
        if sync is None or sync.seq != stalled.seq or number not in sync.members:
            return  # a newer plan has replaced that one meanwhile, or all is done
        sync.stalls += 1
        why = f"{self.peers[number].info} could not send the shared state: {stalled.why}"
        if sync.stalls < STALLS_MAX:
            self._note(why)
            self._elect(group_number, sync)
        else:
            why = f"{sync.stalls} times in one synchronisation data was lost; the last time {why}"
            self._fail_sync(group_number, why, m.Cause.OTHER)

    def _synchronises(self, number: int) -> bool:
        sync = self._groups[self.peers[number].info.group].sync
        return sync is not None and number in sync.members

    def _fail_sync(self, group_number: int, why: str, cause: m.Cause = m.Cause.TIMEOUT) -> None:
        """Gives a synchronisation up for all; nobody's memory has changed."""
        sync = self._groups[group_number].sync
        assert sync is not None
        self._groups[group_number].sync = None
        for number, vote in sync.members.items():
            self._fail(number, vote.call, WITHDRAWN[Kind.SYNC], why, cause)

    def _end_sync(self, group: Group, sync: Sync) -> None:
        group.sync = None
        divergence = tuple(
            m.Divergence(number, len(transfer.entries), sync.differences[number])
            for number, transfer in sync.transfers.items()
            if transfer.diverged
        )
        if divergence:
            names = self._names([d.peer for d in divergence])
            self._note(f"at revision {sync.revision} other content was held by {names}")
        votes = [(n, vote) for n, vote in sync.members.items() if n not in sync.refused]
        strict = next((n for n, vote in votes if vote.payload.strict), None)
        if divergence and strict is not None:
            why = self._describe(sync, divergence) + f"; peer {strict} wants an error then"
            for number, vote in sync.members.items():
                self._fail(number, vote.call, Result.INVALID_ARGUMENT, why, m.Cause.DIVERGENCE)
            return
        group.revision = sync.revision
        self._count(group)
        group.last_plan, group.short, group.grown = sync.seq, 0, False
        group.holders = set(sync.members) - sync.refused
        if sync.refused:
            names = self._names(sorted(sync.refused))
            self._note(
                f"revision {sync.revision} was synchronised without {names}: theirs is higher"
            )
        for number, vote in sync.members.items():
            result = m.SyncResult(vote.call, sync.revision, group.syncs, sync.seq, divergence)
            self._send(number, result)

    def _describe(self, sync: Sync, divergence: tuple[m.Divergence, ...]) -> str:
        """Who had other content than what was elected, and where, in words."""
        entries = next(iter(sync.members.values())).payload.entries
        peers = []
        for one in divergence:
            known = [entries[d.entry].name for d in one.differences if d.entry < len(entries)]
            names = ", ".join(map(repr, known[:3])) + (", ..." if one.count > 3 else "")
            peers.append(f"{self.peers[one.peer].info} in {one.count} entries ({names})")
        return f"at revision {sync.revision} content has diverged: " + "; ".join(peers)
