"""Thousands of whole runs of the protocol: peers die, join and leave at every possible moment."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from simulator import End, Run, SimPeer

from pccl.protocol import peer as core
from pccl.types import Result

SEEDS = 400


def _lost(end: End) -> bool:
    return isinstance(end, core.Fail) and end.result is Result.RANK_CONNECTION_LOST


def trainer(steps: int):  # type: ignore[no-untyped-def]
    """The calls of a DiLoCo script: reduce with retry, let newcomers in, synchronise."""

    def program(peer: SimPeer) -> Generator[None, None, None]:
        end = yield from peer.sync()
        assert isinstance(end, core.Answer), end
        while peer.content[0] < steps:
            reduced = False
            while peer.core.world.local_size > 1:
                end = yield from peer.all_reduce()
                if isinstance(end, core.Answer):
                    reduced = True
                    break
                assert _lost(end) or end.result is Result.TOO_FEW_PEERS, end
            revision, text = peer.content
            # alone, a peer moves on too, so that every run comes to an end
            peer.content = (revision + 1, text if reduced else text + "!")
            end = yield from peer.are_peers_pending()
            assert isinstance(end, core.Answer), end
            if end.value:
                end = yield from peer.update_topology()
                assert isinstance(end, core.Answer), end
            end = yield from peer.sync()
            assert isinstance(end, core.Answer), end
        peer.perform(peer.core.leave("done"))

    return program


def simulate(seed: int) -> Run:
    run = Run(seed)
    draw = run.random
    peers, kills, joins = draw.randint(1, 5), draw.randint(0, 3), draw.randint(0, 3)
    for _ in range(peers):
        run.add(trainer(draw.randint(3, 6))).content = (0, f"init {draw.randint(0, 2)}")
    events = ["kill"] * kills + ["join"] * joins
    draw.shuffle(events)
    for event in events:
        for _ in range(draw.randint(0, 150)):
            run.step()
        alive = [peer for peer in run.peers if peer.alive]
        if event == "kill" and alive:
            run.kill(draw.choice(alive))
        elif event == "join":
            run.add(trainer(4)).content = (0, "fresh")
    run.finish()
    return run


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_every_run_ends_and_agrees(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            simulate(seed)
        except BaseException:
            print(f"seed {seed}")
            raise


def test_a_seed_replays_exactly() -> None:
    first, second = simulate(7), simulate(7)
    assert first.notes == second.notes
    assert first.outcomes == second.outcomes
