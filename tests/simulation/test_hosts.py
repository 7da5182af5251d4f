"""Peers with several hosts: which are tried, and what it means that the master reaches none."""

from __future__ import annotations

import msgspec
import pytest
from simulation.manual import ManualRun

from pccl.protocol import messages as m
from pccl.protocol.master.membership import IPC_MAX, newcomer, refusal
from pccl.protocol.master.topology import Blame, Verdict
from pccl.protocol.reach import concluded, cure, foreign, matters, ways
from pccl.protocol.reach import refusal as unreachable

TOKEN = "ab" * 16
SEEN = "203.0.113.7"


def peer(*hosts: str, machine: str = "a") -> m.PeerInfo:
    return m.PeerInfo(1, 0, hosts[0], 5000, "x", machine, others=hosts[1:])


def hello(host: str, *others: str) -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, "1", 0, host, 5000, "", "a", b"", others=others)


def test_loopback_hosts_are_tried_on_the_same_machine_only() -> None:
    mixed = peer("127.0.0.1", "10.0.0.1", "::1", "fe80::1%eth0", "a.name", "fd00::1", "169.254.1.2")
    assert ways(mixed, "b") == ("10.0.0.1", "a.name", "fd00::1")
    assert ways(mixed, "a") == ("127.0.0.1", "::1", "fe80::1%eth0", "169.254.1.2")
    assert ways(peer("127.0.0.1"), "b") == ("127.0.0.1",), "there is nothing else"
    assert ways(peer("10.0.0.1", "fd00::1"), "a") == ("10.0.0.1", "fd00::1")


def test_a_peer_is_known_by_all_its_hosts_once_each() -> None:
    assert newcomer(hello("", "10.0.0.1", SEEN, "fd00::1"), SEEN).hosts == (
        SEEN,
        "10.0.0.1",
        "fd00::1",
    )
    assert newcomer(hello("a.name", "10.0.0.1"), SEEN).hosts == ("a.name", "10.0.0.1")
    run = ManualRun(0)
    for number in (1, 2):
        run.join(b"%d" % number, host="", others=(f"fd00::{number}",))
    run.say(b"1", m.TopologyVote(1))
    run.say(b"2", m.TopologyVote(1))
    (plan,) = (told for told in run.told[b"2"] if isinstance(told, m.Plan))
    assert [info.hosts for info in plan.peers] == [("10.0.0.1", f"fd00::{n}") for n in (1, 2)]


def test_each_host_is_checked_and_there_are_no_more_than_eight() -> None:
    said = hello("", "10.0.0.1", "tcp://x;y")
    why = refusal(said, newcomer(said, SEEN), None)
    assert "it asks to be reached at 'tcp://x;y', which is not a host" in why
    many = [f"10.0.0.{i}" for i in range(7)]
    assert m.decode_from_peer(m.encode(hello("", *many)))
    with pytest.raises(m.ProtocolError):
        m.decode_from_peer(m.encode(hello("", *many, "10.0.0.99")))


def test_the_path_of_a_socket_is_as_long_as_a_system_allows() -> None:
    for length, fits in ((IPC_MAX, True), (IPC_MAX + 1, False)):
        said = hello("")
        info = msgspec.structs.replace(newcomer(said, SEEN), ipc="/" * length)
        assert (refusal(said, info, None) == "") == fits


def test_two_meet_at_any_host_of_the_one_that_waits() -> None:
    run = ManualRun(0)
    for number, more in ((1, {}), (2, {"outgoing": True}), (3, {"relay": 7000})):
        place = {"host": f"h{number}", "machine": f"m{number}", "others": (f"fd00::{number}",)}
        run.join(b"%d" % number, **place, **more)
    run.say(b"1", m.TopologyVote(1))
    run.say(b"1", m.RendezvousRequest(2, TOKEN, 4001, 8))
    come = run.last(b"2")
    assert isinstance(come, m.RendezvousJoin) and come.hosts == ("h1", "fd00::1")
    run.say(b"1", m.RendezvousRequest(2, TOKEN, 0, 8))
    come = run.last(b"2")
    assert isinstance(come, m.RendezvousJoin) and come.hosts == ("h3", "fd00::3")


def test_the_conclusion_from_all_dials_of_a_peer() -> None:
    assert concluded({SEEN: "refused"}) == "refused"
    assert concluded({SEEN: None}) is None
    assert concluded({SEEN: "refused", "10.0.0.1": ""}) == ""
    assert concluded({SEEN: None, "10.0.0.1": ""}) == ""
    both = concluded({SEEN: "refused", "10.0.0.1": None, "fd00::1": "no answer"})
    assert both == f"{SEEN}: refused; 10.0.0.1: it could not be tried; fd00::1: no answer"
    assert concluded({SEEN: "refused", "2606:4700::1111": None}) is None, "others may have IPv6"
    assert concluded({"a.name": None, "10.0.0.1": "refused"}) is None, "others may know the name"


def test_peers_behind_one_nat_may_reach_each_other_where_the_master_cannot() -> None:
    one, other = peer(SEEN, "10.0.0.1"), peer(SEEN, "10.0.0.2", machine="b")
    outside = peer("198.51.100.2", "10.0.0.3", machine="c")
    assert not matters(one, SEEN, [other])
    assert matters(one, SEEN, [other, outside])
    assert matters(one, SEEN, [peer(SEEN, machine="b")]), "which says nothing of that network"
    assert matters(peer(SEEN), SEEN, [other])


def test_the_error_of_peers_without_a_common_ip_version() -> None:
    four, six, both = peer("10.0.0.1"), peer("fd00::1", "fe80::1%eth0"), peer("10.0.0.1", "fd00::1")
    assert foreign(four, six) and foreign(six, four)
    for other in (four, both, peer("a.name"), peer("10.0.0.2", "a.name")):
        assert not foreign(four, other)
        assert not foreign(other, peer("fd00::1", "a.name"))
    for seen, told in ((four, "firewall"), (six, "one has IPv4 alone and the other IPv6 alone")):
        infos = {1: four, 2: seen}
        for guilty in infos:
            blame = Blame()
            blame.accuse(1, 2, 1, "refused")
            assert told in blame.sentence(Verdict(guilty, ((1, 2),)), infos.__getitem__)


def test_the_error_names_all_hosts() -> None:
    why = unreachable(peer(SEEN, "fd00::1"), "refused")
    assert f"{SEEN}:5000 or [fd00::1]:5000" in why
    assert "means another machine to each of them" in cure(peer("127.0.0.1", "::1"))
    assert "PCCL_PORT_RANGE" in cure(peer("127.0.0.1", "10.0.0.1"))
