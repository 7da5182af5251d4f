"""Elections of a synchronization: the winner, the receivers, and the legal revisions."""

from __future__ import annotations

import itertools
import re

import pytest
from msgspec import structs

from pccl.protocol.master.synchronizations import Rejection, elect
from pccl.protocol.messages import Entry, Manifest
from pccl.types import Result
from pccl.types import SharedStateSyncStrategy as Strategy


def manifest(
    revision: int,
    *contents: str,
    any_content: bool = False,
    strategy: Strategy = Strategy.ENFORCE_POPULAR,
) -> Manifest:
    entries = tuple(
        Entry(f"t{i}", 10, 4, any_content, content.encode()) for i, content in enumerate(contents)
    )
    return Manifest(revision, strategy.value, entries)


def sends(revision: int, *contents: str, any_content: bool = False) -> Manifest:
    return manifest(revision, *contents, any_content=any_content, strategy=Strategy.SEND_ONLY)


def torn(revision: int, *contents: str, strategy: Strategy = Strategy.ENFORCE_POPULAR) -> Manifest:
    return structs.replace(manifest(revision, *contents, strategy=strategy), torn=True)


def receives(revision: int, *contents: str, any_content: bool = False) -> Manifest:
    return manifest(revision, *contents, any_content=any_content, strategy=Strategy.RECEIVE_ONLY)


NOBODY: frozenset[int] = frozenset()


def everybody(manifests: dict[int, Manifest]) -> frozenset[int]:
    return frozenset(manifests)


def test_equal_content_moves_nothing() -> None:
    manifests = {1: manifest(0, "a"), 2: manifest(0, "a")}
    decision = elect(manifests, None, everybody(manifests))
    assert (decision.revision, decision.transfers, decision.kicks) == (0, {}, {})


def test_the_most_common_content_wins() -> None:
    manifests = {1: manifest(3, "a"), 2: manifest(3, "b"), 3: manifest(3, "b")}
    decision = elect(manifests, 2, NOBODY)
    assert list(decision.transfers) == [1]
    assert decision.transfers[1].digests == (b"b",)
    assert decision.transfers[1].holders == (2, 3)


def test_a_tie_goes_to_the_peer_accepted_first() -> None:
    manifests = {5: manifest(0, "b"), 2: manifest(0, "a")}
    decision = elect(manifests, None, everybody(manifests))
    assert list(decision.transfers) == [2]
    assert decision.transfers[2].holders == (5,)


def test_the_highest_revision_beats_popularity() -> None:
    manifests = {1: manifest(0, "b"), 2: manifest(0, "b"), 3: manifest(7, "a")}
    decision = elect(manifests, None, everybody(manifests))
    assert decision.revision == 7
    assert set(decision.transfers) == {1, 2}


def test_a_peer_behind_in_revision_with_equal_content_fetches_nothing() -> None:
    manifests = {1: manifest(1, "a"), 2: manifest(0, "a")}
    assert elect(manifests, 0, NOBODY).transfers == {}


def test_only_entries_that_differ_are_fetched() -> None:
    manifests = {1: manifest(1, "a", "b", "c"), 2: manifest(0, "a", "x", "c")}
    transfer = elect(manifests, 0, frozenset({2})).transfers[2]
    assert (transfer.entries, transfer.digests) == ((1,), (b"b",))


def test_every_receiver_fetches_from_all_holders() -> None:
    manifests = {i: manifest(1, "a") for i in (1, 2)} | {i: manifest(0, "x") for i in (3, 4, 5, 6)}
    decision = elect(manifests, 0, frozenset({3, 4, 5, 6}))
    assert {peer: t.holders for peer, t in decision.transfers.items()} == {
        peer: (1, 2) for peer in (3, 4, 5, 6)
    }


def test_unequal_content_that_is_allowed_stays_but_newcomers_get_it() -> None:
    manifests = {
        1: manifest(1, "a", any_content=True),
        2: manifest(1, "b", any_content=True),
        3: manifest(0, "c", any_content=True),
    }
    decision = elect(manifests, 0, frozenset({3}))
    assert list(decision.transfers) == [3]
    assert decision.transfers[3].holders == (1,)  # the digests are its own
    assert decision.transfers[3].digests == (b"a",)


def test_unequal_content_that_is_allowed_stays_in_the_first_synchronization() -> None:
    manifests = {1: manifest(7, "a", any_content=True), 2: manifest(7, "b", any_content=True)}
    assert elect(manifests, None, everybody(manifests)).transfers == {}
    manifests[3] = manifest(6, "c", any_content=True)  # it is behind
    assert list(elect(manifests, None, everybody(manifests)).transfers) == [3]


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_a_run_resumes_from_the_latest_checkpoint_of_any_peer(order: tuple[int, ...]) -> None:
    checkpoints = {1: manifest(40, "old"), 2: manifest(41, "new"), 3: manifest(0, "fresh")}
    manifests = {peer: checkpoints[peer] for peer in order}
    decision = elect(manifests, None, everybody(manifests))
    assert decision.revision == 41
    assert {peer: t.holders for peer, t in decision.transfers.items()} == {1: (2,), 3: (2,)}


# ---- strategies ----


def test_a_receiver_does_not_stand_for_election() -> None:
    manifests = {1: receives(9, "x"), 2: receives(9, "x"), 3: sends(5, "a")}
    decision = elect(manifests, None, everybody(manifests))
    assert (decision.revision, decision.kicks) == (5, {})
    assert {peer: t.holders for peer, t in decision.transfers.items()} == {1: (3,), 2: (3,)}


def test_a_receiver_that_has_the_content_already_fetches_nothing() -> None:
    manifests = {1: sends(5, "a"), 2: receives(0, "a")}
    assert elect(manifests, 4, frozenset({2})).transfers == {}


def test_the_revision_of_a_receiver_breaks_no_rule() -> None:
    manifests = {1: sends(5, "a"), 2: receives(17, "x")}
    assert elect(manifests, 4, NOBODY).revision == 5


def test_a_late_joiner_receives_at_an_unchanged_revision() -> None:
    manifests = {1: sends(5, "a"), 2: sends(5, "a"), 3: receives(5, "x")}
    decision = elect(manifests, 5, frozenset({3}))
    assert {peer: t.holders for peer, t in decision.transfers.items()} == {3: (1, 2)}


@pytest.mark.parametrize("last", [None, 3])
def test_all_receive_only(last: int | None) -> None:
    manifests = {1: receives(1, "a"), 2: receives(1, "a")}
    with pytest.raises(Rejection, match="RECEIVE_ONLY") as caught:
        elect(manifests, last, NOBODY)
    assert caught.value.result is Result.NO_SHARED_STATE_AVAILABLE


def test_senders_that_agree_move_nothing() -> None:
    manifests = {1: sends(5, "a"), 2: sends(5, "a")}
    decision = elect(manifests, None, everybody(manifests))
    assert (decision.revision, decision.transfers, decision.kicks) == (5, {}, {})


def test_senders_that_lose_are_dropped_with_the_first_difference() -> None:
    manifests = {1: sends(5, "a", "b"), 2: sends(5, "a", "c"), 3: sends(5, "a", "c")}
    decision = elect(manifests, None, everybody(manifests))
    assert list(decision.kicks) == [1]
    assert "SEND_ONLY" in decision.kicks[1] and "'t1'" in decision.kicks[1]


def test_a_sender_behind_in_revision_is_dropped_unless_its_content_is_the_same() -> None:
    manifests = {1: sends(5, "a"), 2: sends(4, "b"), 3: sends(4, "a")}
    assert list(elect(manifests, None, everybody(manifests)).kicks) == [2]


def test_a_sender_keeps_content_that_may_differ() -> None:
    manifests = {1: sends(5, "a", any_content=True), 2: sends(4, "b", any_content=True)}
    decision = elect(manifests, None, everybody(manifests))
    assert (decision.transfers, decision.kicks) == ({}, {})


@pytest.mark.parametrize("other", [sends(0, "a"), receives(0, "a")])
def test_enforce_popular_is_for_all_or_none(other: Manifest) -> None:
    decision = elect({1: other, 2: manifest(0, "a"), 3: other}, None, frozenset({1, 2, 3}))
    assert list(decision.kicks) == [1, 3]
    assert all("peer 2 with ENFORCE_POPULAR" in why for why in decision.kicks.values())


def test_an_unknown_strategy_is_dropped() -> None:
    decision = elect({1: sends(0, "a"), 2: Manifest(0, 9, ())}, None, frozenset({1, 2}))
    assert list(decision.kicks) == [2]
    assert "strategy 9" in decision.kicks[2]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            Manifest(0, 0, (Entry("z", 10, 4, False, b"a"),)),
            "'t0'.* missing here: in its place is 'z'",
        ),
        (Manifest(0, 0, (Entry("t0", 11, 4, False, b"a"),)), "dtype"),
        (Manifest(0, 0, (Entry("t0", 10, 5, False, b"a"),)), "element count"),
        (Manifest(0, 0, (Entry("t0", 10, 4, True, b"a"),)), "allow_content_inequality"),
        (
            Manifest(0, 0, (Entry("t0", 10, 4, False, b"a", "2x2/1,2"),)),
            "order in memory 'as in C' there and '2x2 with strides 1,2' here",
        ),
    ],
)
def test_another_structure_is_kicked_with_the_reason(other: Manifest, words: str) -> None:
    decision = elect({1: manifest(0, "a"), 2: other}, None, frozenset({1, 2}))
    assert list(decision.kicks) == [2]
    assert re.search(words, decision.kicks[2])


def named(*names: str) -> Manifest:
    return Manifest(0, 0, tuple(Entry(name, 10, 4, False, b"a") for name in names))


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ("ab", "abc", "entry 2 ('c') is not known there (there are 2 entries there and 3 here)"),
        ("ab", "xab", "entry 0 ('x') is not known there (there are 2 entries there and 3 here)"),
        ("ab", "axb", "entry 1 ('x') is not known there"),
        ("ab", "axby", "entry 1 ('x') is not known there"),
        ("abc", "ab", "entry 2 ('c') is missing here (there are 3 entries there and 2 here)"),
        ("abc", "bc", "entry 0 ('a') is missing here"),
        ("abcd", "ad", "entry 1 ('b') is missing here"),
        ("abc", "axc", "entry 1 ('b') is missing here: in its place is 'x'"),
        ("abc", "acb", "entry 1 is 'b' there and 'c' here: the order differs"),
        ("aa", "a", "entry 1 ('a') is missing here"),
        ("a", "aa", "entry 1 ('a') is not known there"),
    ],
)
def test_the_first_entry_that_differs_is_named(there: str, here: str, words: str) -> None:
    decision = elect({1: named(*there), 2: named(*here)}, None, frozenset({1, 2}))
    assert list(decision.kicks) == [2]
    assert f"its shared state is not that of peer 1: {words}" in decision.kicks[2]


@pytest.mark.parametrize(
    ("revision", "last", "words"),
    [(7, 5, "the next one is 6"), (5, 5, "push_revision"), (4, 5, "at 5 already")],
)
def test_revisions_that_break_the_rules(revision: int, last: int, words: str) -> None:
    manifests = {1: manifest(revision, "a"), 2: manifest(revision, "a")}
    with pytest.raises(Rejection, match=words):
        elect(manifests, last, NOBODY)


@pytest.mark.parametrize("miscounted", [1, 22, 24, 1 << 63])
def test_a_peer_that_has_miscounted_does_not_end_the_run_of_the_others(miscounted: int) -> None:
    manifests = {peer: manifest(23, "a") for peer in (1, 2)}
    manifests |= {3: manifest(miscounted, "b"), 4: manifest(0, "c")}
    decision = elect(manifests, 0, frozenset({4}))
    assert decision.revision == 23 and not decision.kicks
    refused, behind = ({3}, {4}) if miscounted > 23 else (set(), {3, 4})
    assert decision.refused == refused and {*decision.transfers} == behind


def test_half_of_the_peers_are_no_majority_for_a_later_revision() -> None:
    ahead = {peer: manifest(23, "a") for peer in (1, 2, 3)}
    others = {peer: manifest(6, "b") for peer in (4, 5, 6)}
    newcomer = {7: manifest(0, "c")}
    decision = elect(ahead | others | newcomer, 5, frozenset({7}))
    assert (decision.revision, decision.refused) == (6, {1, 2, 3})
    decision = elect(ahead | newcomer, 5, frozenset({7}))
    assert (decision.revision, decision.refused) == (23, frozenset())


def test_newcomers_cannot_outvote_veterans() -> None:
    manifests = {1: manifest(5, "a"), 2: manifest(5, "x"), 3: manifest(5, "x")}
    decision = elect(manifests, 5, frozenset({2, 3}))
    assert {peer: t.digests for peer, t in decision.transfers.items()} == {2: (b"a",), 3: (b"a",)}


@pytest.mark.parametrize("strategy", [Strategy.ENFORCE_POPULAR, Strategy.SEND_ONLY])
@pytest.mark.parametrize("theirs", [5, 6])  # whether they have advanced or not
@pytest.mark.parametrize("revision", [6, 7, 1 << 63])
def test_a_newcomer_is_never_elected_over_veterans(
    strategy: Strategy, theirs: int, revision: int
) -> None:
    veteran = manifest(theirs, "a", strategy=strategy)
    newcomer = manifest(revision, "x", strategy=strategy)
    manifests = {1: veteran, 2: newcomer, 3: newcomer}
    decision = elect(manifests, 5, frozenset({2, 3}))
    if revision == theirs and strategy is Strategy.SEND_ONLY:
        assert set(decision.kicks) == {2, 3}
        return
    assert decision.revision == theirs
    refused = {2, 3} if revision > theirs else set()
    assert decision.refused == refused
    assert set(decision.transfers) == {2, 3} - refused


def test_only_the_peer_with_a_higher_revision_is_refused() -> None:
    manifests = {1: manifest(6, "a"), 2: manifest(7, "x"), 3: manifest(6, "a"), 4: manifest(5, "b")}
    decision = elect(manifests, 5, NOBODY)
    assert (decision.revision, decision.refused, decision.kicks) == (6, {2}, {})
    assert {peer: t.holders for peer, t in decision.transfers.items()} == {4: (1, 3)}


def test_newcomers_are_elected_if_no_veteran_offers() -> None:
    manifests = {1: receives(5, "a"), 2: sends(6, "x"), 3: sends(9, "y")}
    decision = elect(manifests, 5, frozenset({2, 3}))
    assert (decision.revision, decision.refused, list(decision.transfers)) == (6, {3}, [1])
    for revision in (5, 7):
        with pytest.raises(Rejection):
            elect({1: receives(5, "a"), 2: sends(revision, "x")}, 5, frozenset({2}))


def test_a_newcomer_of_another_form_is_dropped_alone_however_many_come() -> None:
    manifests = {
        1: manifest(6, "a"),
        2: manifest(6, "a", "b"),
        3: manifest(6, "a", "b"),
        4: manifest(9, "a", "b"),
    }
    assert set(elect(manifests, 5, frozenset({2, 3, 4})).kicks) == {2, 3, 4}


def test_a_newcomer_with_another_strategy_is_dropped_alone() -> None:
    manifests = {1: sends(6, "a"), 2: receives(0, "x"), 3: manifest(6, "x")}
    decision = elect(manifests, 5, frozenset({3}))
    assert list(decision.kicks) == [3]
    assert "ENFORCE_POPULAR" in decision.kicks[3] and "peer 1 with SEND_ONLY" in decision.kicks[3]
    decision = elect(
        {1: manifest(6, "a"), 2: sends(6, "a"), 3: sends(6, "a")}, 5, frozenset({2, 3})
    )
    assert list(decision.kicks) == [2, 3]


def test_in_a_first_synchronization_the_most_common_form_is_right() -> None:
    manifests = {1: manifest(9, "a", "b"), 2: manifest(2, "a"), 3: manifest(1, "c")}
    assert list(elect(manifests, None, everybody(manifests)).kicks) == [1]
    two = {1: manifest(1, "a", "b"), 2: manifest(2, "a")}  # of two, the one with the latest state
    assert list(elect(two, None, everybody(two)).kicks) == [1]
    same = {1: manifest(1, "a", "b"), 2: manifest(1, "a")}
    assert list(elect(same, None, everybody(same)).kicks) == [2]


def test_the_same_revision_is_legal_when_a_newcomer_is_gone_again() -> None:
    manifests = {1: manifest(5, "a"), 2: manifest(5, "a")}
    assert elect(manifests, 5, NOBODY, repeatable=True).revision == 5
    later = {1: manifest(23, "a"), 2: manifest(23, "a")}
    assert elect(later, 5, NOBODY, repeatable=True).revision == 23
    with pytest.raises(Rejection, match="at 5 already"):
        elect({1: manifest(4, "a")}, 5, NOBODY, repeatable=True)


def test_the_same_revision_is_legal_for_the_sake_of_a_newcomer() -> None:
    manifests = {1: manifest(5, "a"), 2: manifest(0, "x")}
    assert list(elect(manifests, 5, frozenset({2})).transfers) == [2]


# ---- in place ----


@pytest.mark.parametrize(
    ("last", "late", "newcomer", "in_place"),
    [
        (4, manifest(3, "b"), False, True),
        (4, manifest(4, "b"), True, True),
        (4, manifest(0, "b"), True, True),
        (4, manifest(5, "b"), False, False),  # it has drifted, and may be all that is left
        (4, manifest(4, "b"), False, False),  # if a newcomer comes, that is legal, too
        (4, manifest(5, "b"), True, False),
        (None, manifest(5, "b"), False, False),
        (None, manifest(4, "b"), False, False),  # a checkpoint
        (None, manifest(0, "b"), False, True),
        (4, receives(5, "b"), False, False),
        (4, receives(3, "b"), False, True),
        (4, torn(5, "b"), False, True),
        (4, torn(9, "b"), False, True),
    ],
)
def test_a_peer_with_outdated_content_receives_in_place(
    last: int | None, late: Manifest, newcomer: bool, in_place: bool
) -> None:
    strategy = Strategy.ENFORCE_POPULAR if late.strategy == 0 else Strategy.SEND_ONLY
    manifests = {
        1: manifest(5, "a", strategy=strategy),
        2: manifest(5, "a", strategy=strategy),
        3: late,
    }
    decision = elect(manifests, last, frozenset({3} if newcomer else ()))
    assert decision.transfers[3].holders == (1, 2) and not decision.refused
    assert decision.transfers[3].in_place == in_place


def test_a_newcomer_at_the_unchanged_revision_receives_in_place() -> None:
    decision = elect({1: manifest(4, "a"), 2: manifest(4, "b")}, 4, frozenset({2}))
    assert decision.transfers[2].in_place


def test_torn_content_is_not_elected_however_common() -> None:
    for torn_ones in ({1: torn(5, "a"), 2: torn(5, "a")}, {1: torn(6, "a"), 2: torn(5, "a")}):
        manifests = {**torn_ones, 3: manifest(5, "c")}
        decision = elect(manifests, 4, NOBODY)
        assert decision.revision == 5
        assert {peer: t.holders for peer, t in decision.transfers.items()} == {1: (3,), 2: (3,)}
    with pytest.raises(Rejection, match="no peer is left that offers a whole shared state"):
        elect({1: torn(5, "a"), 2: torn(6, "a")}, 4, NOBODY)


def test_content_that_is_not_known_equals_nothing() -> None:
    """Else who was overwritten in part would count as whole beside one that gives no digest."""
    overwritten = manifest(5, "a").overwritten([0])
    decision = elect({1: manifest(5, ""), 2: overwritten, 3: manifest(5, "c")}, 4, NOBODY)
    assert list(decision.transfers) == [1, 2]
    with pytest.raises(Rejection, match="no peer is left that offers a whole shared state"):
        elect({1: manifest(5, ""), 2: overwritten}, 4, NOBODY)


def test_a_torn_peer_receives_entries_that_may_differ_too() -> None:
    manifests = {1: manifest(5, "a", any_content=True), 2: manifest(5, "a", any_content=True)}
    late = structs.replace(manifest(5, "b", any_content=True), torn=True)
    assert elect({**manifests, 3: late}, 4, NOBODY).transfers[3].entries == (0,)


def test_a_torn_peer_cannot_be_send_only() -> None:
    manifests = {1: sends(5, "a"), 2: torn(5, "a", strategy=Strategy.SEND_ONLY)}
    assert elect(manifests, 4, NOBODY).kicks == {
        2: "it is SEND_ONLY, but its shared state is torn, so it must receive"
    }
