"""Which peer is dropped when peers cannot reach each other: single rules, and whole groups."""

from __future__ import annotations

import itertools

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.topology import ACCUSED_MAX, ATTEMPTS, WHY_MAX, Blame, Verdict
from pccl.protocol.ring import plan_rings, uses
from pccl.protocol.topology import hops

EPOCH = 5


def peer(number: int) -> m.PeerInfo:
    return m.PeerInfo(number, 0, "10.0.0.1", 1000 + number, "", f"m{number}")


def trouble(*links: tuple[int, int], dials: dict[int, str | None] | None = None) -> Blame:
    """Evidence of one epoch; all dials have ended, most without a result."""
    blame = Blame()
    asked = {b for a, b in links if blame.accuse(a, b, EPOCH, "refused")}
    for number in asked:
        blame.dialled(number, (dials or {}).get(number))
    return blame


# ---- verdicts ----


def test_an_accused_peer_that_the_master_cannot_reach_is_dropped() -> None:
    blame = trouble((1, 2), dials={2: "no answer"})
    assert blame.verdict(4) == Verdict(2, ((1, 2),))
    text = blame.sentence(Verdict(2, ((1, 2),)), peer)
    assert "peer 1 (10.0.0.1:1001) could not reach peer 2 (10.0.0.1:1002) (refused)" in text
    assert "the master could not (no answer): let its port through the firewall" in text


@pytest.mark.parametrize("dial", ["", None])
def test_one_accusation_removes_no_peer(dial: str | None) -> None:
    assert trouble((1, 2), dials={2: dial}).verdict(4) is None


def test_a_peer_that_two_cannot_reach_is_dropped() -> None:
    blame = trouble((1, 2), (3, 2))
    assert blame.verdict(4) == Verdict(2, ((1, 2), (3, 2)))
    assert "peer 1" in (text := blame.sentence(Verdict(2, ((1, 2), (3, 2))), peer))
    assert "peer 3" in text


def test_the_later_of_two_that_others_cannot_reach_is_dropped_first() -> None:
    assert trouble((1, 3), (2, 3), (1, 4), (2, 4)).verdict(6) == Verdict(4, ((1, 4), (2, 4)))


def test_against_the_masters_dial_it_takes_three_or_all_others() -> None:
    reached: dict[int, str | None] = {2: ""}
    assert trouble((1, 2), (3, 2), dials=reached).verdict(4) is None
    assert trouble((1, 2), (3, 2), (4, 2), dials=reached).verdict(4) is not None
    blame = trouble((1, 2), (3, 2), dials=reached)
    found = blame.verdict(3)
    assert found is not None
    assert found.guilty == 2
    assert "the master could:" in blame.sentence(found, peer)


def test_a_peer_that_accuses_as_many_is_judged_by_its_own_accusations() -> None:
    blame = trouble((1, 2), (3, 2), (2, 1), (2, 3))
    found = blame.verdict(4)
    assert found is not None  # it accuses two that no other peer accuses
    assert found.links == ((2, 1), (2, 3))


def test_a_peer_that_alone_accuses_two_is_dropped() -> None:
    blame = trouble((1, 2), (1, 3))
    assert blame.verdict(4) == Verdict(1, ((1, 2), (1, 3)))
    text = blame.sentence(Verdict(1, ((1, 2), (1, 3))), peer)
    assert text.startswith(
        "peer 1 (10.0.0.1:1001) could not reach peer 2 (10.0.0.1:1002) (refused)"
    )
    assert "let its connections out" in text


def test_an_accuser_that_is_confirmed_stays() -> None:
    blame = trouble((1, 2), (1, 3), (4, 2), (4, 3), (2, 4), (3, 4), (2, 1), (3, 1))
    assert blame.verdict(4) is None  # two sites without a link between them


def test_an_accuser_of_peers_that_the_master_reaches_is_dropped() -> None:
    blame = trouble((1, 2), (1, 3), (4, 2), dials={2: "", 3: ""})
    assert blame.verdict(5) == Verdict(1, ((1, 2), (1, 3)))


def test_a_peer_known_to_reach_another_stays_after_accusing_two() -> None:
    blame = Blame()
    blame.worked((m.Ring((1, 4, 2, 3), 1),), EPOCH)
    for accused in (2, 3):
        blame.accuse(1, accused, EPOCH, "")
        blame.dialled(accused, "")
    assert blame.verdict(4) is None
    blame.accuse(1, 4, EPOCH + 1, "")  # not any more
    blame.dialled(4, None)
    assert blame.verdict(4) is not None


def test_a_peer_known_to_be_reachable_stays_when_two_accuse_it() -> None:
    blame = Blame()
    blame.worked((m.Ring((4, 2, 3, 1), 1),), EPOCH)
    for accuser in (1, 3):
        blame.accuse(accuser, 2, EPOCH, "")
    blame.accuse(2, 3, EPOCH, "")  # what it reaches itself does not count here
    for accused in (2, 3):
        blame.dialled(accused, None)
    assert blame.verdict(4) is None
    blame.accuse(4, 2, EPOCH + 1, "")
    assert blame.verdict(4) is not None


def test_a_dial_that_is_under_way_is_waited_for() -> None:
    accuser, accused = Blame(), Blame()
    for blame, links in ((accuser, ((1, 2), (1, 3))), (accused, ((1, 2), (3, 2)))):
        for link in links:
            blame.accuse(*link, EPOCH, "")
        assert blame.verdict(3) is None
        assert blame.last_resort(()) is None
    accuser.dialled(3, None)
    accuser.dialled(2, "refused")
    assert accuser.verdict(3) == Verdict(2, ((1, 2),))
    accused.dialled(2, None)
    assert accused.verdict(3) is not None


# ---- where no ring is left ----


def test_the_accuser_is_dropped_if_the_master_reaches_the_accused() -> None:
    assert trouble((1, 2), dials={2: ""}).last_resort(()) == Verdict(1, ((1, 2),))


def test_of_peers_with_like_trouble_the_refuted_goes_first_and_the_cleared_last() -> None:
    assert trouble((1, 2), (3, 4), dials={2: ""}).last_resort(()) == Verdict(1, ((1, 2),))
    blame = trouble((1, 2), (3, 2), (1, 4), dials={2: ""})
    assert blame.last_resort(()) == Verdict(1, ((1, 2), (1, 4)))


def test_the_accused_is_dropped_if_it_is_new() -> None:
    assert trouble((1, 2)).last_resort({1}) == Verdict(2, ((1, 2),))
    assert trouble((2, 1)).last_resort({2}) == Verdict(1, ((2, 1),))


def test_the_later_of_two_equals_is_dropped() -> None:
    blame = trouble((2, 1))
    assert blame.last_resort(()) == Verdict(2, ((2, 1),))
    both = trouble((1, 2), (2, 1), dials={1: "", 2: ""})
    assert both.last_resort(()) == Verdict(2, ((1, 2),))
    for epoch in range(ATTEMPTS):
        both.accuse(1, 2, EPOCH + epoch, "")
    assert both.last_resort({2}) == Verdict(1, ((2, 1),))


def test_a_peer_that_was_reached_before_has_some_attempts() -> None:
    blame = Blame()
    for attempt in range(ATTEMPTS):
        assert blame.last_resort({1, 2}) is None
        for _ in range(2):  # more than one stream
            blame.accuse(1, 2, EPOCH + attempt, "")
        blame.dialled(2, None)
    assert blame.last_resort({1, 2}) == Verdict(2, ((1, 2),))
    blame.accuse(1, 2, EPOCH + ATTEMPTS, "")
    assert blame.last_resort({1, 2}) == Verdict(2, ((1, 2),))


def test_the_peer_with_most_trouble_is_dropped_first() -> None:
    blame = trouble((3, 1), (1, 3), (2, 1), (1, 2))
    found = blame.last_resort(())
    assert found is not None
    assert found.guilty == 1


def test_one_of_two_neighbors_that_cannot_meet_is_dropped() -> None:
    blame = trouble((1, 2), (3, 4), dials={2: "", 4: ""})
    assert blame.between(2, 1, ()) == Verdict(1, ((1, 2),))
    assert blame.between(1, 3, ()) is None


# ---- what is remembered ----


def test_a_success_ends_the_trouble_but_the_link_stays_blocked() -> None:
    blame = trouble((1, 2), (1, 3))
    blame.worked((m.Ring((1, 4, 2, 3), 1),), EPOCH + 1)
    assert blame.verdict(4) is None
    assert blame.blocked.keys() == {(1, 2), (1, 3)}
    assert not blame.accuse(1, 4, EPOCH, "")  # it was said before the success
    assert blame.accuse(1, 2, EPOCH + 2, "")
    blame.forgive()
    assert blame.blocked.keys() == {(1, 2)}


def test_a_link_that_is_measured_to_work_is_not_blocked() -> None:
    blame = trouble((1, 2), (3, 1))
    blame.measured(2, 1)
    assert blame.blocked.keys() == {(3, 1)}


def test_evidence_about_lost_peers_is_forgotten() -> None:
    blame = trouble((1, 2), (2, 3), (3, 1), dials={2: ""})
    blame.forget(2)
    blame.forget(3)
    assert not blame.blocked
    assert blame.last_resort(()) is None
    assert not blame.dials


def test_late_answers_of_dials_change_nothing() -> None:
    blame = trouble((1, 2))
    blame.worked((), EPOCH)
    blame.dialled(2, "refused")
    blame.dialled(9, "refused")
    assert not blame.dials


def test_the_evidence_of_one_peer_is_bounded() -> None:
    blame = Blame()
    for accused in range(2, 1000):
        blame.accuse(1, accused, EPOCH, "x" * 4096)
    assert len(blame.blocked) == ACCUSED_MAX
    assert max(map(len, blame.blocked.values())) == WHY_MAX
    found = trouble(*((1, n) for n in range(2, 8))).verdict(9)
    assert found is not None
    assert len(blame.sentence(Verdict(1, found.links), peer)) < 2000


# ---- rings around what is blocked ----


@pytest.mark.parametrize("size", range(3, 12))
def test_rings_go_around_one_blocked_link(size: int) -> None:
    infos = [peer(number) for number in range(1, size + 1)]
    for link in itertools.permutations(range(1, size + 1), 2):
        rings = plan_rings(infos, (), trouble(link).cost())
        assert not uses(rings, {link})
        assert sorted(rings[0].order) == list(range(1, size + 1))
        assert rings[0].order[0] == 1
    assert plan_rings(infos, (), Blame().cost()) == plan_rings(infos)


def test_among_many_rings_go_around_many_blocked_links() -> None:
    infos = [peer(number) for number in range(1, 101)]
    blocked = {(a, b) for a in range(1, 101) for b in range(1, 101) if a % 7 == b % 7 or a + 1 == b}
    blame = Blame()
    blame.blocked = dict.fromkeys(blocked, "")
    (ring,) = plan_rings(infos, (), blame.cost())
    assert not uses([ring], blocked)
    assert sorted(ring.order) == list(range(1, 101))


def test_rings_that_become_one_share_their_weight() -> None:
    infos = [peer(number) for number in (1, 2, 3)]
    chosen = (m.Ring((1, 2, 3), 2), m.Ring((1, 3, 2), 5))
    assert plan_rings(infos, chosen, trouble((1, 2)).cost()) == (m.Ring((1, 3, 2), 7),)


def test_two_peers_have_one_ring() -> None:
    infos = [peer(number) for number in (1, 2)]
    assert uses(plan_rings(infos, (), trouble((1, 2)).cost()), {(1, 2)})


def test_what_a_link_costs_depends_on_the_suspects_at_its_ends() -> None:
    cost = trouble((1, 2), (3, 4)).cost()
    assert cost((5, 6)) == 0 < cost((1, 5)) == cost((5, 2)) < cost((1, 4)) < cost((1, 2))


def test_suspects_get_unsuspected_neighbors() -> None:
    infos = [peer(number) for number in range(1, 7)]
    blame = trouble((1, 2), (3, 4))  # all four are suspects
    (ring,) = plan_rings(infos, (), blame.cost())
    assert not {(a, b) for a, b in hops(ring.order) if a in (1, 3) and b in (2, 4)}


# ---- whole groups: only the peer at fault is dropped ----


def settle(size: int, blocks: set[tuple[int, int]], dials: dict[int, str | None]) -> set[int]:
    """Plays a group of peers that try again and again; who had to go."""
    blame, left = Blame(), list(range(1, size + 1))
    for epoch in range(100):
        rings = plan_rings([peer(n) for n in left], (), blame.cost())
        failed = [hop for ring in rings for hop in hops(ring.order) if hop in blocks]
        if not failed:
            return set(range(1, size + 1)) - {*left}
        for link in failed:
            if blame.accuse(*link, epoch, "refused"):
                blame.dialled(link[1], dials.get(link[1]))
        verdict = blame.verdict(len(left))
        planned = plan_rings([peer(n) for n in left], (), blame.cost())
        if verdict is None and uses(planned, blame.blocked):
            verdict = blame.last_resort(())
        if verdict is not None:
            left.remove(verdict.guilty)
            blame.forget(verdict.guilty)
    raise AssertionError("they go on for ever")


def every(size: int) -> range:
    return range(1, size + 1)


@pytest.mark.parametrize("size", [3, 4, 5, 7, 12])
@pytest.mark.parametrize("dial", ["", None])
def test_only_the_peer_that_reaches_no_other_is_dropped(size: int, dial: str | None) -> None:
    for caged in every(size):
        blocks = {(caged, other) for other in every(size)}
        assert settle(size, blocks, dict.fromkeys(every(size), dial)) == {caged}


@pytest.mark.parametrize("size", [3, 4, 5, 7, 12])
@pytest.mark.parametrize("dial", ["", None, "refused"])
def test_only_the_peer_that_no_other_reaches_is_dropped(size: int, dial: str | None) -> None:
    for walled in every(size):
        blocks = {(other, walled) for other in every(size)}
        assert settle(size, blocks, {walled: dial}) == {walled}


@pytest.mark.parametrize("size", [3, 4, 5, 7, 12])
def test_one_blocked_link_drops_no_peer(size: int) -> None:
    for link in itertools.permutations(every(size), 2):
        assert settle(size, {link}, {}) == set()


@pytest.mark.parametrize("size", [5, 6, 8])
@pytest.mark.parametrize("dial", ["", None])
def test_only_two_caged_peers_are_dropped(size: int, dial: str | None) -> None:
    for two in itertools.combinations(every(size), 2):
        blocks = {(one, other) for one in two for other in every(size)}
        assert settle(size, blocks, dict.fromkeys(every(size), dial)) == {*two}


@pytest.mark.parametrize("size", [5, 6, 8])
@pytest.mark.parametrize("dial", [None, "refused"])
def test_only_two_walled_peers_are_dropped(size: int, dial: str | None) -> None:
    for two in itertools.combinations(every(size), 2):
        blocks = {(other, one) for one in two for other in every(size)}
        assert settle(size, blocks, dict.fromkeys(two, dial)) == {*two}


@pytest.mark.parametrize("size", [5, 6, 8])
def test_only_a_caged_and_a_walled_peer_are_dropped(size: int) -> None:
    for caged, walled in itertools.permutations(every(size), 2):
        blocks = {(caged, other) for other in every(size)}
        blocks |= {(other, walled) for other in every(size)}
        dials: dict[int, str | None] = dict.fromkeys(every(size), "")
        assert settle(size, blocks, dials | {walled: None}) == {caged, walled}


def test_between_two_sites_without_any_link_the_later_one_goes() -> None:
    sites = (1, 2), (3, 4)
    blocks = {(a, b) for a, b in itertools.permutations(every(4), 2) if (a < 3) != (b < 3)}
    assert settle(4, blocks, {}) in map(set, sites)
