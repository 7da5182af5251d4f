"""Conclusions about what limits a collective, from invented numbers."""

from __future__ import annotations

import pytest

from pccl.insight import Cause, Explanation, Limit, LinkFacts, Sample, Stats, explain

LINK = LinkFacts("peer 2 (10.0.0.2:1)", 0.1, 0.2, 0.0, 0)


def sample(
    entering_s: float = 0.01,
    moving_s: float = 1.0,
    finishing_s: float = 0.01,
    engine_s: float | None = 0.1,
    members: int = 2,
    what: str = "all_reduce",
    tx_bytes: int = 10**8,
    small: bool = False,
) -> Sample:
    spans = entering_s, moving_s, finishing_s
    return Sample(what, members, tx_bytes, small, *spans, engine_s)


def found(explanation: Explanation) -> dict[Cause, Limit]:
    assert sum(one.seconds for one in explanation.limits) <= explanation.seconds * 1.001
    assert sorted(explanation.limits, key=lambda one: -one.seconds) == [*explanation.limits]
    for one in explanation.limits:
        assert 0 <= one.without < explanation.seconds
    return {one.cause: one for one in explanation.limits}


def test_nothing_has_happened_yet() -> None:
    assert explain([]) == Explanation() and str(Explanation()) == (
        "no collective has succeeded yet"
    )


def test_a_link_that_is_always_busy() -> None:
    link = LINK._replace(busy=0.97, retransmits=7, rtt_s=0.02)
    shown = explain([sample()] * 5, link, 0.004)
    assert (shown.what, shown.count, shown.rate) == ("all_reduce", 5, 1e8)
    limits = found(shown)
    first = shown.limits[0]
    assert first.cause is Cause.LINK and first.seconds == pytest.approx(1.0 - 2 * 0.01)
    assert first.without == pytest.approx(1.02 - first.seconds / 2)
    assert "busy for 97 % of the time, and 7 packets were lost" in first.why
    assert limits.keys() == {Cause.LINK}, "what takes less than 3 % is not worth a line"
    assert str(shown).splitlines() == [
        "the last 5 of all_reduce took 1.02 s each, and sent 100 MB/s",
        " 96 %, 980 ms: the link to the next peer: that to peer 2 (10.0.0.2:1) was busy for 97 % "
        "of the time, and 7 packets were lost on it. If it were twice as fast: 530 ms",
    ]


def test_round_trips_among_many_that_are_far_apart() -> None:
    limits = found(explain([sample(members=5)], LINK))
    assert limits[Cause.STEPS].seconds == pytest.approx(8 * 0.05)
    assert limits[Cause.STEPS].why.startswith("8 steps, each half a round trip")
    assert limits[Cause.ELSEWHERE].seconds == pytest.approx(0.6)
    assert "the link to peer 2 (10.0.0.2:1) for 20 %" in limits[Cause.ELSEWHERE].why
    assert Cause.STEPS not in found(explain([sample(what="send")], LINK))
    most = found(explain([sample(members=50)], LINK))
    assert most[Cause.STEPS].seconds == 1.0, "never more than there is"


@pytest.mark.parametrize(
    ("engine_s", "link", "cause"),
    [
        (0.95, LINK._replace(busy=1.0), Cause.CPU),
        (0.5, LINK._replace(busy=1.0, full=0.9), Cause.RECEIVER),
        (0.5, LINK._replace(busy=1.0), Cause.LINK),
        (0.5, None, Cause.ELSEWHERE),
        (None, None, Cause.ELSEWHERE),
    ],
)
def test_the_busy_part_is_the_limit(
    engine_s: float | None, link: LinkFacts | None, cause: Cause
) -> None:
    limits = found(explain([sample(engine_s=engine_s)], link))
    assert limits.keys() & {Cause.CPU, Cause.RECEIVER, Cause.LINK, Cause.ELSEWHERE} == {cause}
    assert ("is not known" in limits[cause].why) == (engine_s is None)


def test_votes_and_late_peers() -> None:
    samples = [
        sample(0.2, 0.1, 0.2),
        sample(0.9, 0.1, 0.3),  # somebody was late
        sample(0.4, 0.1, 0.2),
    ]
    limits = found(explain(samples, None, 0.19))
    assert limits[Cause.VOTES].seconds == pytest.approx(0.4)
    assert limits[Cause.VOTES].why == (
        "the shortest of the last 6 took 200 ms; the round trip to the master alone takes 190 ms"
    )
    assert limits[Cause.LATE].seconds == pytest.approx((0.0 + 0.7 + 0.2) / 3)
    assert limits[Cause.LATE].why == "of the last 3, the longest wait took 700 ms"
    assert limits[Cause.END].seconds == pytest.approx(0.1 / 3)


def test_small_ones_have_one_vote_and_no_data() -> None:
    small = sample(0.001, 0.0, 0.0, None, tx_bytes=100, small=True)
    limits = found(explain([small, small._replace(entering_s=0.003)], LINK))
    assert limits.keys() == {Cause.VOTES, Cause.LATE}
    assert limits[Cause.VOTES].seconds == pytest.approx(0.001)


def test_it_explains_the_calls_that_take_most_of_the_time() -> None:
    small = sample(0.001, 0.0, 0.0, None, tx_bytes=100, small=True)
    shown = explain([*[small] * 50, sample(), sample(), sample(what="broadcast")], None)
    assert (shown.what, shown.count) == ("all_reduce", 2)


def test_a_dict_of_floats() -> None:
    stats = Stats({"all_reduce": 3, "barrier": 1}, {"peer_lost": 2}, 10, 20, recoveries=1)
    flat = stats.flat("run/")
    assert all(type(value) is float for value in flat.values())
    assert flat["run/collectives"] == 4 and flat["run/collectives/all_reduce"] == 3
    assert flat["run/failures"] == 2 == 2 * flat["run/recoveries"]
    assert len(flat) == len(Stats.__slots__) + 3
