"""The order of a ring over links of different speed, compared with all orders."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.ring import BARRED, plan_rings, receivers, shares, span, successors
from pccl.protocol.topology import (
    EXACT_MAX,
    GAIN,
    LOCAL,
    SPREAD_MAX,
    Link,
    Links,
    best_order,
    best_rings,
    hops,
    seconds,
    slowest,
    tournament,
)

FAST, SLOW, DEAD = Link(60_000_000, 1000), Link(6_000_000, 1000), Link(0, 0)


def apart(a: int, b: int) -> bool:
    return False


def mesh(size: int, odd: dict[tuple[int, int], Link]) -> Links:
    """Fast links, but for some that are odd both ways."""
    measured = dict.fromkeys(permutations(range(1, size + 1), 2), FAST)
    return Links(measured | odd | {(b, a): link for (a, b), link in odd.items()}, apart, {})


def ring(*order: int) -> tuple[m.Ring, ...]:
    return (m.Ring(order, 1),)


def pairs(order: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(hop) for hop in hops(order)}


@pytest.mark.parametrize("size", range(2, 12))
def test_a_tournament_has_every_pair_once_and_no_peer_twice_in_a_slot(size: int) -> None:
    slots = list(tournament(range(size)))
    assert len(slots) == size - 1 + size % 2
    for slot in slots:
        assert len({peer for pair in slot for peer in pair}) == 2 * len(slot)
    assert sorted(tuple(sorted(p)) for slot in slots for p in slot) == [
        (a, b) for a in range(size) for b in range(a + 1, size)
    ]


@pytest.mark.parametrize("bad", [SLOW, DEAD])
@pytest.mark.parametrize("pair", [(1, 2), (2, 3), (1, 4)])
def test_a_slow_pair_is_not_in_the_ring(pair: tuple[int, int], bad: Link) -> None:
    (found,) = best_rings(ring(1, 2, 3, 4), mesh(4, {pair: bad}))
    assert frozenset(pair) not in pairs(found.order)
    assert found.order[0] == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_it_is_the_best_of_all_orders_or_the_old_one_is_nearly_as_good(
    size: int, draw: random.Random
) -> None:
    current = draw.sample(range(1, size + 1), size)
    measured = {
        hop: Link(draw.choice([0, 10**5, 10**7, draw.randint(1, 10**9)]), draw.randint(0, 10**6))
        for hop in permutations(current, 2)
        if draw.random() < 0.9
    }
    links = Links(measured, lambda a, b: a + b == 3, {})
    (found,) = best_rings(ring(*current), links)
    best_s = min(seconds(ring(*order), links) for order in permutations(current))
    if found.order == tuple(current):
        assert best_s >= (1 - GAIN) * seconds(ring(*current), links) * (1 - 1e-9)
    else:
        assert seconds([found], links) == pytest.approx(best_s)
        assert sorted(found.order) == sorted(current)


def test_among_many_the_slow_links_are_avoided() -> None:
    size, draw = 3 * EXACT_MAX, random.Random(1)
    planted = draw.sample(range(1, size + 1), size)  # one ring of fast links, and few others
    good = {*hops(planted)}
    measured = {
        hop: FAST if hop in good or draw.random() < 0.3 else SLOW
        for hop in permutations(range(1, size + 1), 2)
    }
    links = Links(measured, apart, {})
    order = best_order(tuple(range(1, size + 1)), links)
    assert sorted(order) == list(range(1, size + 1))
    assert links[slowest(order, links)] == FAST


def test_a_search_among_hundreds_ends() -> None:
    draw = random.Random(2)
    size = 300
    measured = {hop: Link(draw.randint(1, 10**9), 1) for hop in next(tournament(range(size)))}
    order = best_order(tuple(range(size)), Links(measured, apart, {}))
    assert sorted(order) == list(range(size))


def test_a_small_gain_does_not_change_the_order() -> None:
    nearly = FAST._replace(rate=int(FAST.rate * 0.9))
    assert best_rings(ring(1, 3, 2, 4), mesh(4, {(1, 3): nearly})) == ring(1, 3, 2, 4)


def test_machines_stay_together_where_the_network_is_the_same_everywhere_else() -> None:
    measured = {(a, b): FAST for a, b in permutations(range(1, 7), 2) if a % 2 != b % 2}
    links = Links(measured | {(1, 2): SLOW}, lambda a, b: a % 2 == b % 2, {})
    order = best_order((1, 2, 3, 4, 5, 6), links)
    assert sum(links[hop] is not LOCAL for hop in hops(order)) == 2


def test_an_unmeasured_link_is_as_bad_as_the_worst_at_its_ends() -> None:
    links = Links({(1, 2): FAST, (2, 1): SLOW, (3, 4): Link(7_000_000, 9)}, apart, {})
    assert links[1, 3] == Link(6_000_000, 1000)
    assert links[4, 3] == Link(7_000_000, 9)
    assert links[5, 1] == Link(0, 1000)
    assert links[5, 6] == Link(0, 0)


# ---- several rings ----


def together(size: int, times: float, odd: dict[tuple[int, int], Link] | None = None) -> Links:
    """Fast links that together carry so many times what one of them does."""
    measured = dict.fromkeys(permutations(range(1, size + 1), 2), FAST) | (odd or {})
    return Links(measured, apart, dict.fromkeys(range(1, size + 1), int(times * FAST.rate)))


@pytest.mark.parametrize(("size", "speedup"), [(3, 1.9), (4, 2.75), (5, 3.5), (6, 2.4)])
def test_links_that_share_nothing_are_all_used(size: int, speedup: float) -> None:
    links, one = together(size, size - 1), ring(*range(1, size + 1))
    rings = best_rings(one, links)
    assert seconds(one, links) / seconds(rings, links) > speedup
    assert len({each.order for each in rings}) == len(rings) <= m.RINGS_MAX
    assert all(sorted(each.order) == list(range(1, size + 1)) for each in rings)
    assert best_rings(rings, links) == rings


@pytest.mark.parametrize("size", [3, 4, SPREAD_MAX])
def test_links_that_share_an_uplink_are_left_to_one_ring(size: int) -> None:
    one = ring(*range(1, size + 1))
    assert best_rings(one, together(size, 1.1)) == one
    several = best_rings(one, together(size, size - 1))
    assert len(best_rings(several, together(size, 1.0))) > 1  # they are no worse than one


def test_where_it_is_not_known_what_links_carry_together_there_is_one_ring() -> None:
    links = together(4, 3)
    for inflow in ({}, {1: links.inflow[1]}):
        known = Links(dict.fromkeys(permutations(range(1, 5), 2), FAST), apart, inflow)
        assert best_rings(ring(1, 2, 3, 4), known) == ring(1, 2, 3, 4)
    assert len(best_rings(ring(*range(1, 8)), together(7, 6))) == 1  # too many to choose from


def test_several_rings_must_be_clearly_better_than_the_best_one() -> None:
    for times, rings in ((1.2, 1), (3.0, 2)):
        links = together(4, times, {(1, 2): SLOW, (2, 1): SLOW})
        found = best_rings(ring(1, 2, 3, 4), links)
        assert len(found) == rings and frozenset((1, 2)) not in pairs(found[0].order)


def test_a_slow_link_carries_its_share() -> None:
    half = FAST._replace(rate=FAST.rate // 2)
    links = together(4, 2.4, {(1, 2): half, (2, 1): half})
    rings = best_rings(ring(1, 3, 2, 4), links)
    load: dict[tuple[int, int], int] = {}
    for each in rings:
        for hop in hops(each.order):
            load[hop] = load.get(hop, 0) + each.weight
    total = sum(each.weight for each in rings)
    assert seconds(rings, links) < 0.6 * seconds(ring(1, 3, 2, 4), links)
    assert load.get((1, 2), 0) / total < 0.25


# ---- plans ----


def infos(*machines: str) -> list[m.PeerInfo]:
    return [m.PeerInfo(n, 0, "10.0.0.1", n, "", name) for n, name in enumerate(machines, 1)]


@pytest.mark.parametrize(
    ("machines", "chosen", "order"),
    [
        ("abab", (), (1, 3, 2, 4)),
        ("abcd", (1, 3, 2, 4), (1, 3, 2, 4)),
        ("abcd", (4, 9, 2, 1), (4, 2, 1, 3)),  # 9 has left, 3 has come
        ("abca", (1, 3, 2), (1, 4, 3, 2)),  # 4 came to the machine of 1
        ("abcdd", (3, 2), (3, 2, 1, 4, 5)),
        ("ab", (7, 8), (1, 2)),
    ],
)
def test_a_chosen_order_holds_for_those_who_stay(
    machines: str, chosen: tuple[int, ...], order: tuple[int, ...]
) -> None:
    assert plan_rings(infos(*machines), [m.Ring(chosen, 1)]) == (m.Ring(order, 1),)


def test_rings_that_have_become_one_are_one() -> None:
    chosen = [m.Ring((1, 2, 3, 4), 2), m.Ring((1, 2, 4, 3), 1), m.Ring((2, 1, 3, 4), 5)]
    left = infos("a", "b", "c")
    assert plan_rings(left, chosen) == (m.Ring((1, 2, 3), 3), m.Ring((2, 1, 3), 5))


@pytest.mark.parametrize("seed", range(12))
def test_among_many_no_swap_at_the_costliest_hop_makes_the_plan_cheaper(seed: int) -> None:
    draw, size = random.Random(seed), EXACT_MAX + 4
    start = tuple(range(1, size + 1))
    costs = {hop: draw.choice([*range(10), BARRED]) for hop in permutations(start, 2)}
    costs[start[:2]] = BARRED

    def total(order: tuple[int, ...]) -> int:
        return sum(costs[hop] for hop in hops(order))

    (found,) = plan_rings(infos(*"abcdefghijkl"), (), costs.__getitem__)
    order = found.order
    assert order[0] == 1 and sorted(order) == list(start) and total(order) < total(start)
    at = max(range(size), key=lambda i: (costs[order[i], order[(i + 1) % size]], -i))
    for i in {at, (at + 1) % size} - {0}:
        for j in range(1, size):
            swapped = [*order]
            swapped[i], swapped[j] = order[j], order[i]
            assert total(tuple(swapped)) >= total(order)


def test_one_peer_needs_no_ring() -> None:
    assert plan_rings([]) == plan_rings(infos("a")) == ()


def test_each_ring_has_a_successor() -> None:
    rings = [m.Ring((3, 1, 2), 1), m.Ring((2, 1, 3), 1)]
    assert [successors(rings, number) for number in (1, 2, 3)] == [(2, 3), (3, 1), (1, 2)]


def test_rows_have_receivers_that_are_not_their_sender() -> None:
    for what, gives, of_3, of_1 in (
        ("gather", (), {1}, set()),
        ("scatter", (), {1, 2}, set()),
        ("scatter", (1, 0, 1), {2}, set()),
        ("all_to_all", (), {1, 2}, {2, 3}),
        ("all_to_all", (1, 0, 1), {2}, {2, 3}),
    ):
        work = m.Spec(what, 0, 10, 9, root=int(what == "gather"))  # type: ignore[arg-type]
        rings = [m.Ring((3, 1, 2), 1)]
        assert receivers(work, gives, rings, 3) == of_3
        assert receivers(work, gives, rings, 1) == of_1


def test_rings_share_out_the_offsets_of_the_longest_slice() -> None:
    rows = (1, 30, 0)
    one = m.Spec("all_gather", 0, 10, 5, members=3, rows=rows)
    parts = (m.Part(10, 5), m.Part(0, 1))
    two = m.Spec("all_gather", 0, 0, 0, members=3, parts=parts, rows=rows)
    assert (span(one), span(two)) == (192, 192 + 64)
    assert span(m.Spec("all_gather", 0, 10, 5, members=3, rows=(0, 0, 0))) == 0
    for count, offsets in ((0, 0), (1, 64), (64, 64), (65, 128)):
        assert span(m.Spec("all_reduce", 0, 10, count)) == offsets
    assert shares(span(two), [m.Ring((1, 2, 3), 1)] * 2) == [(0, 128), (128, 128)]
