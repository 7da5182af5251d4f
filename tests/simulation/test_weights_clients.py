"""Weights clients: rules of the master and of the client, whole stories from seeds; no sockets."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from simulation.weights import Node, WeightsRun, package

from pccl.protocol import messages as m
from pccl.protocol.master import Status, clients, status
from pccl.protocol.master.clients import FIRST, PLACES, PLACES_SMALL
from pccl.protocol.master.effects import Drop, Note
from pccl.protocol.master.inputs import Disconnected, Hello, Received
from pccl.protocol.master.status import ClientStatus, WeightsStatus
from pccl.protocol.peer.effects import (
    AbortOp,
    Arrange,
    CloseStream,
    Effect,
    Fail,
    Fault,
    OpenStream,
    StartTransfer,
)
from pccl.protocol.weights import KEPT_MAX, STREAMS_KEPT, WeightsMachine, stale, way
from pccl.types import Result


def following(hub: WeightsRun) -> dict[int, int]:
    return {node.name: node.machine.version for node in hub.living}


def told(node: Node, kind: type) -> list[m.MasterMessage]:
    """The next message of one kind."""
    return [message for message in node.into if isinstance(message, kind)]


def test_the_way_takes_the_fewest_bytes() -> None:
    chain = [package(1, 0), package(2, 1), package(3, 2), package(3, 0), package(4, 3)]
    assert [one.key for one in way(chain, 2)] == [(3, 2), (4, 3)]
    assert [one.key for one in way(chain, 0)] == [(3, 0), (4, 3)]
    assert [one.key for one in way(chain[:3], 0)] == [(1, 0), (2, 1), (3, 2)]
    assert way(chain, 4) == () and way((), 0) == ()


def test_the_way_goes_as_far_as_it_can() -> None:
    assert [one.key for one in way([package(1, 0), package(3, 2)], 0)] == [(1, 0)]
    long = [package(1, 0), *(package(n, n - 1) for n in range(2, 20)), package(19, 0)]
    assert [one.key for one in way(long, 2)] == [(19, 0)]


def test_a_package_that_no_client_needs_is_stale() -> None:
    available = [package(1, 0), package(2, 1), package(3, 2), package(3, 0), package(4, 3)]
    assert [one.key for one in stale(available, available)] == [(1, 0)]
    only = [package(1, 0), package(2, 1), package(3, 2)]
    assert stale(available, only) == []
    newer = [*available, package(5, 4), package(5, 0)]
    assert {one.key for one in stale(newer, newer)} == {(1, 0), (2, 1), (3, 2), (3, 0)}
    many = [package(n, n - 1) for n in range(2, KEPT_MAX + 12)]
    assert len(many) - len(stale(many, many)) <= KEPT_MAX


def test_a_version_reaches_all_and_the_run_does_not_notice() -> None:
    hub = WeightsRun(1)
    publisher = hub.add(follows=False)
    subscribers = [hub.add() for _ in range(5)]
    hub.settle()
    call = hub.publish(publisher, 1, 0)
    hub.settle()
    assert publisher.answers == {call: ""}
    assert [node.machine.version for node in subscribers] == [1] * 5
    hub.publish(publisher, 2, 1)
    hub.publish(publisher, 3, 2, whole=True)
    hub.settle()
    assert [node.machine.version for node in subscribers] == [3] * 5
    assert not hub.master.peers and hub.master.status().peers == ()


def test_few_fetch_from_one_holder_and_each_receiver_becomes_one() -> None:
    hub = WeightsRun(2)
    publisher = hub.add(follows=False)
    for _ in range(9):
        hub.add()
    hub.settle()
    hub.publish(publisher, 1, 0)
    served: dict[int, set[int]] = {}
    while hub.step():
        for number, one in hub.master.run.clients.all.items():
            served.setdefault(number, set()).update(one.receivers)
    assert len(served[publisher.number]) < 9
    assert sum(map(len, served.values())) == 9
    assert all(version == 1 for name, version in following(hub).items())


def seek(hub: WeightsRun, publisher: Node, nodes: list[Node]) -> None:
    """A version that was published is announced, and the nodes ask for it."""
    while publisher.out:
        hub.send(publisher)
    for node in nodes:
        while node.into:
            hub.receive(node)
        while node.out:
            hub.send(node)


def waiting(hub: WeightsRun, count: int) -> tuple[Node, list[Node]]:
    """A publisher of version 1, and subscribers that seek it; nothing has moved."""
    publisher = hub.add(follows=False)
    nodes = [hub.add() for _ in range(count)]
    hub.settle()
    hub.publish(publisher, 1, 0)
    seek(hub, publisher, nodes)
    return publisher, nodes


def test_a_slow_client_gives_its_place_back() -> None:
    hub = WeightsRun(3)
    _, nodes = waiting(hub, PLACES + 1)
    assert [len(told(node, m.Source)) for node in nodes] == [1] * PLACES + [0]
    for node in nodes[:PLACES]:
        while node.into:
            hub.receive(node)
    nodes[0].perform(nodes[0].machine.slow())
    hub.send(nodes[0])
    assert len(told(nodes[-1], m.Source)) == 1


def test_small_packages_have_more_places() -> None:
    hub = WeightsRun(19)
    publisher, nodes = waiting(hub, PLACES_SMALL + 1)
    hub.settle()
    hub.publish(publisher, 2, 1)
    hub.send(publisher)
    assert sum(len(told(node, m.Source)) for node in nodes) == PLACES_SMALL


def test_followers_need_not_seek_the_next_difference() -> None:
    hub = WeightsRun(20)
    publisher, nodes = waiting(hub, 3)
    idle = hub.add(follows=False)
    hub.settle()
    late = hub.add()
    hub.publish(publisher, 2, 1)
    hub.send(publisher)
    desk = hub.master.run.clients
    assert [len(told(node, m.Source)) for node in (*nodes, idle, late)] == [1, 1, 1, 0, 0]
    before = {node.number: desk.all[node.number].holder for node in nodes}
    seek(hub, publisher, nodes)
    assert {number: desk.all[number].holder for number in before} == before
    assert all(not node.into for node in nodes), "what they say is known already"
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Seek(2, 1, (publisher.number,)))))
    assert desk.all[nodes[0].number].holder != publisher.number
    hub.settle()
    assert [node.machine.version for node in (*nodes, late)] == [2] * 4
    hub.publish(publisher, 3, 2, whole=True)
    hub.send(publisher)
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Seek(3, 0))))
    assert desk.all[nodes[0].number].seek == m.Seek(3, 0), "it has chosen another way"


def test_the_fastest_client_comes_first_and_gets_its_fastest_holder() -> None:
    hub = WeightsRun(4)
    publisher, nodes = waiting(hub, 4)
    desk = hub.master.run.clients
    one, fast = desk.all[nodes[0].number], desk.all[nodes[3].number]
    fast.rate = 1000
    before = {**desk.all[publisher.number].receivers}
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Got(7))))
    assert one.rate == 7 and desk.all[publisher.number].given == 7
    assert one.rates == {publisher.number: 7}
    fresh = desk.all[publisher.number].receivers.keys() - before.keys()
    assert fresh == {nodes[3].number}
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Holds((package(1, 0),), 1))))
    assert desk.all[nodes[2].number].holder == nodes[0].number


def test_the_fastest_of_the_free_holders_is_taken() -> None:
    hub = WeightsRun(5)
    publisher, nodes = waiting(hub, 3)
    hub.settle()
    desk = hub.master.run.clients
    hub.publish(publisher, 2, 1)
    late = desk.all[nodes[2].number]
    late.rates = {nodes[0].number: 50, nodes[1].number: 500, publisher.number: 5}
    message = m.Holds((package(1, 0),), 1)
    hub.perform(hub.master.feed(Received(nodes[2].conn, m.Seek(1, 0))))
    assert late.holder == nodes[1].number
    hub.perform(hub.master.feed(Received(nodes[2].conn, m.Seek(1, 0, (nodes[1].number,)))))
    assert late.holder == nodes[0].number
    assert message.version == 1


def test_the_next_package_comes_over_the_same_streams_and_a_lost_one_is_replaced() -> None:
    hub = WeightsRun(17)
    publisher, follower, leaver = hub.add(follows=False), hub.add(relays=False), hub.add()
    hub.publish(publisher, 1, 0)
    hub.settle()
    hub.kill(leaver)
    nodes = publisher, follower
    before = [{*node.streams} for node in nodes]
    hub.publish(publisher, 2, 1)
    hub.settle()
    assert [{*node.streams} for node in nodes] == before
    hub.cut(follower, *follower.streams)
    hub.publish(publisher, 3, 2)
    hub.settle()
    assert follower.machine.version == 3 and len(follower.streams) == 1
    other = hub.add()  # with the slot of the one that has left
    hub.settle()
    assert other.machine.version == 3 and len(publisher.streams) <= 3


def test_a_holder_keeps_few_streams_to_clients_that_fetch_nothing() -> None:
    hub = WeightsRun(18)
    publisher = hub.add(follows=False)
    for _ in range(STREAMS_KEPT + 3):
        hub.add(relays=False)
    for version in range(1, 4):
        hub.publish(publisher, version, version - 1)
        hub.settle()
        assert len(publisher.streams) == STREAMS_KEPT


def test_a_lost_relay_costs_its_receivers_only_time() -> None:
    hub = WeightsRun(6)
    publisher, nodes = waiting(hub, 2)
    other = hub.add()
    hub.settle()
    assert other.machine.version == 1
    hub.publish(publisher, 2, 1)
    hub.kill(nodes[0])
    hub.settle()
    hub.kill(publisher)
    hub.settle()
    assert set(following(hub).values()) == {2}
    late = hub.add()
    hub.settle()
    assert late.machine.version == 2, "who is left has all of it"


def with_a_liar(seed: int) -> tuple[WeightsRun, Node, Node]:
    """A publisher of a version, and one that has fetched it and lies from now on."""
    hub = WeightsRun(seed)
    publisher = hub.add(follows=False)
    liar = hub.add()
    hub.settle()
    hub.publish(publisher, 1, 0)
    hub.settle()
    liar.lies = True
    return hub, publisher, liar


def test_a_holder_of_wrong_data_is_avoided_and_its_victim_recovers() -> None:
    hub, _, _ = with_a_liar(7)
    victims = [hub.add() for _ in range(4)]
    hub.settle()
    assert [node.machine.version for node in victims] == [1] * 4


def test_wrong_data_of_the_last_holder_is_not_accepted() -> None:
    hub, publisher, _ = with_a_liar(8)
    hub.kill(publisher)
    victim = hub.add()
    hub.settle()
    assert victim.machine.version == 0
    again = hub.add(follows=False)
    hub.settle()
    hub.publish(again, 2, 0)
    hub.settle()
    assert victim.machine.version == 2, "it waits for nothing that it does not need any more"


def test_the_second_publisher_is_refused_and_continues_with_a_whole_version() -> None:
    hub = WeightsRun(9)
    one, other = hub.add(follows=False), hub.add(follows=False)
    subscriber = hub.add()
    hub.settle()
    first = hub.publish(one, 1, 0)
    hub.settle()
    second = hub.publish(other, 1, 0)
    hub.settle()
    assert one.answers == {first: ""} and "version 1 is not newer" in other.answers[second]
    third = hub.publish(other, 2, 0)
    hub.settle()
    assert other.answers[third] == ""
    fourth = hub.publish(one, 3, 1)
    hub.settle()
    assert "another process has published version 2" in one.answers[fourth]
    assert subscriber.machine.version == 2


def test_packages_of_one_version_that_contradict_each_other_are_refused() -> None:
    hub = WeightsRun(19)
    publisher, node = hub.add(follows=False), hub.add()
    hub.settle()
    hub.publish(publisher, 1, 0)
    hub.settle()
    whole, unlike = package(2, 0, b"this"), package(2, 1, b"that")
    for packages in ((whole, unlike), (whole, package(2, 0, b"that")), (whole, whole)):
        (answer, *_) = hub.master.feed(Received(publisher.conn, m.Publish(9, packages)))
        told = getattr(answer, "message", None)
        assert isinstance(told, m.CallError) and "lead to different content" in told.why
    assert hub.master.run.clients.catalogue.head == node.machine.version == 1


def test_a_package_that_contradicts_others_is_not_offered() -> None:
    hub = WeightsRun(10)
    publisher, nodes = waiting(hub, 1)
    hub.settle()
    catalogue = hub.master.run.clients.catalogue
    wrong = package(1, 0, b"another")
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Holds((wrong,), 1))))
    assert [*catalogue.holders((1, 0))] == [publisher.number]
    other_way = package(1, 7, b"another")
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Holds((other_way,), 1))))
    assert catalogue.packages == (package(1, 0),), "it would lead elsewhere"


def test_receivers_of_a_dropped_package_get_another_holder() -> None:
    hub = WeightsRun(11)
    publisher, nodes = waiting(hub, PLACES + 1)
    desk = hub.master.run.clients
    hub.perform(hub.master.feed(Received(nodes[-1].conn, m.Holds((package(1, 0),), 1))))
    assert desk.all[nodes[0].number].holder == publisher.number
    hub.perform(hub.master.feed(Received(publisher.conn, m.Holds((), 1))))
    assert not desk.all[publisher.number].receivers
    assert desk.all[nodes[0].number].holder == nodes[-1].number


def test_clients_report_their_packages_to_another_master() -> None:
    hub = WeightsRun(12)
    publisher, _ = waiting(hub, 3)
    hub.settle()
    hub.begin()
    late = hub.add()
    hub.settle()
    assert hub.master.run.clients.catalogue.head == 1
    assert late.machine.version == 1
    call = hub.publish(publisher, 2, 1)
    hub.settle()
    assert publisher.answers[call] == "" and set(following(hub).values()) == {2}


def test_a_publication_with_a_lost_answer_is_not_repeated() -> None:
    hub = WeightsRun(13)
    publisher, nodes = waiting(hub, 1)
    hub.settle()
    call = hub.publish(publisher, 2, 1)
    while publisher.out:
        hub.send(publisher)
    hub.begin()
    hub.settle()
    assert publisher.answers[call] == "" and nodes[0].machine.version == 2


def weights(hub: WeightsRun) -> WeightsStatus:
    """The status of clients, as it is decoded."""
    shown = hub.master.status()
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Status) == shown
    assert shown.weights is not None
    return shown.weights


def test_the_status_shows_versions_and_holders() -> None:
    hub = WeightsRun(20)
    assert hub.master.status().weights is None
    publisher, nodes = waiting(hub, PLACES + 1)
    shown = weights(hub)
    assert (shown.version, shown.followers, shown.clients_left_out) == (1, {0: PLACES + 1}, 0)
    by_name = {one.port - 1000: one for one in shown.clients}
    giver, served = by_name.pop(publisher.name), []
    for one in by_name.values():
        assert (one.version, one.published, one.seeks, one.slow) == (0, None, 1, False)
        assert one.source in (None, giver.client)
        served += [one.client] if one.source else []
    assert len(served) == PLACES
    assert giver == ClientStatus(
        giver.client, "10.0.0.1", 1001, 1, 1, None, None, False, None, giver.receivers
    )
    assert {*giver.receivers} == {*served}
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Slow())))
    now = {one.port - 1000: one for one in weights(hub).clients}
    assert [name for name, one in now.items() if one.slow] == [nodes[0].name]
    assert all(now[node.name].source == giver.client for node in nodes)
    hub.settle()
    shown = weights(hub)
    assert shown.followers == {1: PLACES + 1}
    assert all(not (one.receivers or one.seeks or one.source) for one in shown.clients)
    assert all(one.rate or one.published for one in shown.clients)
    hub.publish(publisher, 2, 1)
    hub.kill(nodes[0])
    hub.settle()
    assert weights(hub).followers == {2: PLACES}
    for node in (publisher, *nodes[1:]):
        hub.kill(node)
    assert weights(hub) == WeightsStatus(2, {}, (), 0), "the version has been"


def test_another_master_knows_versions_but_no_publisher() -> None:
    hub = WeightsRun(21)
    publisher, _ = waiting(hub, 2)
    hub.settle()
    hub.begin()
    hub.settle()
    assert weights(hub).followers == {1: 3}
    hub.publish(publisher, 2, 1)
    hub.settle()
    assert weights(hub).followers == {2: 2}
    assert {one.published for one in weights(hub).clients} == {None, 2}


def test_only_the_first_of_many_clients_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CLIENTS_MAX", 2)
    hub = WeightsRun(22)
    waiting(hub, 3)
    shown = weights(hub)
    assert [one.client for one in shown.clients] == [1, 2] and shown.clients_left_out == 2
    assert shown.followers == {0: 3}


def test_there_are_as_many_clients_as_a_holder_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a slot of its own, and a number that no peer has."""
    assert clients.SLOTS == 65536, "as c/pccl_core.h says"
    monkeypatch.setattr(clients, "SLOTS", 3)
    hub = WeightsRun(23)
    nodes = [hub.add() for _ in range(3)]
    hub.settle()
    desk = hub.master.run.clients
    assert [one.slot for one in desk.all.values()] == [0, 1, 2]
    assert [*desk.all] == [FIRST + 1, FIRST + 2, FIRST + 3] and FIRST > 1 << 32
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "", b"", client=True)
    one_more = Hello(b"one more", hello, "10.0.0.1")
    assert hub.master.feed(one_more) == [Drop(b"one more", "there are 3 clients already")]
    hub.kill(nodes[1])
    hub.settle()
    assert Note("client 4 (10.0.0.1:1) registered") in hub.master.feed(one_more)
    assert sorted(one.slot for one in desk.all.values()) == [0, 1, 2]
    for one in [*desk.all.values()]:
        hub.master.feed(Disconnected((one.conn,), "it died"))
    late = hub.add()
    hub.settle()
    assert [one.slot for one in desk.all.values()] == [0] and late.number == FIRST + 5


def test_clients_are_told_of_a_loss_that_changes_what_is_available() -> None:
    hub = WeightsRun(24)
    publisher, (node, other) = waiting(hub, 2)
    hub.settle()
    idle = hub.add(relays=False, follows=False)
    hub.settle()
    hub.kill(idle)
    assert not node.into, "it held nothing"
    hub.kill(other)
    assert not node.into, "others hold it too"
    hub.perform(hub.master.feed(Received(node.conn, m.Holds((), 1))))
    hub.kill(publisher)
    (available,) = told(node, m.Available)
    assert available == m.Available((), 1)


def test_a_client_that_votes_is_dropped() -> None:
    for message in (m.TopologyVote(1), m.PendingVote(1), m.Inquire(1)):
        hub = WeightsRun(14)
        node = hub.add()
        hub.settle()
        hub.perform(hub.master.feed(Received(node.conn, message)))
        hub.settle()
        assert node.machine.over is not None and "out of turn" in node.machine.over.why
        assert not hub.master.run.clients.all


def test_receivers_of_a_lost_holder_get_another() -> None:
    """Before they notice: a frozen holder keeps its connections."""
    hub = WeightsRun(17)
    publisher, nodes = waiting(hub, PLACES)
    desk = hub.master.run.clients
    hub.perform(hub.master.feed(Received(nodes[0].conn, m.Holds((package(1, 0),), 1))))
    hub.perform(hub.master.feed(Disconnected((publisher.conn,), "it is frozen")))
    assert desk.all[nodes[1].number].holder == nodes[0].number


def test_a_version_without_a_holder_is_not_published_again() -> None:
    hub = WeightsRun(18)
    publisher = hub.add(follows=False)
    node = hub.add(relays=False)
    hub.settle()
    hub.publish(publisher, 7, 0)
    hub.settle()
    hub.kill(publisher)
    hub.begin()
    hub.settle()
    assert node.machine.version == hub.master.run.clients.catalogue.head == 7


def test_a_peer_that_publishes_is_dropped() -> None:
    hub = WeightsRun(15)
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "", b"")
    todo = [*hub.master.feed(Hello(b"x", hello, "10.0.0.1"))]
    todo += hub.master.feed(Received(b"x", m.Publish(1, (package(1, 0),))))
    kicked = [each.message for each in todo if isinstance(getattr(each, "message", 0), m.Kicked)]
    assert [one.result for one in kicked] == [Result.INTERNAL_ERROR.value]


def test_a_client_that_is_away_while_others_recover_is_heard() -> None:
    """A run that comes back is not kept from it by clients that are there already."""
    hub = WeightsRun(16)
    node = hub.add()
    hub.settle()
    assert node.number > FIRST and hub.master.run.membership.next_number == 1
    assert hub.master.has_heard(node.conn) and not hub.master.knows(node.conn)


# ---- a client alone ----


def holder(number: int) -> m.PeerInfo:
    return m.PeerInfo(number, 0, "10.0.0.1", number, "", f"machine {number}")


def source(wanted: m.Package, peer: int) -> m.Source:
    return m.Source(*wanted.key, holder(peer), 7, 0)


def client(*available: m.Package) -> WeightsMachine:
    """A client that is registered, and seeks the first step to what is available."""
    machine = WeightsMachine(True, True, lambda package: True)
    machine.join(0, m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "", b"", client=True))
    machine.received(m.Welcome(500, nonce=9))
    machine.received(m.Available(available, 1))
    return machine


def sent(effects: list[Effect], kind: type) -> list[Any]:
    """The messages of a kind, or the effects of one."""
    return [
        one for one in (getattr(each, "message", each) for each in effects) if type(one) is kind
    ]


def fetching(machine: WeightsMachine, wanted: m.Package, peer: int) -> tuple[int, int]:
    """A holder is found. The op and the stream of the fetch."""
    effects = machine.received(source(wanted, peer))
    (start,) = sent(effects, StartTransfer)
    return start.op, start.ends[0].stream


def test_a_client_that_loses_its_master_ends_if_it_has_not_been_registered() -> None:
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 1, "", "", b"", client=True)
    machine = WeightsMachine(True, True, lambda package: True)
    machine.join(3, hello)
    lost = Fail(3, Result.MASTER_CONNECTION_FAILED, "gone", Fault.MASTER_LOST)
    assert machine.disconnected("gone") == [lost]
    refused = WeightsMachine(True, True, lambda package: True)
    refused.join(3, hello)
    (end,) = sent(refused.received(m.Refused(Result.INVALID_USAGE.value, "no")), Fail)
    assert (end.call, end.fault) == (3, Fault.KICKED)
    registered = client()
    assert registered.disconnected("gone") == [] and registered.over is None


def test_why_a_version_cannot_be_published() -> None:
    machine = client(package(1, 0))
    assert machine.objection(1) == ""
    machine.publish(5, (package(2, 0),))
    assert "version 2 is under way" in machine.objection(2) and machine.objection(3) == ""
    machine.received(m.Published(5))
    assert "version 2 is not newer than version 2" in machine.objection(2)
    assert machine.objection(3) == ""
    machine.leave("it was closed")
    assert machine.objection(3) == "it was closed"


def test_a_fetch_that_has_begun_continues_with_another_holder() -> None:
    machine = client(package(2, 0))
    op, stream = fetching(machine, package(2, 0), 9)
    assert machine.stream_lost(stream, lied=False) == []
    machine.engine_failed(op, "no stream is left", starved=1)
    again = machine.retry()
    assert sent(again, m.Seek) == [m.Seek(2, 0)], "nobody has lied"
    available = m.Available((package(2, 0), package(3, 2), package(3, 0)), 3)
    assert not sent(machine.received(available), m.Seek)
    assert fetching(machine, package(2, 0), 3)[0] == op
    assert machine.engine_settled(op + 100, 0, 0) == []


def test_a_fetch_of_what_nobody_has_any_more_gives_way_to_the_next_version() -> None:
    machine = client(package(2, 0))
    op, stream = fetching(machine, package(2, 0), 9)
    machine.received(m.Available((package(3, 0),), 3))
    machine.stream_lost(stream, lied=False)
    machine.engine_failed(op, "no stream is left", starved=1)
    effects = machine.retry()
    assert sent(effects, m.Seek) == [m.Seek(3, 0)] and sent(effects, AbortOp) == [AbortOp(op)]


def test_a_holder_that_a_client_cannot_reach_gives_way_to_a_slower_one() -> None:
    hub = WeightsRun(21)
    publisher, near = hub.add(follows=False), hub.add()
    hub.publish(publisher, 1, 0)
    hub.settle()
    hub.master.run.clients.all[near.number].given = 1000
    far = hub.add()
    far.walls = {near}
    hub.settle()
    assert far.machine.version == 1


def test_a_holder_that_has_lied_is_avoided() -> None:
    machine = client(package(2, 0))
    op, stream = fetching(machine, package(2, 0), 9)
    machine.stream_lost(stream, lied=True)
    machine.engine_failed(op, "other data came", starved=1)
    assert sent(machine.retry(), m.Seek) == [m.Seek(2, 0, (9,))]


def test_a_stream_is_kept_for_the_next_package_of_the_same_holder_alone() -> None:
    steps = [package(1, 0), package(2, 1), package(3, 2)]
    machine = client(*steps)
    streams = []
    for step, peer in zip(steps, (9, 9, 3), strict=True):
        op, stream = fetching(machine, step, peer)
        streams.append(stream)
        machine.engine_complete(op, True, 0, 0)
        machine.taken(step, step.version)
    assert streams[0] == streams[1] != streams[2]


def test_streams_to_receivers_are_closed_when_they_break_and_for_another_master() -> None:
    machine = client()
    machine.publish(5, (package(1, 0),))
    streams = []
    for slot, peer in enumerate((9, 8, 7)):
        effects = machine.received(m.Serve(1, 0, holder(peer), 7, slot))
        streams += [each.stream for each in sent(effects, OpenStream)]
    assert sent(machine.stream_lost(streams[1], lied=False), CloseStream) == [
        CloseStream(streams[1])
    ]
    machine.disconnected("the master is gone")
    again = machine.received(m.Welcome(600, nonce=9))
    assert sent(again, CloseStream) == [CloseStream(streams[0]), CloseStream(streams[2])]


def story(seed: int) -> None:
    """Publishers and subscribers come, die and lie, masters are restarted.

    At the end, some subscribers cannot reach some others.
    """
    draw = random.Random(seed)
    hub = WeightsRun(seed)
    hub.damage = 0.1
    publisher = hub.add(follows=False)
    version = published = 0
    for _ in range(draw.randint(5, 40)):
        for _ in range(draw.randint(0, 30)):
            hub.step()
        deed = draw.random()
        if deed < 0.4:
            version += 1
            call = hub.publish(publisher, version, published, whole=draw.random() < 0.3)
            while call not in publisher.answers:
                hub.step()
            assert publisher.answers[call] == "", publisher.answers[call]
            published = version
        elif deed < 0.7:
            hub.add(relays=draw.random() < 0.8)
        elif deed < 0.8 and len(hub.living) > 1:
            hub.kill(draw.choice([one for one in hub.living if one is not publisher]))
        elif deed < 0.85:
            hub.kill(publisher)
            publisher, published = hub.add(follows=False), 0
            hub.settle()
            version = max(version, hub.master.run.clients.catalogue.head)
        elif deed < 0.9:
            node = draw.choice(hub.living)
            if node.streams:
                hub.cut(node, draw.choice([*node.streams]))
        elif deed < 0.95:
            while any(not node.number for node in hub.living):  # they would have to begin anew
                hub.step()
            hub.begin()
            hub.settle()
        else:
            liars = [one for one in hub.living if one is not publisher]
            for one in liars[:1]:
                one.lies = not one.lies
    others = [one for one in hub.living if one is not publisher]
    for one in draw.sample(others, len(others) // 3):
        one.walls = {*draw.sample(others, len(others) // 2)}
    hub.publish(publisher, version + 1, 0)
    hub.settle()
    desk = hub.master.run.clients.all
    assert all(one.holder == 0 and one.seek is None for one in desk.values()), "places are kept"
    shown = {one.client: one for one in weights(hub).clients}
    assert shown[publisher.number - FIRST].published == version + 1
    for node in hub.living:
        if node.machine.over is None and node is not publisher:  # else it must begin anew
            assert node.machine.version == version + 1, f"node {node.name}"
            assert shown[node.number - FIRST].version == version + 1, f"node {node.name}"


@pytest.mark.parametrize("first", range(0, 60, 30))
def test_stories(first: int) -> None:
    for seed in range(first, first + 30):
        try:
            story(seed)
        except BaseException:
            print(f"seed {seed}")
            raise


def test_a_client_meets_a_peer_that_cannot_connect_to_it() -> None:
    machine = WeightsMachine(True, True, lambda package: True)
    sender = m.PeerInfo(3, 0, "10.0.0.3", 1, "", "machine")
    for message in (
        m.RendezvousJoin(sender, "0" * 16, "10.0.0.3", 7, 1),
        m.RendezvousResult("0" * 16, why="nobody relays"),
    ):
        assert machine.received(message) == [Arrange(message)]
