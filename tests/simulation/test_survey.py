"""Large groups: few links are measured, the sites are found, and the ring leaves each site once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from simulation.manual import NEAR, SitesRun

from pccl.protocol.topology import (
    ALL_MAX,
    SITE_US,
    SLOTS_MAX,
    SPREAD_MAX,
    Everything,
    Link,
    Links,
    Survey,
    tour,
)

FAR, SLOW = Link(50_000_000, 500_000), Link(7, 7)


def crossings(order: Sequence[int], site_of: Mapping[int, int]) -> int:
    """How often a ring goes from one site to another."""
    return sum(site_of[a] != site_of[b] for a, b in pairwise((*order, order[0])))


def surveyed(
    site_of: dict[int, int], machines: list[list[int]] | None = None
) -> tuple[Survey, int]:
    """A survey of these peers at their sites, and how many slots it took."""
    survey = Survey(machines or [[number] for number in site_of])
    links: dict[tuple[int, int], Link] = {}
    slots = 0
    while slot := survey.next(links):
        slots += 1
        receivers = [*slot]
        assert {number for (number,) in slot.values()} == {*receivers}, "pairs"
        for receiver, (sender,) in slot.items():
            assert (sender, receiver) not in links, "measured once"
            near = site_of[sender] == site_of[receiver]
            links[sender, receiver] = NEAR if near else FAR
    return survey, slots


@pytest.mark.parametrize("peers", [2, 3, 7, ALL_MAX])
def test_all_links_of_few_peers_are_measured(peers: int) -> None:
    everything = Everything(range(1, peers + 1), lambda a, b: {a, b} == {1, 2})
    seen = []
    while slot := everything.next({}):
        if all(len(senders) == 1 for senders in slot.values()):
            seen += [(senders[0], number) for number, senders in slot.items()]
    assert len(seen) == len({*seen}) == peers * (peers - 1) - 2


@pytest.mark.parametrize("peers", [2, 3, SPREAD_MAX, SPREAD_MAX + 1])
def test_few_peers_are_measured_all_at_once_too(peers: int) -> None:
    everything = Everything(range(1, peers + 1), lambda a, b: False)
    slots = []
    while slot := everything.next({}):
        slots.append(slot)
    others = {n: tuple(m for m in range(1, peers + 1) if m != n) for n in range(1, peers + 1)}
    assert (slots[-1] == others and peers > 2) == (2 < peers <= SPREAD_MAX)


def test_peers_of_one_site_and_of_none() -> None:
    survey, slots = surveyed(dict.fromkeys(range(1, 101), 0))
    assert len(survey.sites) == 1 and slots <= 8  # it doubles with each
    survey, slots = surveyed({number: number for number in range(1, 101)})
    assert len(survey.sites) == 100 and slots == SLOTS_MAX, "it gives up"


@pytest.mark.parametrize("seed", range(20))
def test_sites_are_found_in_any_arrangement(seed: int) -> None:
    draw = random.Random(seed)
    sites = draw.randint(2, 12)
    numbers = draw.sample(range(1, 1000), draw.randint(18, 120))
    site_of = {number: draw.randrange(sites) for number in numbers}
    by_site: dict[int, list[int]] = {}
    for number in numbers:
        by_site.setdefault(site_of[number], []).append(number)
    machines = [each[i : i + 3] for each in by_site.values() for i in range(0, len(each), 3)]
    survey, slots = surveyed(site_of, machines)
    assert sorted(map(sorted, survey.sites)) == sorted(map(sorted, by_site.values()))
    assert slots <= 2 * sites + 8
    order = tour(survey.sites, {(a, b): FAR for a, b in pairwise(numbers)})
    assert sorted(order) == sorted(numbers) and order[0] == min(numbers)
    assert crossings(order, site_of) == (len(by_site) if len(by_site) > 1 else 0)


def test_an_unreachable_peer_is_at_no_site() -> None:
    survey = Survey([[1], [2], [3]])
    assert survey.next({}) == {3: (1,), 1: (3,)}
    dead = Link(0, 100)
    assert survey.next({(1, 3): dead, (3, 1): dead}) == {3: (2,), 2: (3,)}
    one_way = {(3, 2): dead, (2, 3): Link(1, SITE_US)}  # one of both is enough
    assert survey.next(one_way) == {}, "1 is apart from 3, and so from 2"
    assert sorted(map(sorted, survey.sites)) == [[1], [2, 3]]


def test_the_ring_leaves_a_site_over_the_best_link_that_was_measured() -> None:
    sites = [[1, 2, 3], [4, 5, 6]]
    good, bad = Link(90, 9), Link(10, 9)
    measured = {(1, 4): bad, (3, 5): good, (5, 3): good, (6, 2): bad, (4, 1): Link(50, 9)}
    order = tour(sites, measured)
    hops = {*zip(order, (*order[1:], order[0]), strict=True)}
    assert (3, 5) in hops and (4, 1) in hops, "who is entered is not who is left"


def test_a_peer_is_not_both_entered_and_left_unless_it_is_alone_at_its_site() -> None:
    good, bad = Link(90, 9), Link(10, 9)
    measured = {(3, 5): good, (5, 2): good, (6, 2): bad}
    assert tour([[1, 2, 3], [6, 4, 5]], measured) == (1, 3, 5, 4, 6, 2), "not 5 to 2"
    measured = {(3, 5): good, (6, 3): good, (6, 2): bad}
    assert tour([[2, 1, 3], [6, 4, 5]], measured) == (1, 3, 5, 4, 6, 2), "not 6 to 3"
    measured = {(1, 4): good, (6, 1): good, (5, 1): bad}
    assert tour([[1], [4, 6, 5]], measured) == (1, 4, 5, 6)
    assert tour([[4, 6, 5], [1]], measured) == (1, 4, 5, 6)
    assert tour([[3, 1, 2]], {}) == (1, 2, 3), "one site"


def test_a_large_run_over_the_real_master() -> None:
    planet = SitesRun(200, 10, machines=2)
    before = planet.master.run.groups[0].planned[0].order
    order = planet.optimize()
    assert sorted(order) == [*range(1, 201)]
    assert crossings(before, planet.site_of) > 50 and crossings(order, planet.site_of) == 10
    assert planet.slots <= 24 and planet.probes <= 200 * planet.slots
    assert planet.rate(order) >= planet.rate(before)
    assert planet.round_s(order) < planet.round_s(before) / 5


def test_an_unmeasured_link_counts_as_typical_between_its_sites() -> None:
    measured = {(1, 2): NEAR, (2, 5): FAR, (1, 5): FAR, (2, 6): Link(1, 1), (6, 5): NEAR}
    measured |= {(1, 9): SLOW, (9, 1): SLOW}  # nobody knows where 9 is
    site_of = {1: 0, 2: 0, 3: 0, 5: 1, 6: 1}
    links = Links(measured, lambda a, b: False, {}, site_of)
    assert links[3, 1] == NEAR and links[3, 5] == FAR and links[2, 6] == Link(1, 1)
    assert links[5, 3].rate == 0, "of this way nothing is known"
