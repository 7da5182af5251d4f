"""Peers that others cannot connect to: where they meet, and when that is impossible."""

from __future__ import annotations

from collections import Counter
from itertools import product

import msgspec
from simulation.manual import ENTRY, OTHER, WORK, ManualRun

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.ring import BARRED, Hop, plan_rings
from pccl.protocol.topology import hops
from pccl.types import Result

TOKEN = "0123456789abcdef" * 2


def run_of(*kinds: str) -> ManualRun:
    """A run of peers on machines of their own; "o" only dials out, "r" relays."""
    run = ManualRun(0)
    for i, kind in enumerate(kinds, 1):
        fields = {"outgoing": kind == "o", "relay": 7000 if kind == "r" else 0}
        run.join(b"%d" % i, host=f"h{i}", machine=f"m{i}", **fields)
    run.say(b"1", m.TopologyVote(1))
    return run


def info(number: int, outgoing: bool, machine: str = "") -> m.PeerInfo:
    ipc, machine = ("/x", machine) if machine else ("", f"m{number}")
    return m.PeerInfo(number, 0, "h", 1, ipc, machine, outgoing=outgoing)


def side_by_side(order: tuple[int, ...], outgoing: set[int]) -> int:
    return sum({*hop} <= outgoing for hop in hops(order))


def errors(run: ManualRun) -> set[str]:
    """The error that everybody gets."""
    last = [run.last(peer.conn) for peer in run.master.peers.values()]
    found = {one.why for one in last if isinstance(one, m.CallError)}
    failed = Result.RANK_CONNECTION_FAILED.value
    assert all(isinstance(one, m.CallError) and one.result == failed for one in last)
    return found


def test_no_ring_has_more_of_them_side_by_side_than_it_must() -> None:
    for size in range(2, 9):
        for hidden in product((False, True), repeat=size):
            peers = [info(i, out) for i, out in enumerate(hidden, 1)]
            (ring,) = plan_rings(peers)
            outgoing = {i for i, out in enumerate(hidden, 1) if out}
            least = max(0, 2 * len(outgoing) - size)
            assert side_by_side(ring.order, outgoing) == least
            assert ring.order[0] == 1 and sorted(ring.order) == [*range(1, size + 1)]


def test_a_ring_without_adjacent_outgoing_peers_is_unchanged() -> None:
    peers = [info(i, i % 2 == 0) for i in range(1, 7)]
    chosen = (m.Ring((3, 6, 1, 2, 5, 4), 1),)
    assert plan_rings(peers, chosen) == chosen


def test_peers_of_one_machine_stay_together() -> None:
    peers = [info(1, False), info(2, False), *(info(i, True, "a") for i in (3, 4, 5))]
    peers += [info(i, True, "b") for i in (6, 7, 8)]
    (ring,) = plan_rings(peers)
    assert ring.order == (1, 6, 7, 8, 2, 3, 4, 5)


def test_a_link_that_is_blocked_is_avoided_too() -> None:
    peers = [info(i, i > 2) for i in range(1, 5)]

    def cost(hop: Hop) -> int:
        return BARRED if hop == (1, 4) else 0

    (ring,) = plan_rings(peers, cost=cost)
    assert not side_by_side(ring.order, {3, 4}) and (1, 4) not in hops(ring.order)


def test_the_receiver_gets_the_endpoint_of_its_sender() -> None:
    run = run_of("", "o")
    run.say(b"1", m.RendezvousRequest(2, TOKEN, 4001, 8))
    sender = run.master.peers[1].info
    assert run.last(b"2") == m.RendezvousJoin(sender, TOKEN, "h1", 4001, 8)


def test_only_unreachable_neighbors_are_sent_to_a_rendezvous() -> None:
    run = run_of("", "")
    run.join(b"3", host="h3", outgoing=True)  # not admitted yet
    run.join(b"4", host="h4", outgoing=True, group=1)
    before = {conn: len(told) for conn, told in run.told.items()}
    for number in (1, 2, 3, 4, 5):
        run.say(b"1", m.RendezvousRequest(number, TOKEN, 4001, 8))
    assert {conn: len(told) for conn, told in run.told.items()} == before


def test_two_that_are_apart_meet_at_one_that_relays() -> None:
    run = run_of("o", "o", "", "r")
    run.say(b"1", m.RendezvousRequest(2, TOKEN, 0, 8))
    one, other, _, relay = (run.master.peers[n].info for n in range(1, 5))
    assert run.last(b"4") == m.RendezvousRelay(TOKEN, one, other)
    assert run.last(b"2") == m.RendezvousJoin(one, TOKEN, "h4", 7000, 8)
    assert run.last(b"1") == m.RendezvousResult(TOKEN, relay)


def test_pairs_that_are_apart_are_spread_over_the_relays() -> None:
    relays = [m.PeerInfo(n, 0, "h", 1, "", f"m{n}", relay=7000 + n) for n in (7, 8, 9)]

    def relay(pair: tuple[int, int], count: int) -> int:
        request = m.RendezvousRequest(pair[1], TOKEN, 0, 8)
        (by, _), *_ = reach.rendezvous(*(info(n, True) for n in pair), request, relays[:count])
        return by.peer

    star = [(1, n) for n in range(2, 50)]
    neighbors = [[(n, n + step) for n in range(1, 48 * step, step)] for step in (1, 2, 3)]
    for pairs in (star, *neighbors):
        for count in (2, 3):
            loads = Counter(relay(pair, count) for pair in pairs)
            assert len(loads) == count and min(loads.values()) >= 36 // count
    assert all(relay(pair, 3) == relay(pair[::-1], 3) for pair in star), "the same both ways"


def test_peers_of_one_machine_are_apart_without_a_common_socket() -> None:
    with_ipc, other, without = info(1, True, "a"), info(2, True, "a"), info(3, True)
    without = msgspec.structs.replace(without, machine="a")
    assert not reach.apart(with_ipc, other)
    assert reach.apart(with_ipc, without) and reach.apart(without, with_ipc)


def test_without_a_relay_they_learn_why_they_cannot_meet() -> None:
    run = run_of("o", "o")
    told = len(run.told[b"2"])
    run.say(b"1", m.RendezvousRequest(2, TOKEN, 0, 8))
    met = run.last(b"1")
    assert isinstance(met, m.RendezvousResult) and met.relay is None
    assert "peer 1" in met.why and "peer 2" in met.why
    assert len(run.told[b"2"]) == told


def test_a_collective_that_cannot_be_fails_and_a_small_one_does_not() -> None:
    run = run_of("o", "", "o", "o")
    run.everyone(m.StartVote(2, 0, WORK))
    (why,) = errors(run)
    assert why.startswith("peer 4 (h4:1) and peer 3 (h3:1) only dial out")
    assert "PCCL_RELAY=1" in why
    run.everyone(m.StartVote(3, 0, m.Spec("all_reduce", 0, 0, 4), b"1234"))
    assert isinstance(run.last(b"1"), m.Started)
    assert not run.dials and not run.dropped


def test_with_a_relay_it_can_be() -> None:
    run = run_of("o", "r", "o", "o")
    run.start()


def test_a_send_that_cannot_be_fails() -> None:
    run = run_of("o", "", "o")
    send = m.Spec("send", 0, 10, 1000)
    for conn in (b"1", b"3"):
        run.say(conn, m.StartVote(2, 0, send, pair=(1, 3)))
    for conn in (b"1", b"3"):
        told = run.last(conn)
        assert isinstance(told, m.CallError) and "peer 3" in told.why


def test_shared_state_comes_from_peers_that_can_send_it() -> None:
    run = run_of("o", "", "o", "")
    manifests = (ENTRY, ENTRY, OTHER, ENTRY)
    for i, entry in enumerate(manifests, 1):
        run.say(b"%d" % i, m.SyncVote(2, m.Manifest(0, 0, (entry,))))
    plans = {conn: run.last(conn) for conn in (b"1", b"2", b"3", b"4")}
    assert all(isinstance(plan, m.SyncPlan) for plan in plans.values())
    assert {c: p.serve for c, p in plans.items() if isinstance(p, m.SyncPlan)} == {
        b"1": (),
        b"2": (3,),
        b"3": (),
        b"4": (3,),
    }
    assert getattr(plans[b"3"], "holders", ()) == (2, 4)


def test_shared_state_that_no_peer_can_send_is_an_error() -> None:
    run = run_of("o", "o")
    for i, entry in enumerate((ENTRY, OTHER), 1):
        run.say(b"%d" % i, m.SyncVote(2, m.Manifest(0, 0, (entry,))))
    (why,) = errors(run)
    assert "peer 1" in why and "peer 2" in why


def test_no_dial_is_made_to_one_that_can_only_dial_itself() -> None:
    run = run_of("", "o", "")
    epoch = run.master.run.groups[0].epoch
    run.say(b"1", m.Unreached(2, epoch, "it did not come"))
    assert not run.dials and not run.dropped
    assert run.master.run.groups[0].epoch > epoch, "the rings go around what is blocked"


def test_a_peer_that_only_dials_out_cannot_relay() -> None:
    run = run_of("")
    run.join(b"2", outgoing=True, relay=7000)
    refused = run.last(b"2")
    assert isinstance(refused, m.Refused) and "PCCL_RELAY" in refused.why


def test_an_optimization_does_not_measure_impossible_links() -> None:
    run = run_of("o", "", "o")
    run.everyone(m.OptimizeVote(2))
    measured = set()
    while True:
        probes = {n: run.last(peer.conn) for n, peer in run.master.peers.items()}
        found = {n: p for n, p in probes.items() if isinstance(p, m.Probe) and p.peers}
        if not found:
            break
        for number, probe in found.items():
            measured |= {(sender, number) for sender in probe.peers}
            run.say(b"%d" % number, m.Measured(probe.seq, 1000, 10))
        last = {p.seq for p in found.values()}
        if not any(getattr(run.last(b"%d" % n), "seq", 0) not in last for n in found):
            break
    assert measured and not measured & {(1, 3), (3, 1)}


def test_weights_come_only_from_holders_that_can_send_them() -> None:
    run = run_of("")
    package = m.Package(1, 0, b"c" * 16, 9, b"h" * 16, 1 << 30, b"b" * 16)
    for conn, outgoing in ((b"p", True), (b"f", True), (b"g", False)):
        run.join(conn, host=conn.decode(), machine=conn.decode(), client=True, outgoing=outgoing)
    run.say(b"p", m.Publish(1, (package,)))
    run.say(b"f", m.Seek(1, 0))
    assert not any(isinstance(one, m.Source) for one in run.told[b"f"])
    run.say(b"g", m.Seek(1, 0))
    source = run.last(b"g")
    assert isinstance(source, m.Source) and source.holder.host == "p"
    receiver = run.last(b"p")
    assert isinstance(receiver, m.Serve)
    run.say(b"g", m.Got(1000))
    run.say(b"g", m.Holds((package,), 1))
    source = run.last(b"f")
    assert isinstance(source, m.Source) and source.holder.host == "g"
    taker = run.last(b"g")
    assert isinstance(taker, m.Serve)
    run.say(b"g", m.RendezvousRequest(taker.receiver.peer, TOKEN, 4001, 8))
    come = run.last(b"f")
    assert isinstance(come, m.RendezvousJoin) and (come.host, come.port) == ("g", 4001)


def test_a_relay_that_one_of_two_does_not_reach_is_given_up_for_these_two() -> None:
    run = run_of("o", "o", "r", "r", "r")

    def relay() -> int:
        run.say(b"1", m.RendezvousRequest(2, TOKEN, 0, 8))
        met = run.last(b"1")
        assert isinstance(met, m.RendezvousResult) and met.relay is not None
        return met.relay.peer

    tried = []
    for left in (2, 1, 0):
        epoch = run.master.run.groups[0].epoch
        tried += [relay(), relay()]
        assert not run.master.run.groups[0].blame.blocked
        for one, other in ((1, 2), (2, 1)):
            run.say(b"%d" % one, m.Unreached(other, epoch, "it did not come"))
        renewed = run.master.run.groups[0].epoch > epoch
        assert renewed == (left > 0), "with new streams they try the next"
    assert tried[::2] == tried[1::2] and {*tried} == {3, 4, 5}
    assert (1, 2) in run.master.run.groups[0].blame.blocked, "they have tried all"
