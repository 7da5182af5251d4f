"""Random programs: every call ends, every round has one outcome, and nothing is left of any."""

from __future__ import annotations

import pytest
from simulation import programs
from simulation.seeds import parts

from pccl.protocol.rounds import OpenRounds


@parts(4000, 1200, 100)
def test_every_call_ends_and_every_round_has_one_outcome(part: range) -> None:
    for seed in part:
        why = programs.failure(programs.draw(seed))
        assert not why, f"seed {seed} (python stress/simulate.py --shrink {seed}): {why}"


def test_a_vote_that_is_taken_back_may_end_other_calls_of_its_peer() -> None:
    """Seed 3085333: the master failed when one of two threads of a peer gave its call up."""
    assert not programs.failure(programs.draw(3085333))


def test_a_seed_replays_exactly() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        programs.play(programs.draw(7), trace)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 10


def test_every_kind_of_event_and_call_is_drawn() -> None:
    scenarios = [programs.draw(seed) for seed in range(300)]
    events = {event.what for scenario in scenarios for event in scenario.events}
    assert events == {*programs.EVENTS, "join", "blow"}
    scripts = [script for scenario in scenarios for script in scenario.peers]
    calls = {call.what for s in scripts for calls in s.threads for call in calls}
    assert calls == {*programs.CALLS, *programs.SENDS, "finish"}


def test_a_failure_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that does not notice calls that can never meet: two calls show it.

    Of two peers, or of three: the first one is accepted at once, and need not call anything.
    """
    monkeypatch.setattr(OpenRounds, "in_the_way", lambda *_: ())
    seed = next(s for s in range(1000) if programs.failure(programs.draw(s)))
    small = programs.shrink(programs.draw(seed))
    assert programs.failure(small)
    calls = sum(len(calls) for script in small.peers for calls in script.threads)
    assert 2 <= len(small.peers) <= 3
    assert len(small.peers) + calls <= 6
