"""Thousands of whole runs of the protocol: peers die, join and leave at every possible moment."""

from __future__ import annotations

from simulation.run import Program, SimPeer, SimulatedRun, Thread
from simulation.seeds import parts
from simulation.trainers import insist, natural, reduce, simulate, story_of_newcomers_alone

from pccl.protocol.peer import effects
from pccl.types import Result, SharedStateSyncStrategy

SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value


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


@parts(100, 100, 25)
def test_late_joiners_only_receive(part: range) -> None:
    for seed in part:
        run = SimulatedRun(seed)
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


@parts(400, 150, 50)
def test_every_run_ends_and_agrees(part: range) -> None:
    for seed in part:
        try:
            simulate(seed)
        except BaseException:
            print(f"seed {seed}")
            raise


@parts(400, 150, 50)
def test_newcomers_continue_when_all_veterans_die(part: range) -> None:
    ended = 0
    for seed in part:
        try:
            run = story_of_newcomers_alone(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        ended += run.peers[-1].left
    assert ended > 0.8 * len(part), "newcomers that are not given up make all their steps"


@parts(400, 150, 50)
def test_a_loop_that_starts_over_after_a_loss_continues(part: range) -> None:
    for seed in part:
        try:
            simulate(seed, natural)
        except BaseException:
            print(f"seed {seed}")
            raise
