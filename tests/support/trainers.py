"""Simulated peers that make the calls of a training script, and runs of them from a seed."""

from __future__ import annotations

from collections.abc import Callable, Generator

from simpeer import End
from simulator import Program, Run, SimPeer, Thread

from pccl.protocol.peer import effects
from pccl.types import Result


def insist(call: Callable[[], Generator[int, None, End]]) -> Generator[int, None, effects.Answer]:
    """Makes a call again and again while its own or another caller gives up."""
    while True:
        end = yield from call()
        if isinstance(end, effects.Answer):
            return end
        assert end.fault is effects.Fault.TIMEOUT or "data was lost" in end.why, end


def synchronise(peer: SimPeer) -> Generator[int, None, None]:
    """Synchronises; who was receiving from somebody who is gone begins with a checkpoint."""

    def call() -> Generator[int, None, End]:
        while True:
            end = yield from peer.sync()
            if isinstance(end, effects.Answer) or not peer.torn:
                return end
            if end.result is not Result.NO_SHARED_STATE_AVAILABLE:
                return end
            peer.torn = False

    yield from insist(call)


def reduce(peer: SimPeer) -> Generator[int, None, bool]:
    """Reduces with whoever is left, or has one of them tell; False when this peer is alone."""
    revision = peer.content[0]
    data = b"%8d" % revision if revision % 3 == 1 else None  # the same for all, who are in step
    while peer.machine.world.local_size > 1:
        if revision % 3 == 2:  # ranks count: a loss that was not heard of is an error
            end = yield from peer.broadcast(len(peer.machine.plan.peers))
        else:
            end = yield from peer.all_reduce(data=data)
        if isinstance(end, effects.Answer):
            return True
        assert end.result is Result.RANK_CONNECTION_LOST, end
    return False


def trainer(steps: int) -> Program:
    """The calls of a DiLoCo script: reduce with retry, let newcomers in, synchronise."""

    def program(peer: SimPeer) -> Thread:
        yield from synchronise(peer)
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
            yield from synchronise(peer)
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
