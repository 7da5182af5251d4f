"""The election of the shared state's content, and the rules of its revision. Pure functions.

The strategies of the peers decide which of them are candidates, and which may be overwritten:

- ENFORCE_POPULAR: every peer is a candidate, and peers with other than the elected content receive
  it. If one member has this strategy all must have it; the others are dropped.
- SEND_ONLY peers are candidates, and receive nothing: one with other than the elected content is
  dropped. RECEIVE_ONLY peers receive, and are no candidates with either content or revision. If all
  are RECEIVE_ONLY there is no content, and no peer is dropped.

Among the candidates, the highest revision wins; among its holders, the most common content; among
equally common contents, that of the peer accepted first. So two fresh peers converge on the first
one. A receiver gets exactly the entries that differ.

The revision of a group's first synchronisation may be anything (a run that resumes from a
checkpoint). After that each synchronisation is exactly one higher. The same one again is legal when
a member joined or was lost, or a collective failed, since: a loop that begins again after a loss is
right. Where newcomers are waiting for it, it may be any later one that all others agree on: a run
may synchronise only when somebody has joined. A peer that offers a higher one is refused: its call
fails, and the others continue without it.

A receiver whose content nobody will ever want receives in place: into its own memory, without a
second copy. That is every newcomer, who is behind in revision, and who has no revision yet when a
run resumes. If the transfer does not end, its shared state is torn; torn content is no candidate,
is never offered to others, and is received in place again.

A newcomer that does not fit harms no other peer. Once a group has a shared state, its earlier
members decide on its revision, form and strategy among themselves; newcomers are candidates only if
none of those is. In a group's first synchronisation the most common form is the right one; among
equally common ones, the one with the highest revision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from pccl.protocol.messages import Entry, Offer, dtype_name
from pccl.tensors.layout import described
from pccl.types import Result, SharedStateSyncStrategy

ENFORCE_POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR.value
RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
FRESH = (None, 0)  # nothing was synchronised, and no checkpoint resumed
_STRATEGIES = {strategy.value: strategy.name for strategy in SharedStateSyncStrategy}


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one receiver fetches: entries by index, their elected digests, and the holders.

    `diverged`: it should have had the elected content already. `in_place`: its own content is worth
    nothing any more.
    """

    entries: tuple[int, ...]
    digests: tuple[bytes, ...]
    holders: tuple[int, ...]
    diverged: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The elected revision, what each receiver fetches, and which peers are dropped and why.

    `refused` are peers that offer a higher revision than the elected one: their calls fail alone.
    """

    revision: int
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    kicks: Mapping[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()


class Rejection(Exception):
    """No synchronisation is possible: the caller tells all peers why, and no peer is dropped.

    Attributes:
        result: of the call.
    """

    def __init__(self, why: str, result: Result = Result.INVALID_ARGUMENT) -> None:
        super().__init__(why)
        self.result = result


def elect(
    offers: Mapping[int, Offer], last: int | None, joined: frozenset[int], repeatable: bool = False
) -> Decision:
    """Decides a synchronisation. A decision that drops peers decides nothing else.

    Args:
        offers: the offer of each member, in the order of acceptance.
        last: the group's revision, None before the first synchronisation.
        joined: the members that have not taken part in a synchronisation yet.
        repeatable: whether, since the last one, a peer joined or was lost, or a collective failed.

    Raises:
        Rejection: the offered revisions break the rules, or there is no candidate.
    """
    newcomers = joined if last is not None else frozenset()
    kicks = _impossible_strategies(offers, newcomers)
    if kicks:
        return Decision(0, kicks=kicks)
    standing = {peer: offer for peer, offer in offers.items() if _stands(offer)}
    if not standing:
        raise Rejection(_nobody_offers(offers), Result.NO_SHARED_STATE_AVAILABLE)
    veterans = {peer: offer for peer, offer in standing.items() if peer not in newcomers}
    # at a revision that the group already had, only earlier members know the content
    again = bool(veterans) and (bool(joined) or repeatable)
    electors = (veterans or standing) if last is not None else _of_common_form(standing)
    revision = _revision(electors, last, again, bool(veterans) and bool(joined))
    current = {peer: offer for peer, offer in electors.items() if offer.revision == revision}
    popularity = Counter(_content(offer) for offer in current.values())
    # max() takes the first of equals: the peer that was accepted first
    elected = max(current, key=lambda peer: popularity[_content(current[peer])])
    kicks = dict(_misfits(offers, elected))
    if kicks:
        return Decision(revision, kicks=kicks)
    content = _content(current[elected])
    holders = [peer for peer, offer in current.items() if _content(offer) == content]
    refused = frozenset(peer for peer, offer in standing.items() if offer.revision > revision)
    transfers: dict[int, Transfer] = {}
    for peer, offer in offers.items():
        behind = peer in newcomers or offer.revision != revision or offer.torn
        wanted = _wanted(current[elected], offer, behind)
        receives = peer != elected and peer not in refused and offer.strategy != SEND_ONLY
        if wanted and receives:
            digests = tuple(current[elected].entries[i].digest for i in wanted)
            able = tuple(h for h in holders if _has(offers[h], wanted, digests))
            # a fresh run has no history to diverge from
            diverged = not behind and offer.strategy != RECEIVE_ONLY and (last, revision) != FRESH
            in_place = offer.torn or _worthless(offer, revision, last, peer in newcomers)
            transfers[peer] = Transfer(wanted, digests, able, diverged, in_place)
    return Decision(revision, transfers, refused=refused)


def _stands(offer: Offer) -> bool:
    """Whether its content is a candidate."""
    return offer.strategy != RECEIVE_ONLY and offer.whole


def _worthless(offer: Offer, revision: int, last: int | None, newcomer: bool) -> bool:
    """Whether its content could not be elected either if all who hold the elected one were lost.

    So one who offers a revision and does not serve it harms only those who had nothing.
    """
    if newcomer:
        return last is not None and offer.revision <= last
    return offer.revision < min(revision, 1 if last is None else last)


def _nobody_offers(offers: Mapping[int, Offer]) -> str:
    if all(offer.whole for offer in offers.values()):
        return "all peers of the group are RECEIVE_ONLY: nobody offers a shared state"
    return (
        "nobody is left who offers a whole shared state: those who are left are torn (from whom "
        "they were receiving it is gone), or RECEIVE_ONLY"
    )


def _impossible_strategies(
    offers: Mapping[int, Offer], newcomers: frozenset[int]
) -> dict[int, str]:
    """Peers whose strategy is invalid, or does not fit those of the others, and why."""
    valid = [peer for peer, offer in offers.items() if offer.strategy in _STRATEGIES]
    veterans = [peer for peer in valid if peer not in newcomers]
    leaders = [peer for peer in valid if offers[peer].strategy == ENFORCE_POPULAR]
    leader = next((peer for peer in leaders if peer in (veterans or valid)), None)
    kicks: dict[int, str] = {}
    if leader is None and leaders:
        other = f"peer {veterans[0]} with {_STRATEGIES[offers[veterans[0]].strategy]}"
        why = (
            "it called sync_shared_state with ENFORCE_POPULAR, and who was there before does not: "
            f"{other}"
        )
        kicks = dict.fromkeys(leaders, why)
    for peer, offer in offers.items():
        name = _STRATEGIES.get(offer.strategy)
        if name is None:
            kicks[peer] = f"there is no strategy {offer.strategy} of sync_shared_state"
        elif leader is not None and offer.strategy != ENFORCE_POPULAR:
            kicks[peer] = (
                f"it called sync_shared_state with {name}, and peer {leader} with "
                "ENFORCE_POPULAR: if one peer of a group does so, all must"
            )
    return kicks


def _of_common_form(standing: Mapping[int, Offer]) -> dict[int, Offer]:
    """The offers with the most common form: names, types and sizes of entries."""
    forms = {peer: _form(offer) for peer, offer in standing.items()}
    common = Counter(forms.values())
    model = max(standing, key=lambda peer: (common[forms[peer]], standing[peer].revision))
    return {peer: offer for peer, offer in standing.items() if forms[peer] == forms[model]}


def _revision(electors: Mapping[int, Offer], last: int | None, again: bool, ahead: bool) -> int:
    """The elected revision. `again`: it may equal the group's last one; `ahead`: it may be any
    later one, if all agree."""
    offered = {offer.revision for offer in electors.values()}
    top_peer = max(electors, key=lambda peer: electors[peer].revision)
    top = electors[top_peer].revision
    if last is None:
        return top
    for legal in (last + 1, last) if again else (last + 1,):
        if legal in offered:
            return legal
    if ahead and offered == {top} and top > last:
        return top
    if top > last:
        raise Rejection(
            f"peer {top_peer} offers revision {top}, but the group is at {last}: "
            f"the next one is {last + 1} (push_revision() once for each synchronisation)"
        )
    if top == last:
        raise Rejection(
            f"revision {last} was synchronised already and no peer joined or "
            "was lost, and no collective failed, since: call push_revision() once before each "
            "synchronisation"
        )
    raise Rejection(f"the highest revision offered is {top}, but the group is at {last} already")


def _misfits(offers: Mapping[int, Offer], elected: int) -> Iterator[tuple[int, str]]:
    """Peers that cannot take the elected content, and why."""
    reference = offers[elected]
    for peer, offer in offers.items():
        difference = _difference(reference, offer)
        if difference:
            yield peer, f"its shared state is not that of peer {elected}: {difference}"
        elif offer.strategy == SEND_ONLY and offer.torn:
            yield peer, "it is SEND_ONLY, but its shared state is torn, so it must receive"
        elif offer.strategy == SEND_ONLY and offer.revision <= reference.revision:
            unlike = _wanted(reference, offer, behind=False)
            if unlike:
                names = ", ".join(_title(reference.entries[i]) for i in unlike[:3])
                yield (
                    peer,
                    f"it is SEND_ONLY, but the content of peer {elected} was elected (revision "
                    f"{reference.revision}), and {len(unlike)} entries differ from it: {names}",
                )


def _has(offer: Offer, wanted: tuple[int, ...], digests: tuple[bytes, ...]) -> bool:
    return all(offer.entries[i].digest == d for i, d in zip(wanted, digests, strict=True))


def _form(offer: Offer) -> tuple[tuple[object, ...], ...]:
    return tuple((e.name, e.dtype, e.count, e.any_content, e.layout) for e in offer.entries)


def _content(offer: Offer) -> tuple[object, ...]:
    return tuple(
        (*form, b"" if entry.any_content else entry.digest)
        for form, entry in zip(_form(offer), offer.entries, strict=True)
    )


def _wanted(reference: Offer, offer: Offer, behind: bool) -> tuple[int, ...]:
    return tuple(
        i
        for i, (elected, own) in enumerate(zip(reference.entries, offer.entries, strict=True))
        if elected.digest != own.digest and (behind or not elected.any_content)
    )


def _difference(reference: Offer, offer: Offer) -> str:
    """The first difference in form between two offers, in words; empty if there is none."""
    for i, (elected, own) in enumerate(zip_longest(reference.entries, offer.entries)):
        if elected is None or own is None or elected.name != own.name:
            return _other_name(reference, offer, i)
        for what, a, b in (
            ("dtype", dtype_name(elected.dtype), dtype_name(own.dtype)),
            ("element count", elected.count, own.count),
            ("allow_content_inequality", elected.any_content, own.any_content),
            ("order in memory", described(elected.layout), described(own.layout)),
        ):
            if a != b:
                return f"entry {i} ({elected.name!r}) has {what} {a!r} there and {b!r} here"
    return ""


def _other_name(reference: Offer, offer: Offer, i: int) -> str:
    """How entry `i`, which one offer may lack, differs in name between two offers."""
    there = [entry.name for entry in reference.entries]
    here = [entry.name for entry in offer.entries]
    elected = there[i] if i < len(there) else None
    own = here[i] if i < len(here) else None
    sizes = f"(there are {len(there)} entries there and {len(here)} here)"
    if elected is not None and (own is None or elected not in here):
        instead = f": in its place is {own!r}" if own is not None and own not in there else ""
        return f"entry {i} ({elected!r}) is missing here{instead} {sizes}"
    if own is not None and (elected is None or own not in there):
        return f"entry {i} ({own!r}) is not known there {sizes}"
    return f"entry {i} is {elected!r} there and {own!r} here: the order differs"


def _title(entry: Entry) -> str:
    return repr(entry.name)
