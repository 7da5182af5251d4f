"""The election of the shared state's content, and the rules of its revision. Pure functions.

ENFORCE_POPULAR: the highest revision offered wins; among its holders, the content that most of them
have; among equally popular contents, that of the peer that was accepted longest ago. So two fresh
peers converge on the first one. Everyone who holds something else receives exactly the entries that
differ.

The revision of a group's first synchronisation may be anything (a run that resumes from a
checkpoint). After that each synchronisation is exactly one higher; the same one again is legal only
when a member joined since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pccl.protocol.messages import Entry, Offer


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one receiver fetches: entries by index, their elected digests, and from whom."""

    entries: tuple[int, ...]
    digests: tuple[bytes, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The elected revision, who receives what, and who cannot stay in the run and why."""

    revision: int
    transfers: Mapping[int, Transfer] = field(default_factory=dict)
    kicks: Mapping[int, str] = field(default_factory=dict)


class Rejection(Exception):
    """No synchronisation is possible: the caller tells everyone `str(error)`; nobody is dropped."""


def elect(
    offers: Mapping[int, Offer],
    last: int | None,
    joined: frozenset[int],
    failures: Mapping[int, int] = MappingProxyType({}),
) -> Decision:
    """Decides a synchronisation.

    Args:
        offers: what each member offers, in the order in which they were accepted.
        last: the group's revision, None before the first synchronisation.
        joined: the members that have not taken part in a synchronisation yet.
        failures: how many transfers that did not succeed a member had a part in.

    Raises:
        Rejection: the revisions offered break the rules.
    """
    revision = _revision(offers, last, joined)
    current = {
        peer: offer
        for peer, offer in offers.items()
        # at a revision that the group has already, only who was there knows what it is
        if offer.revision == revision and not (revision == last and peer in joined)
    }
    popularity: dict[tuple[object, ...], int] = {}
    for offer in current.values():
        key = _content(offer)
        popularity[key] = popularity.get(key, 0) + 1
    # max() takes the first of equals: the peer that was accepted first
    elected = max(current, key=lambda peer: popularity[_content(current[peer])])
    reference = current[elected]
    content = _content(reference)
    holders = [peer for peer, offer in current.items() if _content(offer) == content]

    kicks: dict[int, str] = {}
    transfers: dict[int, Transfer] = {}
    for peer, offer in offers.items():
        difference = _difference(reference, offer)
        if difference:
            kicks[peer] = f"its shared state is not that of peer {elected}: {difference}"
        elif peer not in holders or peer in joined:
            behind = peer in joined or offer.revision < revision
            wanted = _wanted(reference, offer, behind)
            if wanted and peer != elected:
                digests = tuple(reference.entries[i].digest for i in wanted)
                able = [
                    h
                    for h in holders
                    if h != peer
                    and all(
                        offers[h].entries[i].digest == d
                        for i, d in zip(wanted, digests, strict=True)
                    )
                ]
                turn = len(transfers) % len(able)  # receivers take turns over the holders
                holder = min(able[turn:] + able[:turn], key=lambda h: failures.get(h, 0))
                transfers[peer] = Transfer(wanted, digests, (holder,))
    return Decision(revision, transfers, kicks)


def _revision(offers: Mapping[int, Offer], last: int | None, joined: frozenset[int]) -> int:
    top_peer = max(offers, key=lambda peer: offers[peer].revision)
    top = offers[top_peer].revision
    if last is None or top == last + 1:
        return top
    if top > last + 1:
        raise Rejection(
            f"peer {top_peer} offers revision {top}, but the group is at {last}: "
            f"the next one is {last + 1} (push_revision() once for each synchronisation)"
        )
    if top == last and joined & offers.keys():
        if any(offer.revision == last for peer, offer in offers.items() if peer not in joined):
            return top
        raise Rejection(f"nobody who was at revision {last} offers it any more")
    if top == last:
        raise Rejection(
            f"revision {last} was synchronised already and nobody joined since: "
            "call push_revision() once before each synchronisation"
        )
    raise Rejection(f"the highest revision offered is {top}, but the group is at {last} already")


def _content(offer: Offer) -> tuple[object, ...]:
    return tuple(
        (e.name, e.dtype, e.count, e.any_content, b"" if e.any_content else e.digest)
        for e in offer.entries
    )


def _wanted(reference: Offer, offer: Offer, behind: bool) -> tuple[int, ...]:
    return tuple(
        i
        for i, (elected, own) in enumerate(zip(reference.entries, offer.entries, strict=True))
        if elected.digest != own.digest and (behind or not elected.any_content)
    )


def _difference(reference: Offer, offer: Offer) -> str:
    """The first difference in structure between two offers, in words; empty where there is none."""
    for i, (elected, own) in enumerate(zip(reference.entries, offer.entries, strict=False)):
        for what, a, b in (
            ("name", elected.name, own.name),
            ("dtype", elected.dtype, own.dtype),
            ("element count", elected.count, own.count),
            ("allow_content_inequality", elected.any_content, own.any_content),
        ):
            if a != b:
                return f"entry {i} ({_title(elected)}) has {what} {a!r} there and {b!r} here"
    if len(reference.entries) != len(offer.entries):
        return f"{len(reference.entries)} entries there and {len(offer.entries)} here"
    return ""


def _title(entry: Entry) -> str:
    return repr(entry.name)
