"""Simulated peers that make the calls of a training script, and runs of them from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from pccl.errors import AGAIN
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.types import Result
from simulation.peer import End, Waits
from simulation.run import Program, SimPeer, SimulatedRun, Thread


def insist(call: Callable[[], Waits[End]]) -> Waits[effects.Answer]:
    """Makes a call again and again while its own or another caller gives up."""
    while True:
        end = yield from call()
        if isinstance(end, effects.Answer):
            return end
        retried = end.fault is effects.Fault.TIMEOUT or "by an exception" in end.why
        assert retried or "data was lost" in end.why, end


def synchronize(peer: SimPeer) -> Waits[None]:
    """Synchronizes; after a loss of its source, a receiver loads a checkpoint."""

    def call() -> Waits[End]:
        while True:
            end = yield from peer.sync()
            if isinstance(end, effects.Answer):
                return end
            if end.result is not Result.NO_SHARED_STATE_AVAILABLE:
                return end
            if peer.torn:  # else nothing had arrived yet when the sender was lost
                peer.load()

    yield from insist(call)


def reduce(peer: SimPeer) -> Waits[bool]:
    """Reduces with whoever is left, or has one of them tell; False when this peer is alone."""
    revision = peer.content[0]
    data = b"%8d" % revision if revision % 3 == 1 else None  # all are in step
    while peer.machine.knowledge.world.local_size > 1:
        if revision % 3 == 2:  # ranks count: a loss that was not heard of is an error
            end = yield from peer.broadcast(len(peer.machine.knowledge.plan.peers))
        else:
            end = yield from peer.all_reduce(data=data)
        if isinstance(end, effects.Answer):
            return True
        assert end.result in AGAIN, end
    return False


def trainer(steps: int, leaves: bool = True) -> Program:
    """The calls of a DiLoCo script: reduce with retry, let newcomers in, synchronize."""

    def program(peer: SimPeer) -> Thread:
        yield from synchronize(peer)
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
            yield from synchronize(peer)
        if leaves:
            peer.leave()

    return program


def natural(steps: int) -> Program:
    """A loop as one writes it at first: after a loss, back to its top, where it synchronizes."""

    def program(peer: SimPeer) -> Thread:
        held = 0
        while True:
            yield from synchronize(peer)
            revision, text = peer.content
            assert revision >= held, f"peer {peer.name} went back from {held} to {revision}"
            if revision >= steps:
                break
            held = revision
            alone = peer.machine.knowledge.world.local_size < 2
            if not alone:
                data = b"%8d" % revision if revision % 2 else None
                end = yield from peer.all_reduce(data=data)
                if isinstance(end, effects.Fail):
                    assert end.fault is effects.Fault.PEER_LOST, end
                    continue
            held = revision + 1
            peer.content = (held, text + "!" if alone else text)
            pending = yield from insist(peer.are_peers_pending)
            if pending.value:
                yield from insist(peer.update_topology)
        peer.leave()

    return program


def simulate(seed: int, program: Callable[[int], Program] = trainer) -> SimulatedRun:
    run = SimulatedRun(seed)
    draw = run.random
    if program is natural:  # a peer that gave up may be in another call than the others
        run.patience = [0]
    peers, kills, joins = draw.randint(1, 5), draw.randint(0, 3), draw.randint(0, 3)
    for _ in range(peers):
        run.add(program(draw.randint(3, 6))).content = (0, f"init {draw.randint(0, 2)}")
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
            run.add(program(4)).content = (0, "fresh")
        elif event == "restart":
            run.restart_master()
    run.finish()
    return run


OTHER_CALLS = ("longer", "dtype", "op", "dict", "small", "update_topology", "optimize_topology")


def odd_one(steps: int, what: str, first: bool) -> Program:
    """A trainer until some step; then it makes another call than all others, or asks for something
    else. With `first` that is the first thing that it does."""
    works = {
        "longer": m.Spec("all_reduce", 0, 10, 1001),
        "dtype": m.Spec("all_reduce", 0, 11, 1000),
        "op": m.Spec("all_reduce", 3, 10, 1000),
        "dict": m.Spec("all_reduce", 0, 0, 0, parts=(m.Part(10, 3, "a"), m.Part(10, 4, "b"))),
    }

    def program(peer: SimPeer) -> Thread:
        if not first:
            yield from trainer(steps, leaves=False)(peer)
        while peer.machine.knowledge.world.global_size > 1:
            if what == "small":
                yield from peer.all_reduce(data=b"other")
            elif what in works:
                yield from peer.all_reduce(work=works[what])
            elif what == "update_topology":
                yield from peer.update_topology()
            else:
                yield from peer.optimize_topology()
        peer.leave()

    return program


def story_of_an_odd_one(seed: int) -> tuple[SimulatedRun, SimPeer]:
    """Trainers and one that, when it joins or later, does something else for ever.

    Each trainer asserts that its calls fail for losses alone. After a restart so few may be back
    that nobody has a majority.
    """
    run = SimulatedRun(seed, journaled=random.Random(f"journal of {seed}").random() < 0.7)
    draw = run.random
    run.patience = [0]
    first = draw.random() < 0.5
    for _ in range(draw.randint(1 if first else 2, 4)):
        run.add(trainer(6)).content = (0, "init")
    for _ in range(draw.randint(40, 200) if first else 0):
        run.step()
    odd = run.add(odd_one(draw.randint(1, 4), draw.choice(OTHER_CALLS), first))
    odd.content = (0, "init")
    for _ in range(draw.choice([0, 0, 1])):
        for _ in range(draw.randint(0, 200)):
            run.step()
        run.restart_master()
    try:
        run.finish()
    except AssertionError as error:
        if not (run.incarnation and run.splits and "MISMATCH" in str(error)):
            raise
    return run, odd


def story_of_newcomers_alone(seed: int) -> SimulatedRun:
    """All who were there before die about when newcomers synchronize for the first time: these must
    go on."""
    run = SimulatedRun(seed, journaled=random.Random(f"journal of {seed}").random() < 0.7)
    draw = run.random
    veterans = [run.add(trainer(20)) for _ in range(draw.randint(1, 3))]
    for one in veterans:
        one.content = (0, "init")
    for _ in range(draw.randint(100, 300)):
        run.step()
    newcomers = [run.add(trainer(3)) for _ in range(draw.randint(1, 3))]
    for one in newcomers:
        one.content = (0, "fresh")
    for _ in range(2000):
        if any(one.machine.knowledge.accepted for one in newcomers):
            break
        run.step()
    for _ in range(draw.randint(0, 60)):
        run.step()
    for restarts in (draw.random() < 0.4, draw.random() < 0.3):
        if restarts:
            run.restart_master()
        for _ in range(draw.choice([0, 0, 10, 30])):
            run.step()
        for one in veterans:
            if one.alive:
                run.kill(one)
            for _ in range(draw.choice([0, 0, 1, 5])):
                run.step()
    run.finish()
    return run
