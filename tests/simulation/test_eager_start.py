"""Data sent before a collective has started: whole runs, and single rules."""

from __future__ import annotations

import msgspec
import pytest
from simulation.manual import member
from simulation.peer import WORK
from simulation.run import Program, SimPeer, SimulatedRun, Thread

from pccl.protocol import messages as m
from pccl.protocol.master.collectives import predecessors
from pccl.protocol.peer import Peer, effects
from pccl.protocol.peer.calls import Collective
from pccl.protocol.rounds import Kind, Round, RoundId, Vote
from pccl.types import Result

SEEDS, PART = 50, 10
STEPS, TAGS = 5, 3
OTHER = m.Spec("all_reduce", 0, 10, 999)
MISFITS = {effects.Fault.TIMEOUT, effects.Fault.MISMATCH}


def replace_work(**changes: object) -> m.Spec:
    return msgspec.structs.replace(WORK, **changes)


def reducer(size: int, slips: float) -> Program:
    """Meets `size` peers, and reduces in a thread for each tag, each time until it succeeds.

    With probability `slips`, its first attempt is a call that differs from the others'.
    """

    def thread(peer: SimPeer, tag: int) -> Thread:
        for _ in range(STEPS):
            work = OTHER if peer.run.random.random() < slips else WORK
            while peer.machine.knowledge.world.local_size > 1:
                end = yield from peer.awaits(peer.launch(tag, work), tag)
                if isinstance(end, effects.Answer):
                    break
                lost = end.result is Result.RANK_CONNECTION_LOST
                assert lost or end.fault in MISFITS, end
                work = WORK
        if len(peer.threads) == 1:
            peer.leave()

    def program(peer: SimPeer) -> Thread:
        while peer.machine.knowledge.world.local_size < size:
            yield from peer.update_topology()
        for tag in range(TAGS):
            peer.start_thread(thread(peer, tag))

    return program


def entered(peer: SimPeer) -> list[int]:
    """Its collectives that have not started: no other peer completes them without it."""
    found = {call: peer.machine.collectives.by_call.get(call) for call in peer.calls_open}
    return [call for call, one in found.items() if one is not None and one.unstarted]


def story(seed: int) -> SimulatedRun:
    """A run in which most collectives begin before they start."""
    run = SimulatedRun(seed)
    draw = run.random
    size, slips = draw.randint(2, 4), draw.choice([0.0, 0.0, 0.1])
    for _ in range(size):
        run.add(reducer(size, slips))
    while any(peer.machine.knowledge.world.local_size < size for peer in run.peers):
        run.step()
    for event in draw.choices(["kill", "restart", "take", "take"], k=draw.choice([0, 1, 3])):
        for _ in range(draw.randint(0, 200)):
            run.step()
        alive = [peer for peer in run.peers if peer.alive]
        if event == "kill" and len(alive) > 1:
            run.kill(draw.choice(alive))
        elif event == "restart":
            run.restart_master()
        elif event == "take":
            calls = [(peer, call) for peer in alive for call in entered(peer)]
            if calls:
                peer, call = draw.choice(calls)
                peer.cancel(call)
    run.finish()
    return run


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_data_sent_early_belongs_to_the_call_that_starts(first: int) -> None:
    runs = [story(seed) for seed in range(first, first + PART)]
    sent, used = (sum(getattr(run.eager, name) for run in runs) for name in ("sent", "used"))
    assert used > 60 and sent > used  # some of it is void


# ---- single rules ----

RINGS = (m.Ring((3, 1, 2), 1), m.Ring((2, 1, 3), 1))


def test_a_start_names_the_calls_of_the_predecessors() -> None:
    votes = {n: Vote(10 * n, WORK) for n in (1, 2, 3)}
    round_: Round = Round(RoundId(Kind.START, 0, 0))
    round_.votes.update(votes)
    assert predecessors(round_, RINGS) == {1: [30, 20], 2: [10, 30], 3: [20, 10]}


def effect_kinds(peer: Peer, call: int, work: m.Spec = WORK) -> list[type]:
    return [type(effect) for effect in peer.collective(Collective(call, 0, work))]


def reduced(peer: Peer, call: int, epoch: int, ok: bool = True) -> None:
    """A collective that has been entered starts, and ends."""
    peer.received(m.Started(call, call, epoch, nonce=call, calls=(9,)))
    peer.engine_complete(call, True, 0, 0)
    peer.received(m.Finished(call, ok, "why"))


def test_a_collective_begins_if_another_one_has_committed_in_the_epoch() -> None:
    enter = [effects.RegisterOp, effects.Send]
    begin = [effects.RegisterOp, effects.EagerOp, effects.Send]
    peer = member(2, 3)
    plan = peer.knowledge.plan
    assert effect_kinds(peer, 2) == [effects.OpenStream, *enter]
    reduced(peer, 2, 1)
    assert effect_kinds(peer, 3) == begin
    reduced(peer, 3, 1, ok=False)
    assert effect_kinds(peer, 4) == enter
    reduced(peer, 4, 1)
    peer.received(msgspec.structs.replace(plan, epoch=2))
    assert effect_kinds(peer, 5) == [effects.CloseStream, effects.OpenStream, *enter]
    reduced(peer, 5, 2)
    assert effect_kinds(peer, 6, replace_work(members=2)) == enter
    peer.received(m.CallError(6, 8, "why"))
    peer.engine_settled(6, 0, 0)
    assert effect_kinds(peer, 7) == begin


def test_a_collective_of_an_earlier_epoch_proves_nothing_of_the_next() -> None:
    peer = member(2, 3)
    plan = peer.knowledge.plan
    peer.collective(Collective(2, 0, WORK))
    peer.received(m.Started(2, 2, 1, nonce=2))
    peer.collective(Collective(3, 1, WORK))
    peer.engine_complete(2, True, 0, 0)
    peer.received(msgspec.structs.replace(plan, epoch=2))
    peer.received(m.Started(3, 3, 2, nonce=3))
    peer.received(m.Finished(2, True))
    assert effects.EagerOp not in effect_kinds(peer, 4)


def test_the_start_repeats_the_predecessors_calls_to_the_engine() -> None:
    peer = member(2, 3)
    peer.collective(Collective(2, 0, WORK))
    (start,) = [
        effect
        for effect in peer.received(m.Started(2, 2, 1, nonce=2, calls=(77,)))
        if isinstance(effect, effects.StartOp)
    ]
    assert start.calls == (77,)
