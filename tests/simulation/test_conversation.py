"""The tables of states: the simulation keeps to them, and every line of them happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
from simulation import conversation, programs
from simulation.manual import member
from simulation.peer import SimPeer
from simulation.run import SimulatedRun, Thread
from simulation.trainers import simulate, trainer

from pccl.protocol import messages as m
from pccl.protocol.master.inputs import Farewell
from pccl.protocol.peer import Peer
from pccl.protocol.peer.calls import TRANSITIONS, Collective, Event, State
from pccl.protocol.peer.effects import Effect, Send
from pccl.types import Result

SEEDS_MAX = 4000


def storm(seed: int) -> SimulatedRun:
    """Some peers are killed, and the master is killed again and again."""
    run = SimulatedRun(seed)
    draw = run.random
    for _ in range(draw.randint(2, 4)):
        run.add(trainer(4)).content = (0, "same")
    for _ in range(3):
        for _ in range(draw.randint(0, 80)):
            run.step()
        alive = [peer for peer in run.peers if peer.alive]
        if draw.random() < 0.6 and len(alive) > 2:
            run.kill(draw.choice(alive))
        for _ in range(draw.randint(0, 12)):
            run.step()
        run.restart_master()
    run.finish()
    return run


def idle(peer: SimPeer) -> Thread:
    yield peer.client.call()


def founded() -> SimulatedRun:
    """A run with a first peer that does nothing."""
    run = SimulatedRun(0)
    founder = run.add(idle)
    while not founder.machine.knowledge.accepted:
        run.step()
    return run


def arrive(run: SimulatedRun, protocol: int = m.PROTOCOL_VERSION) -> SimPeer:
    """One more peer says hello, and hears the answer."""
    peer = run.add(protocol=protocol)
    while run.step():
        pass
    return peer


def arrivals() -> Iterator[SimPeer]:
    """Something happens to newcomers before they are accepted."""
    yield arrive(founded(), protocol=m.PROTOCOL_VERSION + 1)  # refused

    run = founded()
    kicked = arrive(run)
    run.perform(run.master.feed(Farewell()))
    kicked.deliver()
    yield kicked

    left = arrive(founded())
    left.leave()
    yield left

    for leaves in (True, False):
        run = founded()
        back = arrive(run)
        for _ in range(2):
            run.restart_master()
            run.break_connection(back)
            run.new_connection(back)
        if leaves:
            back.leave()
        while run.step():
            pass
        yield back


def frozen_holder() -> Iterator[SimPeer]:
    """Peers that receive shared state while its holder freezes, so they report their progress."""
    for seed in range(4):
        run = SimulatedRun(seed)
        run.failure_rate = run.loss_rate = 0.0
        holder = run.add(trainer(3))
        holder.content = (1, "held")
        receiver = run.add(trainer(3))
        while not any(isinstance(m.decode_from_master(each), m.SyncPlan) for each in holder.down):
            run.step()
        run.freeze(holder)
        for _ in range(300):
            run.step()
        yield receiver


class Belonging:
    """A peer of a run of two, without a simulated master: it is told what the test says."""

    def __init__(self) -> None:
        self.machine, self.talk = Peer(), conversation.Conversation()
        infos = tuple(m.PeerInfo(number, 0, "h", number, "", "") for number in (1, 2))
        hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "h", 1, "", "", b"")
        self.perform(self.machine.join(1, hello))
        self.hear(m.Welcome(1))
        self.hear(m.Plan(1, infos, (m.Ring((1, 2), 1),), 0))
        self.hear(m.Admitted(7, m.Done()))

    def perform(self, actions: list[Effect]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.talk.said(action.message)

    def hear(self, message: m.MasterMessage) -> None:
        self.talk.heard(message)
        self.perform(self.machine.received(message))


def cut_off(script: str) -> set[conversation.Line]:
    """The lines used by a peer in a collective while its master dies and comes back."""
    one = Belonging()
    machine, perform, hear = one.machine, one.perform, one.hear
    perform(machine.collective(Collective(2, 0, m.Spec("all_reduce", 0, 10, 1))))
    hear(m.Started(2, 1, 1))
    happens: dict[str, Callable[[], None]] = {
        "lost": lambda: perform(machine.disconnected("the master died")),
        "back": lambda: perform(machine.reconnected()),
        "held": lambda: perform(machine.engine_complete(2, False, 0, 0)),
        "failed": lambda: perform(machine.engine_failed(2, "a stream was lost")),
        "interrupt": lambda: hear(m.Interrupt(1, "the master was restarted")),
        "resumed": lambda: hear(m.Resumed(m.Done())),
    }
    for word in script.split():
        happens[word]()
    perform(machine.leave("done"))
    return one.talk.used


def failed_meanwhile(called: m.Called, *heard: m.MasterMessage) -> set[conversation.Line]:
    """The lines used by a peer if the master fails its call and dies before it sends the error."""
    one = Belonging()
    if called == m.Called.SYNC:
        one.perform(one.machine.sync(2, 3, m.Manifest(0, 0, ())))
    elif called == m.Called.PENDING:
        one.perform(one.machine.are_peers_pending(2))
    else:
        one.perform(one.machine.optimize(2, 3))
    for message in heard:
        one.hear(message)
    one.perform(one.machine.disconnected("the master died"))
    one.perform(one.machine.reconnected())
    lost = Result.RANK_CONNECTION_LOST.value
    one.hear(m.Failed(m.Failure(9, called, 0, (), lost, "it was withdrawn", 0)))
    one.perform(one.machine.leave("done"))
    return one.talk.used


def left_before_the_result() -> set[conversation.Line]:
    """The lines used by a peer whose caller leaves before a small collective has its result."""
    one = Belonging()
    one.perform(one.machine.collective(Collective(2, 0, m.Spec("all_reduce", 0, 10, 1), b"1234")))
    one.perform(one.machine.cancel(2))
    one.hear(m.Started(2, 1, 1, b"5678", final=False))
    one.hear(m.Finished(1, False))
    one.perform(one.machine.leave("done"))
    return one.talk.used


def used() -> Iterator[set[conversation.Line]]:
    """The lines that happen: in what is rare, then in one simulated run after the other."""
    yield cut_off("lost failed back")
    yield cut_off("lost back interrupt lost back")
    yield cut_off("lost back held interrupt lost back")
    yield cut_off("lost back held interrupt resumed")
    yield left_before_the_result()
    yield failed_meanwhile(m.Called.SYNC)
    yield failed_meanwhile(m.Called.PENDING)
    yield failed_meanwhile(m.Called.OPTIMIZE)
    yield failed_meanwhile(m.Called.OPTIMIZE, m.Probe(2, 8, ()))
    for peer in (*arrivals(), *frozen_holder()):
        yield peer.conversation.used
    for run in runs():
        for peer in run.peers:
            yield peer.conversation.used


def runs() -> Iterator[SimulatedRun]:
    for seed in range(SEEDS_MAX):
        yield simulate(seed)
        yield storm(seed)
        yield programs.play(programs.draw(seed))


def test_every_message_is_in_a_table() -> None:
    """Or is one of those by which nobody joins, or by which weights are published and followed."""
    said = {what.split(",")[0].split(" ")[1] for _, _, what in conversation.lines()}
    in_rounds = {m.TopologyVote, m.PendingVote, m.TopologyResult, m.PendingResult}  # Vote, Result
    elsewhere = {m.Examine, m.Report, m.Publish, m.Holds, m.Seek, m.Got, m.Slow}
    elsewhere |= {m.Published, m.Available, m.Source, m.Serve, m.Served}
    for kind in {*get_args(m.PeerMessage), *get_args(m.MasterMessage)} - elsewhere - in_rounds:
        assert kind.__name__ in said


@pytest.mark.slow
def test_every_line_of_the_tables_happens() -> None:
    missing = conversation.lines()
    for happened in used():
        missing -= happened
        if not missing:
            break
    assert not missing


@pytest.mark.slow
def test_every_transition_of_a_collective_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {(state, event) for state, events in TRANSITIONS.items() for event in events}
    move = Collective.move

    def watched(collective: Collective, event: Event) -> bool:
        before = collective.state
        moved = move(collective, event)
        missing.discard((before, event))
        return moved

    monkeypatch.setattr(Collective, "move", watched)
    peer = arrive(founded())  # the engine gives up before the start: no simulated one does
    call = peer.launch()
    peer.work()
    peer.engine.give_up(call.number)
    peer.work()
    for _ in runs():
        if not missing:
            break
    assert not missing


def test_an_event_that_is_not_in_the_table_changes_nothing() -> None:
    for state in State:
        for event in Event:
            collective = Collective(1, 0, m.Spec("barrier", 0, 0, 0), state=state)
            assert collective.move(event) == (event in TRANSITIONS[state])
            assert collective.state is TRANSITIONS[state].get(event, state)


def sent(actions: list[Effect]) -> list[m.PeerMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_an_op_that_fails_after_its_completion_is_reported_once() -> None:
    machine = member(epoch=5)
    machine.collective(Collective(2, 0, m.Spec("all_reduce", 0, 10, 1)))
    machine.received(m.Started(2, 9, 5))
    assert sent(machine.engine_complete(2, False, 0, 0)) == [m.FinishVote(9, True)]
    assert sent(machine.engine_failed(2, "no memory to send it on")) == [
        m.Stalled(5, 0, "no memory to send it on")
    ]
    assert sent(machine.engine_failed(2, "again")) == []
    assert sent(machine.stream_lost(1, "as well")) == []
    machine.received(m.Finished(9, False, "others lack it"))
    assert sent(machine.stream_lost(1, "of no interest any more")) == []


def test_a_peer_that_cannot_serve_reports_it_for_each_plan() -> None:
    machine = member(epoch=5)
    machine.sync(2, 3, m.Manifest(1, 0, ()))
    assert sent(machine.engine_failed(3, "no memory for an op")) == []
    for seq in (9, 10):
        plan = m.SyncPlan(2, seq, (2,), (), (), ())
        assert sent(machine.received(plan)) == [m.Stalled(5, seq, "no memory for an op")]
    assert sent(machine.engine_failed(3, "a stream of before", 9)) == []
    assert sent(machine.engine_failed(3, "a stream", 10)) == [m.Stalled(5, 10, "a stream")]


def test_a_peer_sends_nothing_after_its_end() -> None:
    machine = member(epoch=5)
    machine.sync(2, 3, m.Manifest(1, 0, ()))
    machine.received(m.SyncPlan(2, 9, (2,), (), (), ()))
    machine.received(m.Kicked(Result.RANK_CONNECTION_FAILED.value, "it was late"))
    other = m.PeerInfo(2, 0, "h", 2, "", "")
    for said in (
        machine.unreached(other, "refused"),
        machine.rendezvous(m.RendezvousRequest(2, "ab" * 16, 7, 1)),
        machine.engine_failed(3, "a stream", 9),
        machine.fetched(9, True, ""),
        machine.inquire(2),
        machine.leave("done"),
    ):
        assert sent(said) == []


def test_a_message_out_of_turn_is_noticed() -> None:
    talk = conversation.Conversation()
    talk.said(m.Hello(1, "1", 0, "", 1, "", "", b""))
    with pytest.raises(AssertionError, match="Admitted in a membership that is asking"):
        talk.heard(m.Admitted(7, m.Done()))
