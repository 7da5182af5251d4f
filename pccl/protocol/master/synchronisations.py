"""Synchronisations of the shared state between their election and their end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from pccl.protocol import messages as m
from pccl.protocol.master.dismissals import Dismissals
from pccl.protocol.master.election import Decision, Rejection, Transfer, elect
from pccl.protocol.master.groups import Groups
from pccl.protocol.master.history import History
from pccl.protocol.master.meetings import Meetings
from pccl.protocol.master.membership import Membership
from pccl.protocol.master.numbers import Numbers
from pccl.protocol.master.outbox import Outbox
from pccl.protocol.master.tally import SIZES, Tally
from pccl.protocol.rounds import WITHDRAWN, Kind, Round, RoundId, Vote
from pccl.types import Result

STALLS_MAX = 8  # serving connections that break, in one synchronisation
SYNC_ATTEMPTS_MAX = 3  # failed fetches of one synchronisation that may involve a peer


@dataclass(slots=True)
class Sync:
    """A synchronisation between its election and its end."""

    group: int
    members: dict[int, Vote[m.Offer]]
    seq: int = 0
    revision: int = 0
    fetching: set[int] = field(default_factory=set)
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    differences: dict[int, tuple[m.Difference, ...]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # failed fetches, by involved peer
    overwritten: dict[int, set[int]] = field(default_factory=dict)  # entries, by who receives them
    stalls: int = 0  # how often it was planned anew because a holder could not serve
    refused: frozenset[int] = frozenset()  # peers that offer too high a revision, and take no part
    since_s: float = 0.0  # when the last peer entered it
    progress: dict[int, int] = field(default_factory=dict)  # thousandths, by receiver


class Synchronisations:
    """Elects content and plans transfers; again if a member is lost or a fetch fails."""

    def __init__(
        self,
        membership: Membership,
        numbers: Numbers,
        history: History,
        groups: Groups,
        meetings: Meetings,
        outbox: Outbox,
        dismissals: Dismissals,
        tally: Tally,
    ) -> None:
        self._membership, self._numbers = membership, numbers
        self._tally = tally
        self._history, self._groups, self._meetings = history, groups, meetings
        self._outbox, self._dismissals = outbox, dismissals
        self._current: dict[int, Sync] = {}  # by group

    def under_way(self, group: int) -> bool:
        """Whether a group has a synchronisation in progress."""
        return group in self._current

    def of(self, number: int) -> Sync | None:
        """The synchronisation of which a peer is a member, if there is one."""
        sync = self._current.get(self._membership.group_of(number))
        return sync if sync is not None and number in sync.members else None

    def of_group(self, group: int) -> Sync | None:
        """The synchronisation of a group, if there is one."""
        return self._current.get(group)

    def begin(self, round_: Round[object]) -> None:
        """All members of a group have sent their offers."""
        group = round_.id.group
        assert group is not None
        members = {n: round_.votes[n] for n in self._membership.accepted(group)}
        sync = Sync(group, members)  # type: ignore[arg-type]
        sync.since_s = next(reversed(round_.votes.values())).since_s
        needed = max(vote.payload.min_peers for vote in sync.members.values())
        if self._history.of(group).revision is None and len(members) < needed:
            self._fall_short(sync, needed)
            return
        self._current[group] = sync
        self._elect(sync)

    def _fall_short(self, sync: Sync, needed: int) -> None:
        """Nothing is synchronised: more peers must join first. All members get this result."""
        state = self._history.count_sync(sync.group)
        state.last_plan, state.short = 0, needed
        for number, vote in sync.members.items():
            result = m.SyncResult(vote.call, 0, state.syncs, 0, short=needed)
            self._outbox.send(number, result)

    def _elect(self, sync: Sync) -> None:
        """Elects among the remaining members, and sends them their plans."""
        if not sync.members:
            del self._current[sync.group]
            return
        offers = {
            number: vote.payload.overwritten(sync.overwritten.get(number, ()))
            for number, vote in sync.members.items()
        }
        state = self._history.of(sync.group)
        joined = frozenset(sync.members.keys() - state.holders)
        try:
            decision = elect(offers, state.revision, joined, state.repeatable)
        except Rejection as error:
            self._fail(sync, error.result, str(error))
            return
        if decision.kicks:  # elects among the others
            self._dismissals.dismiss_all(decision.kicks, Result.INVALID_ARGUMENT)
            return
        transfers, why = self._possible(decision.transfers)
        if why:
            self._fail(sync, Result.RANK_CONNECTION_FAILED, why)
            return
        decision = replace(decision, transfers=transfers)
        sync.revision, sync.refused = decision.revision, decision.refused
        sync.transfers, sync.fetching = decision.transfers, set(decision.transfers)
        sync.progress.clear()
        if sync.fetching or sync.seq:  # an earlier plan must be replaced in any case
            sync.seq = self._numbers.take_seq()
            self._send_plans(sync, decision)
        if not sync.fetching:
            self._end(sync)

    def _possible(self, planned: Mapping[int, Transfer]) -> tuple[Mapping[int, Transfer], str]:
        """The transfers without holders from which a receiver cannot fetch; and why one has none
        left, if so."""
        transfers = {}
        for number, transfer in planned.items():
            whys = {one: self._meetings.severed([(one, number)]) for one in transfer.holders}
            holders = tuple(one for one, why in whys.items() if not why)
            if whys and not holders:
                return planned, next(iter(whys.values()))
            transfers[number] = replace(transfer, holders=holders)
        return transfers, ""

    def _send_plans(self, sync: Sync, decision: Decision) -> None:
        nonce = self._numbers.nonce_of_call(sync.seq)
        for number, vote in sync.members.items():
            own = decision.transfers.get(number)
            if own is not None and own.in_place:
                sync.overwritten.setdefault(number, set()).update(own.entries)
            serve = tuple(p for p, t in decision.transfers.items() if number in t.holders)
            plan = m.SyncPlan(
                vote.call,
                sync.seq,
                serve,
                own.holders if own else (),
                own.entries if own else (),
                own.digests if own else (),
                own.diverged if own else False,
                nonce,
                own.in_place if own else False,
            )
            self._outbox.send(number, plan)

    def fetched(self, number: int, vote: m.FetchedVote) -> None:
        """A receiver has fetched everything, or has failed."""
        seq = vote.seq
        sync = self.of(number)
        if sync is None or sync.seq != seq or number not in sync.fetching:
            if self._numbers.is_unknown(seq):
                why = f"it voted on transfer {seq} out of turn"
                self._dismissals.dismiss(number, why, Result.INTERNAL_ERROR)
            return  # about a transfer that a newer plan has replaced
        if vote.ok:
            sync.differences[number] = vote.differences
            sync.fetching.discard(number)
            if not sync.fetching:
                self._end(sync)
        else:
            info = self._membership.info(number)
            self._outbox.note(f"{info} could not fetch the shared state: {vote.why}")
            self._blame(sync, number, vote.why)

    def progress(self, number: int, progress: m.Progress) -> bool:
        """A receiver says how far it is. Whether it is about a synchronisation."""
        sync = self.of(number)
        if sync is None or sync.seq != progress.seq or number not in sync.fetching:
            return False
        sync.progress[number] = min(progress.done, 1000)
        return True

    def _blame(self, sync: Sync, number: int, why: str) -> None:
        """A fetch has failed: drops a peer involved in too many failures, or plans anew."""
        holders = sync.transfers[number].holders
        # a receiver that fails with several holders is itself suspect
        suspects = (number, *holders) if len(holders) == 1 else (number,)
        for suspect in suspects:
            sync.failures[suspect] = sync.failures.get(suspect, 0) + 1
        guilty = [s for s in suspects if sync.failures[s] >= SYNC_ATTEMPTS_MAX]
        verdict = None
        if len(guilty) == 2:
            proven = self._groups.proven(sync.group)
            verdict = self._groups[sync.group].blame.between(number, holders[0], proven)
        if verdict is not None:
            self._dismissals.convict(sync.group, verdict)
        elif guilty:  # of two that only accuse each other, the later one
            why = f"it took part in {SYNC_ATTEMPTS_MAX} failed transfers of shared state: {why}"
            self._dismissals.dismiss(max(guilty), why, Result.RANK_CONNECTION_FAILED)
        else:
            self._elect(sync)

    def stalled(self, number: int, stalled: m.Stalled) -> None:
        """A holder's data may have been lost: plans anew, over new streams.

        Receivers keep what they have. No peer is blamed for a broken connection; if connections
        break again and again, all members get an error.
        """
        sync = self.of(number)
        if sync is None or sync.seq != stalled.seq:
            return  # a newer plan has replaced that one, or all is done
        sync.stalls += 1
        info = self._membership.info(number)
        why = f"{info} could not send the shared state: {stalled.why}"
        if sync.stalls < STALLS_MAX:
            self._outbox.note(why)
            self._elect(sync)
        else:
            why = f"{sync.stalls} times in one synchronisation data was lost; the last time {why}"
            self._fail(sync, WITHDRAWN[Kind.SYNC], why)

    def withdraw(self, number: int, call: int) -> bool:
        """A caller withdraws, which ends it for all. Whether that call was part of one."""
        sync = self.of(number)
        if sync is None or sync.members[number].call != call:
            return False
        why = f"{self._membership.info(number)} waited no longer"
        self._fail(sync, WITHDRAWN[Kind.SYNC], why, m.Cause.TIMEOUT)
        return True

    def lose(self, group: int, lost: Iterable[int]) -> None:
        """Members of a group are lost: elects among the others."""
        sync = self._current.get(group)
        if sync is None:
            return
        gone = [number for number in lost if sync.members.pop(number, None) is not None]
        if gone:
            self._elect(sync)

    # ---- the end ----

    def _fail(self, sync: Sync, result: Result, why: str, cause: m.Cause = m.Cause.OTHER) -> None:
        """Gives a synchronisation up for all; only memory of who was behind has changed."""
        del self._current[sync.group]
        calls = {number: vote.call for number, vote in sync.members.items()}
        self._outbox.fail_all(calls, RoundId(Kind.SYNC, sync.group), result, why, cause)

    def _end(self, sync: Sync) -> None:
        """All receivers have what they were to fetch."""
        divergence = tuple(
            m.Divergence(number, len(transfer.entries), sync.differences[number])
            for number, transfer in sync.transfers.items()
            if transfer.diverged
        )
        self._tally.parity_failures += len(divergence)
        if divergence:
            names = self._membership.names([d.peer for d in divergence])
            self._outbox.note(f"at revision {sync.revision} other content was held by {names}")
        votes = [(n, vote) for n, vote in sync.members.items() if n not in sync.refused]
        strict = next((n for n, vote in votes if vote.payload.strict), None)
        if divergence and strict is not None:
            why = self._describe(sync, divergence) + f"; peer {strict} wants an error then"
            self._fail(sync, Result.INVALID_ARGUMENT, why, m.Cause.DIVERGENCE)
            return
        del self._current[sync.group]
        if sync.refused:
            names = self._membership.names(sorted(sync.refused))
            self._outbox.note(
                f"revision {sync.revision} was synchronised without {names}: theirs is higher"
            )
        state = self._history.count_sync(sync.group)
        self._note_end(sync, state.holders)
        state.revision = sync.revision
        state.last_plan, state.short, state.repeatable = sync.seq, 0, False
        state.holders = set(sync.members) - sync.refused
        for number in state.holders:
            self._membership.peers[number].veteran = True
        for number, vote in sync.members.items():
            result = m.SyncResult(vote.call, sync.revision, state.syncs, sync.seq, divergence)
            self._outbox.send(number, result)

    def _note_end(self, sync: Sync, before: Set[int]) -> None:
        """For whoever watches the run; `before` are those who held the state."""
        entries = next(iter(sync.members.values())).payload.entries
        sizes = [SIZES.get(entry.dtype, 0) * entry.count for entry in entries]
        lacked = {
            number: sum(sizes[index] for index in transfer.entries)
            for number, transfer in sync.transfers.items()
        }
        self._tally.synchronised(sync.since_s, [(n, who in before) for who, n in lacked.items()])

    def _describe(self, sync: Sync, divergence: tuple[m.Divergence, ...]) -> str:
        """Who had other content than what was elected, and where, in words."""
        entries = next(iter(sync.members.values())).payload.entries
        peers = []
        for one in divergence:
            known = [entries[d.entry].name for d in one.differences if d.entry < len(entries)]
            names = ", ".join(map(repr, known[:3])) + (", ..." if one.count > 3 else "")
            peers.append(f"{self._membership.info(one.peer)} in {one.count} entries ({names})")
        return f"at revision {sync.revision} content has diverged: " + "; ".join(peers)
