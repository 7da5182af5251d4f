"""Thousands of whole runs of the protocol: peers die, join and leave at every possible moment."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from simpeer import End
from simulator import Program, Run, SimPeer, Thread

from pccl.protocol.peer import effects
from pccl.types import Result, SharedStateSyncStrategy

SEEDS = 400
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value


def insist(call: Callable[[], Generator[int, None, End]]) -> Generator[int, None, effects.Answer]:
    """Makes a call again and again while its own or another caller gives up."""
    while True:
        end = yield from call()
        if isinstance(end, effects.Answer):
            return end
        assert end.fault is effects.Fault.TIMEOUT or "data was lost" in end.why, end


def reduce(peer: SimPeer) -> Generator[int, None, bool]:
    """Reduces with whoever is left, or has one of them tell; False when this peer is alone."""
    revision = peer.content[0]
    data = b"%8d" % revision if revision % 3 == 1 else None  # the same for all, who are in step
    while peer.core.world.local_size > 1:
        if revision % 3 == 2:  # ranks count: a loss that was not heard of is an error
            end = yield from peer.broadcast(len(peer.core.plan.peers))
        else:
            end = yield from peer.all_reduce(data=data)
        if isinstance(end, effects.Answer):
            return True
        assert end.result is Result.RANK_CONNECTION_LOST, end
    return False


def trainer(steps: int) -> Program:
    """The calls of a DiLoCo script: reduce with retry, let newcomers in, synchronise."""

    def program(peer: SimPeer) -> Thread:
        yield from insist(peer.sync)
        while peer.content[0] < steps:
            if peer.content[0] % 3 == 2:
                yield from insist(peer.optimize_topology)
            reduced = yield from reduce(peer)
            revision, text = peer.content
            # alone, a peer moves on too, so that every run comes to an end
            peer.content = (revision + 1, text if reduced else text + "!")
            pending = yield from insist(peer.are_peers_pending)
            if pending.value:
                yield from insist(peer.update_topology)
            yield from insist(peer.sync)
        peer.leave()

    return program


def simulate(seed: int) -> Run:
    run = Run(seed)
    draw = run.random
    peers, kills, joins = draw.randint(1, 5), draw.randint(0, 3), draw.randint(0, 3)
    for _ in range(peers):
        run.add(trainer(draw.randint(3, 6))).content = (0, f"init {draw.randint(0, 2)}")
    restarts = draw.choice([0, 0, 1, 2])
    events = ["kill"] * kills + ["join"] * joins + ["restart"] * restarts
    draw.shuffle(events)
    for event in events:
        for _ in range(draw.randint(0, 150)):
            run.step()
        alive = [peer for peer in run.peers if peer.alive]
        if event == "kill" and alive:
            run.kill(draw.choice(alive))
        elif event == "join":
            run.add(trainer(4)).content = (0, "fresh")
        elif event == "restart":
            run.restart_master()
    run.finish()
    return run


def late_joiner(steps: int, founder: bool) -> Program:
    """Asynchronous DiLoCo: who is there sends only, a newcomer receives only, once."""

    def program(peer: SimPeer) -> Thread:
        strategy = SEND_ONLY if founder else RECEIVE_ONLY
        while True:
            end = yield from peer.sync(strategy=strategy)
            if isinstance(end, effects.Answer):
                if peer.content[0] == steps:
                    break
                yield from reduce(peer)
                peer.content = (peer.content[0] + 1, peer.content[1])
                pending = yield from insist(peer.are_peers_pending)
                if pending.value:
                    yield from insist(peer.update_topology)
            elif end.result is Result.NO_SHARED_STATE_AVAILABLE:
                assert strategy == RECEIVE_ONLY
            else:
                assert end.fault is effects.Fault.TIMEOUT, end
                continue
            strategy = SEND_ONLY
        peer.leave()

    return program


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_late_joiners_only_receive(first: int) -> None:
    for seed in range(first, first + 50):
        run = Run(seed)
        draw = run.random
        for _ in range(draw.randint(1, 3)):
            run.add(late_joiner(5, founder=True)).content = (0, "state")
        for event in draw.choices(["join", "kill"], k=4):
            for _ in range(draw.randint(0, 120)):
                run.step()
            alive = [peer for peer in run.peers if peer.alive]
            if event == "join":
                # alone with others of its kind it begins with what it has
                run.add(late_joiner(5, founder=False)).content = (0, "state")
            elif alive:
                run.kill(draw.choice(alive))
        run.finish()


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_every_run_ends_and_agrees(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            simulate(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
