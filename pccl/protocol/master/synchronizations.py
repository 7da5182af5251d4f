"""The shared state: the election of its content and revision, and the transfers.

The strategies of the peers decide which peers are candidates, and which may be overwritten:

- ENFORCE_POPULAR: every peer is a candidate. Peers whose content differs from the elected content
  receive it. If one member has this strategy, all must have it; the others are dropped.
- SEND_ONLY: the peer is a candidate and receives nothing. If its content is not elected, it is
  dropped.
- RECEIVE_ONLY: the peer receives. Neither its content nor its revision is a candidate. If all peers
  are RECEIVE_ONLY, the call fails, and no peer is dropped.

Among the candidates, the highest revision wins; among its holders, the most common content; if
several contents are equally common, the content of the peer accepted first. So two fresh peers
converge on the first one's content. A receiver gets exactly the entries that differ.

A group's first synchronization may have any revision, because a run may resume from a checkpoint.
Each later revision is exactly one higher, with two exceptions, if a member joined, a member was
lost or a collective failed since the last one. The same revision may be synchronized again: a loop
may begin again after a loss. Or the revision is any later one on which all others agree: a run may
synchronize only when a peer has joined, and that peer may be lost meanwhile. If a peer offers a
higher revision, its call fails, and the others continue without it.

A receiver receives in place (into its own memory, without a second copy) if its content can never
be elected. This applies to newcomers, peers that are behind in revision, and peers without a
revision when a run resumes. If the transfer does not end, the receiver's shared state is torn. Torn
content is not a candidate, is never offered to others, and is received in place again.

An incompatible newcomer harms no other peer. When a group has a shared state, its earlier members
decide on the revision, form and strategy among themselves; newcomers are candidates only if no
earlier member is. In a group's first synchronization the most common form wins; if several forms
are equally common, the form with the highest revision wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pccl.protocol import messages as m
from pccl.protocol.master.tally import SIZES
from pccl.protocol.master.topology import RunContext, RunPart
from pccl.protocol.messages import Manifest, dtype_name
from pccl.protocol.rounds import Kind, Round, RoundId, Vote
from pccl.tensors import described
from pccl.types import Result, SharedStateSyncStrategy

ENFORCE_POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR.value
RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
FRESH = (None, 0)  # last and elected revision of a run that has synchronized nothing yet
_STRATEGIES = {strategy.value: strategy.name for strategy in SharedStateSyncStrategy}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The fetches of one receiver: entries by index, their elected digests, and the holders.

    `diverged`: the receiver should already have had the elected content. `in_place`: the receiver's
    own content is no longer needed.
    """

    entries: tuple[int, ...]
    digests: tuple[bytes, ...]
    holders: tuple[int, ...]
    diverged: bool = False
    in_place: bool = False


NOTHING = Transfer((), (), ())


@dataclass(frozen=True, slots=True)
class Decision:
    """The elected revision, each receiver's transfer, and the peers to drop, with the reasons.

    `refused` are the peers that offer a higher revision than the elected one. Only their calls
    fail.
    """

    revision: int
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    kicks: Mapping[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()


class Rejection(Exception):
    """No synchronization is possible. All calls fail, and no peer is dropped."""

    def __init__(self, why: str, result: Result = Result.INVALID_ARGUMENT) -> None:
        super().__init__(why)
        self.result = result  # the result of the calls


def elect(
    manifests: Mapping[int, Manifest],  # the members' manifests, in the order of acceptance
    last: int | None,  # the group's revision, None before the first synchronization
    joined: frozenset[int],  # the members that have not taken part in a synchronization yet
    # whether a peer joined or was lost, or a collective failed, since the last one
    repeatable: bool = False,
) -> Decision:
    """Decides a synchronization. A decision that drops peers has no other content.

    Raises Rejection: the offered revisions break the rules, or there is no candidate.
    """
    newcomers = joined if last is not None else frozenset()
    kicks = _impossible_strategies(manifests, newcomers)
    if kicks:
        return Decision(0, kicks=kicks)
    standing = _candidates(manifests)
    if not standing:
        raise Rejection(_nobody_offers(manifests), Result.NO_SHARED_STATE_AVAILABLE)
    veterans = {peer: manifest for peer, manifest in standing.items() if peer not in newcomers}
    # only earlier members know the content at a revision that the group already had
    again = bool(veterans) and (bool(joined) or repeatable)
    electors = (veterans or standing) if last is not None else _of_common_form(standing)
    revision = _revision(electors, last, again)
    current = {
        peer: manifest for peer, manifest in electors.items() if manifest.revision == revision
    }
    popularity = Counter(_content(manifest) for manifest in current.values())
    # max() takes the first of equals: the peer that was accepted first
    elected = max(current, key=lambda peer: popularity[_content(current[peer])])
    kicks = dict(_misfits(manifests, elected))
    if kicks:
        return Decision(revision, kicks=kicks)
    content = _content(current[elected])
    holders = [peer for peer, manifest in current.items() if _content(manifest) == content]
    refused = frozenset(peer for peer, manifest in standing.items() if manifest.revision > revision)
    transfers: dict[int, Transfer] = {}
    for peer, manifest in manifests.items():
        behind = peer in newcomers or manifest.revision != revision or manifest.torn
        wanted = _wanted(current[elected], manifest, behind)
        receives = peer != elected and peer not in refused and manifest.strategy != SEND_ONLY
        if wanted and receives:
            digests = tuple(current[elected].entries[i].digest for i in wanted)
            able = tuple(h for h in holders if _has(manifests[h], wanted, digests))
            # a fresh run has no history to diverge from
            diverged = (
                not behind and manifest.strategy != RECEIVE_ONLY and (last, revision) != FRESH
            )
            in_place = manifest.torn or _worthless(manifest, revision, last, peer in newcomers)
            transfers[peer] = Transfer(wanted, digests, able, diverged, in_place)
    return Decision(revision, transfers, refused=refused)


def _candidates(manifests: Mapping[int, Manifest]) -> dict[int, Manifest]:
    return {
        peer: manifest
        for peer, manifest in manifests.items()
        if manifest.strategy != RECEIVE_ONLY and manifest.whole
    }


def _worthless(manifest: Manifest, revision: int, last: int | None, newcomer: bool) -> bool:
    """True if this content could not win even if all holders of the elected content were lost.

    So a peer that offers a revision and does not serve it harms no peer with useful content.
    """
    if newcomer:
        return last is not None and manifest.revision <= last
    return manifest.revision < min(revision, 1 if last is None else last)


def _nobody_offers(manifests: Mapping[int, Manifest]) -> str:
    if all(manifest.whole for manifest in manifests.values()):
        return "all peers of the group are RECEIVE_ONLY: none offers a shared state"
    return (
        "no peer is left that offers a whole shared state: the remaining peers are torn (the peer "
        "that they were receiving from is gone), or RECEIVE_ONLY"
    )


def _impossible_strategies(
    manifests: Mapping[int, Manifest], newcomers: frozenset[int]
) -> dict[int, str]:
    """Peers with an invalid strategy, or one that conflicts with the others', and why."""
    valid = [peer for peer, manifest in manifests.items() if manifest.strategy in _STRATEGIES]
    veterans = [peer for peer in valid if peer not in newcomers]
    leaders = [peer for peer in valid if manifests[peer].strategy == ENFORCE_POPULAR]
    leader = next((peer for peer in leaders if peer in (veterans or valid)), None)
    kicks: dict[int, str] = {}
    if leader is None and leaders:
        other = f"peer {veterans[0]} with {_STRATEGIES[manifests[veterans[0]].strategy]}"
        why = (
            "it called sync_shared_state with ENFORCE_POPULAR, and earlier members did not: "
            f"{other}"
        )
        kicks = dict.fromkeys(leaders, why)
    for peer, manifest in manifests.items():
        name = _STRATEGIES.get(manifest.strategy)
        if name is None:
            kicks[peer] = f"there is no strategy {manifest.strategy} of sync_shared_state"
        elif leader is not None and manifest.strategy != ENFORCE_POPULAR:
            kicks[peer] = (
                f"it called sync_shared_state with {name}, and peer {leader} with "
                "ENFORCE_POPULAR: if one peer of a group does so, all must"
            )
    return kicks


def _of_common_form(standing: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """The manifests with the most common form: names, types and sizes of entries."""
    forms = {peer: _form(manifest) for peer, manifest in standing.items()}
    common = Counter(forms.values())
    model = max(standing, key=lambda peer: (common[forms[peer]], standing[peer].revision))
    return {peer: manifest for peer, manifest in standing.items() if forms[peer] == forms[model]}


def _revision(electors: Mapping[int, Manifest], last: int | None, again: bool) -> int:
    """The elected revision.

    If `again`, it may equal the group's last revision, or be any later revision that more than half
    of the electors offer: a peer that has miscounted does not end the others' run.
    """
    offered = Counter(manifest.revision for manifest in electors.values())
    top_peer = max(electors, key=lambda peer: electors[peer].revision)
    top = electors[top_peer].revision
    if last is None:
        return top
    popular, votes = offered.most_common(1)[0]
    if again and popular > last and 2 * votes > len(electors):
        return popular
    for legal in (last + 1, last) if again else (last + 1,):
        if legal in offered:
            return legal
    if top > last:
        raise Rejection(
            f"peer {top_peer} offers revision {top}, but the group is at {last}: "
            f"the next one is {last + 1} (push_revision() once for each synchronization)"
        )
    if top == last:
        raise Rejection(
            f"revision {last} was synchronized already and no peer joined or "
            "was lost, and no collective failed, since: call push_revision() once before each "
            "synchronization"
        )
    raise Rejection(f"the highest revision offered is {top}, but the group is at {last} already")


def _misfits(manifests: Mapping[int, Manifest], elected: int) -> Iterator[tuple[int, str]]:
    """Peers that cannot take the elected content, and why."""
    reference = manifests[elected]
    for peer, manifest in manifests.items():
        difference = _difference(reference, manifest)
        if difference:
            yield peer, f"its shared state is not that of peer {elected}: {difference}"
        elif manifest.strategy == SEND_ONLY and manifest.torn:
            yield peer, "it is SEND_ONLY, but its shared state is torn, so it must receive"
        elif manifest.strategy == SEND_ONLY and manifest.revision <= reference.revision:
            unlike = _wanted(reference, manifest, behind=False)
            if unlike:
                names = ", ".join(repr(reference.entries[i].name) for i in unlike[:3])
                yield (
                    peer,
                    f"it is SEND_ONLY, but the content of peer {elected} was elected (revision "
                    f"{reference.revision}), and {len(unlike)} entries differ from it: {names}",
                )


def _has(manifest: Manifest, wanted: tuple[int, ...], digests: tuple[bytes, ...]) -> bool:
    return all(manifest.entries[i].digest == d for i, d in zip(wanted, digests, strict=True))


def _form(manifest: Manifest) -> tuple[tuple[object, ...], ...]:
    return tuple((e.name, e.dtype, e.count, e.any_content, e.layout) for e in manifest.entries)


def _content(manifest: Manifest) -> tuple[object, ...]:
    return tuple(
        (*form, b"" if entry.any_content else entry.digest)
        for form, entry in zip(_form(manifest), manifest.entries, strict=True)
    )


def _wanted(reference: Manifest, manifest: Manifest, behind: bool) -> tuple[int, ...]:
    return tuple(
        i
        for i, (elected, own) in enumerate(zip(reference.entries, manifest.entries, strict=True))
        if elected.digest != own.digest and (behind or not elected.any_content)
    )


def _difference(reference: Manifest, manifest: Manifest) -> str:
    """The first difference in form between two manifests, in words; empty if there is none."""
    for i, (elected, own) in enumerate(zip_longest(reference.entries, manifest.entries)):
        if elected is None or own is None or elected.name != own.name:
            return _other_name(reference, manifest, i)
        for what, a, b in (
            ("dtype", dtype_name(elected.dtype), dtype_name(own.dtype)),
            ("element count", elected.count, own.count),
            ("allow_content_inequality", elected.any_content, own.any_content),
            ("order in memory", described(elected.layout), described(own.layout)),
        ):
            if a != b:
                return f"entry {i} ({elected.name!r}) has {what} {a!r} there and {b!r} here"
    return ""


def _other_name(reference: Manifest, manifest: Manifest, i: int) -> str:
    """How entry `i`, which one manifest may lack, differs in name between two."""
    there = [entry.name for entry in reference.entries]
    here = [entry.name for entry in manifest.entries]
    elected = there[i] if i < len(there) else None
    own = here[i] if i < len(here) else None
    sizes = f"(there are {len(there)} entries there and {len(here)} here)"
    if elected is not None and (own is None or elected not in here):
        instead = f": in its place is {own!r}" if own is not None and own not in there else ""
        return f"entry {i} ({elected!r}) is missing here{instead} {sizes}"
    if own is not None and (elected is None or own not in there):
        return f"entry {i} ({own!r}) is not known there {sizes}"
    return f"entry {i} is {elected!r} there and {own!r} here: the order differs"


STALLS_MAX = 8  # broken connections of holders in one synchronization
SYNC_ATTEMPTS_MAX = 3  # failed fetches in one synchronization that may involve one peer


@dataclass(slots=True)
class Sync:
    """A synchronization between its election and its end."""

    group: int
    members: dict[int, Vote]
    seq: int = 0
    revision: int = 0
    fetching: set[int] = field(default_factory=set)
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    differences: dict[int, tuple[m.Difference, ...]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # failed fetches, by involved peer
    overwritten: dict[int, set[int]] = field(default_factory=dict)  # entries, by receiver
    stalls: int = 0  # how often a holder could not serve, so that it was planned again
    refused: frozenset[int] = frozenset()  # peers without a part: their revision is too high
    since_s: float = 0.0  # when the last peer entered it
    progress: dict[int, int] = field(default_factory=dict)  # thousandths, by receiver

    @property
    def manifests(self) -> dict[int, Manifest]:
        """The members' manifests, without the entries that transfers may have overwritten."""
        return {
            number: vote.payload.overwritten(self.overwritten.get(number, ()))
            for number, vote in self.members.items()
        }


class Synchronizations(RunPart):
    """Elects content and plans transfers, and repeats this if a member is lost or a fetch fails."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.current: dict[int, Sync] = {}  # by group

    def of(self, number: int) -> Sync | None:
        sync = self.current.get(self._membership.group_of(number))
        return sync if sync is not None and number in sync.members else None

    def begin(self, round_: Round) -> None:
        """Begins a synchronization: all members of a group have sent their manifests."""
        group = round_.id.group
        assert group is not None
        members = {n: round_.votes[n] for n in self._membership.accepted(group)}
        sync = Sync(group, members, since_s=round_.since_s)
        needed = max(vote.payload.min_peers for vote in sync.members.values())
        if self._history.of(group).revision is None and len(members) < needed:
            self._fall_short(sync, needed)
            return
        self.current[group] = sync
        self._elect(sync)

    def _fall_short(self, sync: Sync, needed: int) -> None:
        state = self._history.count_sync(sync.group)
        state.last_plan, state.short = 0, needed
        for number, vote in sync.members.items():
            result = m.SyncResult(vote.call, 0, state.syncs, 0, short=needed)
            self._outbox.send(number, result)

    def _elect(self, sync: Sync) -> None:
        if not sync.members:
            del self.current[sync.group]
            return
        state, manifests = self._history.of(sync.group), sync.manifests
        joined = frozenset(sync.members.keys() - state.holders)
        try:
            decision = elect(manifests, state.revision, joined, state.repeatable)
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
        """Removes holders that a receiver cannot reach. Also returns the reason if a receiver has
        no holder left."""
        transfers = {}
        for number, transfer in planned.items():
            whys = {one: self._rendezvous.severed([(one, number)]) for one in transfer.holders}
            holders = tuple(one for one, why in whys.items() if not why)
            if whys and not holders:
                return planned, next(iter(whys.values()))
            transfers[number] = replace(transfer, holders=holders)
        return transfers, ""

    def _send_plans(self, sync: Sync, decision: Decision) -> None:
        nonce = self._numbers.nonce("call", sync.seq)
        for number, vote in sync.members.items():
            own = decision.transfers.get(number, NOTHING)
            if own.in_place:
                sync.overwritten.setdefault(number, set()).update(own.entries)
            serve = tuple(p for p, t in decision.transfers.items() if number in t.holders)
            fetch = own.holders, own.entries, own.digests, own.diverged, nonce, own.in_place
            plan = m.SyncPlan(vote.call, sync.seq, serve, *fetch)
            self._outbox.send(number, plan)

    def fetched(self, number: int, vote: m.FetchedVote) -> None:
        seq = vote.seq
        sync = self.of(number)
        if sync is None or sync.seq != seq or number not in sync.fetching:
            if self._numbers.is_unknown(seq):
                self._dismissals.out_of_turn(number, vote)
            return  # a newer plan has replaced that transfer
        if vote.ok:
            sync.differences[number] = vote.differences
            sync.fetching.discard(number)
            if not sync.fetching:
                self._end(sync)
        else:
            info = self._membership.info(number)
            self._outbox.note(f"{info} could not fetch the shared state: {vote.why}")
            self._blame(sync, number, vote.why)

    def _blame(self, sync: Sync, number: int, why: str) -> None:
        """After a failed fetch, drops a peer involved in too many of these, or plans again."""
        holders = sync.transfers[number].holders
        # a receiver that fails with several holders is the suspect; so is one whose holder is the
        # only peer left with a whole state, because the others could not go on without that one
        spared = len(holders) > 1 or _candidates(sync.manifests).keys() == {*holders}
        suspects = (number,) if spared else (number, *holders)
        for suspect in suspects:
            sync.failures[suspect] = sync.failures.get(suspect, 0) + 1
        guilty = [s for s in suspects if sync.failures[s] >= SYNC_ATTEMPTS_MAX]
        verdict = None
        if len(guilty) == 2:
            proven = self._groups.proven(sync.group)
            verdict = self._groups[sync.group].blame.between(number, holders[0], proven)
        if verdict is not None:
            self._dismissals.drop_for(sync.group, verdict)
        elif guilty:  # if two accuse only each other, drop the one that came later
            why = f"it took part in {SYNC_ATTEMPTS_MAX} failed transfers of shared state: {why}"
            self._dismissals.dismiss(max(guilty), why, Result.RANK_CONNECTION_FAILED)
        else:
            self._elect(sync)

    def stalled(self, number: int, stalled: m.Stalled) -> None:
        """Handles a holder whose data may have been lost: plans again, over new streams.

        Receivers keep what they have. No peer is blamed for a broken connection. If too many break,
        a receiver is dropped if it could not connect to the holder, or the holder to it; if there
        is none, all members get an error.
        """
        sync = self.of(number)
        if sync is None or sync.seq != stalled.seq:
            return  # a newer plan has replaced this plan, or the synchronization has ended
        sync.stalls += 1
        info = self._membership.info(number)
        why = f"{info} could not send the shared state: {stalled.why}"
        if sync.stalls < STALLS_MAX:
            self._outbox.note(why)
            self._elect(sync)
            return
        blame, proven = self._groups[sync.group].blame, self._groups.proven(sync.group)
        served = (one for one, transfer in sync.transfers.items() if number in transfer.holders)
        apart = [one for one in served if blame.between(number, one, proven)]
        if apart:  # not the holder: without it, others may lack the state
            sync.stalls = 0
            why = f"it took part in {STALLS_MAX} failed transfers of shared state: {why}"
            self._dismissals.dismiss(max(apart), why, Result.RANK_CONNECTION_FAILED)
        else:
            why = f"data was lost {sync.stalls} times in one synchronization; the last time {why}"
            self._fail(sync, Result.RANK_CONNECTION_LOST, why)

    def withdraw(self, number: int, withdraw: m.Withdraw) -> bool:
        """Withdraws a caller, which ends its synchronization for all; False if it is in none."""
        sync = self.of(number)
        if sync is None or sync.members[number].call != withdraw.call:
            return False
        self._fail(sync, *withdraw.failure(self._membership.info(number)))
        return True

    def lose(self, group: int, lost: Iterable[int]) -> None:
        """After the loss of members of a group, elects among the others."""
        sync = self.current.get(group)
        if sync is None:
            return
        gone = [number for number in lost if sync.members.pop(number, None) is not None]
        if gone:
            self._elect(sync)

    # ---- the end ----

    def _fail(self, sync: Sync, result: Result, why: str, cause: m.Cause = m.Cause.OTHER) -> None:
        """Fails a synchronization for all members. Only receivers in place have changed memory."""
        del self.current[sync.group]
        calls = {number: vote.call for number, vote in sync.members.items()}
        self._outbox.fail_all(calls, RoundId(Kind.SYNC, sync.group), result, why, cause)

    def _end(self, sync: Sync) -> None:
        """Ends a synchronization: all receivers have fetched everything."""
        divergence = tuple(
            m.Divergence(number, len(transfer.entries), sync.differences[number])
            for number, transfer in sync.transfers.items()
            if transfer.diverged
        )
        self._tally.counts.parity_failures += len(divergence)
        if divergence:
            names = self._membership.names([d.peer for d in divergence])
            self._outbox.note(f"at revision {sync.revision} other content was held by {names}")
        votes = [(n, vote) for n, vote in sync.members.items() if n not in sync.refused]
        strict = next((n for n, vote in votes if vote.payload.strict), None)
        if divergence and strict is not None:
            why = self._describe(sync, divergence) + f"; peer {strict} has asked for an error then"
            self._fail(sync, Result.INVALID_ARGUMENT, why, m.Cause.DIVERGENCE)
            return
        del self.current[sync.group]
        if sync.refused:
            names = self._membership.names(sorted(sync.refused))
            self._outbox.note(
                f"revision {sync.revision} was synchronized without {names}: theirs is higher"
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
        """Counts a synchronization in `tally`; `before` are the earlier holders of the state."""
        entries = next(iter(sync.members.values())).payload.entries
        sizes = [SIZES.get(entry.dtype, 0) * entry.count for entry in entries]
        lacked = {
            number: sum(sizes[index] for index in transfer.entries)
            for number, transfer in sync.transfers.items()
        }
        self._tally.synchronized(sync.since_s, [(n, who in before) for who, n in lacked.items()])

    def _describe(self, sync: Sync, divergence: tuple[m.Divergence, ...]) -> str:
        """The peers whose content was not elected, and their differences, in words."""
        entries = next(iter(sync.members.values())).payload.entries
        peers = []
        for one in divergence:
            known = [entries[d.entry].name for d in one.differences if d.entry < len(entries)]
            names = ", ".join(map(repr, known[:3])) + (", ..." if one.count > 3 else "")
            peers.append(f"{self._membership.info(one.peer)} in {one.count} entries ({names})")
        return f"at revision {sync.revision} content has diverged: " + "; ".join(peers)
