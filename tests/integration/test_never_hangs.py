"""Where other libraries hang or give wrong results, with real processes.

More of the same: master killed and restarted (test_master_restart.py), peers that are killed all
the time and buffers that are restored (test_failure.py), forty tags in opposite orders
(test_all_reduce.py), malformed bytes (test_master.py, test_hostile_sockets.py), the same revision
twice (test_shared_state.py), a peer that dies before its vote (test_programs.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from peers.processes import Puppet, Start, gathered, together

import pccl

# ---- peers that do not do the same ----

CALLS: dict[str, dict[str, object]] = {
    "all_reduce": {},
    "all_reduce with tag 1": {"tag": 1},
    "update_topology": {},
    "are_peers_pending": {},
    "optimize_topology": {},
    "sync_shared_state": {"revision": 0, "value": 1.0},
}


def calls(puppet: Puppet, name: str) -> None:
    puppet.begin({"sync_shared_state": "sync"}.get(name, name.partition(" ")[0]), **CALLS[name])


@pytest.mark.parametrize(
    "pair", [(a, b) for i, a in enumerate(CALLS) for b in list(CALLS)[i + 1 :]], ids="-".join
)
def test_peers_in_different_calls(puppets: list[Puppet], pair: tuple[str, str]) -> None:
    for puppet, name in zip(puppets, pair, strict=True):
        calls(puppet, name)
    for answer in [puppet.end() for puppet in puppets]:
        assert (answer["error"], answer["result"]) == ("MismatchError", "INVALID_USAGE")
        for name in pair:
            assert name.partition(" ")[0] in answer["text"]
    assert together(puppets, "all_reduce") == [2.0, 2.0]


@pytest.fixture(scope="module")
def puppets() -> Iterator[list[Puppet]]:
    """Two peers that stay, so that every mistake must leave the run usable."""
    with pccl.MasterNode("127.0.0.1:0") as node:
        both: list[Puppet] = []
        try:
            yield gathered(lambda _: both.append(Puppet(node.address)) or both[-1], [0, 0])
        finally:
            for puppet in both:
                puppet.kill()


@pytest.mark.parametrize(
    "other",
    [{"count": 999}, {"dtype": "float64"}, {"op": "MAX"}],
    ids=["count", "dtype", "op"],
)
def test_the_same_tag_with_other_work(puppets: list[Puppet], other: dict[str, object]) -> None:
    puppets[0].begin("all_reduce")
    puppets[1].begin("all_reduce", **other)
    for answer in [puppet.end() for puppet in puppets]:
        assert (answer["error"], answer["result"]) == ("MismatchError", "INVALID_ARGUMENT")
        assert answer["text"].count("called all_reduce(") == 2
    assert together(puppets, "all_reduce") == [2.0, 2.0]


# ---- losses ----


LARGE = 1 << 22  # elements: each array is a collective of its own


def test_retry_after_a_loss_with_one_in_flight(start: Start) -> None:
    puppets = gathered(start, [0, 0, 0])
    for i, puppet in enumerate(puppets[:2]):
        puppet.begin("retry", value=2.0**i, count=LARGE, tags=4, max_in_flight=1)
    puppets[2].call("launch", value=4.0, count=LARGE, tag=0)
    puppets[2].kill()
    sums = [puppet.value() for puppet in puppets[:2]]
    assert sums[0] == sums[1]
    assert sums[0][0] in (3.0, 7.0) and sums[0][1:] == [3.0] * 3


def test_several_groups_and_one_peer_lost_in_a_reduce(start: Start) -> None:
    puppets = gathered(start, [0, 0, 0, 7, 7])
    lost, survivors, others = puppets[2], puppets[:2], puppets[3:]
    for puppet in survivors:
        puppet.begin("insist", value=1.0)
    assert together(others, "all_reduce") == [2.0, 2.0]  # the other group does not wait
    lost.kill()
    assert [puppet.value() for puppet in survivors] == [2.0, 2.0]
    assert together(others, "all_reduce") == [2.0, 2.0]
    assert together(survivors + others, "are_peers_pending") == [False] * 4
    assert survivors[0].call("world") == [4, 2, 2, 2]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
def test_a_frozen_peer(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    for name, text in (("PCCL_HEARTBEAT_MS", "200"), ("PCCL_HEARTBEAT_TIMEOUT_MS", "1000")):
        monkeypatch.setenv(name, text)
    with pccl.MasterNode("127.0.0.1:0") as node:
        every = [Puppet(node.address) for _ in range(3)]
        try:
            three = iter(every)
            gathered(lambda _: next(three), [0, 0, 0])
            os.kill(every[2].process.pid, signal.SIGSTOP)
            assert together(every[:2], "insist", value=1.0) == [2.0, 2.0]
            os.kill(every[2].process.pid, signal.SIGCONT)
            every[2].begin("insist", value=4.0)
            answer = every[2].end()
            assert answer["error"] == "KickedError", answer
            assert "it was given up as lost" in answer["text"]
            assert together(every[:2], "all_reduce") == [2.0, 2.0]
        finally:
            for puppet in every:
                puppet.kill()


def test_kicked_and_master_gone_are_different_errors(
    master: pccl.MasterNode, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppets = gathered(start, [0, 0])
    puppets[0].begin("sync", revision=0, value=1.0)
    puppets[1].begin("sync", revision=0, value=1.0, count=11)
    assert puppets[0].value() == [0, 1.0]
    assert puppets[1].end()["error"] == "KickedError"
    puppets[1].begin("update_topology")
    assert puppets[1].end()["error"] == "KickedError"
    master.interrupt()
    puppets[0].begin("update_topology")
    answer = puppets[0].end()
    assert (answer["error"], answer["result"]) == ("MasterLostError", "MASTER_CONNECTION_FAILED")


# ---- shared state and sizes ----


def test_the_last_holder_is_gone_and_a_run_begins_again_at_0(start: Start) -> None:
    puppets = gathered(start, [0, 0])
    assert together(puppets, "sync", revision=5, value=2.0) == [[5, 2.0]] * 2
    together(puppets, "close")
    fresh = gathered(start, [0, 0])
    assert together(fresh, "sync", revision=0, value=3.0) == [[0, 3.0]] * 2


def test_the_world_size_counts_accepted_peers_and_is_fresh(start: Start) -> None:
    puppets = gathered(start, [0, 0])
    newcomer = start(1)
    newcomer.begin("connect")
    while not all(together(puppets, "are_peers_pending")):
        pass
    assert [puppet.call("world") for puppet in puppets] == [[2, 2, 1, 2]] * 2
    together(puppets, "update_topology")
    newcomer.value()
    assert [puppet.call("world") for puppet in puppets] == [[3, 2, 2, 2]] * 2
    assert newcomer.call("world") == [3, 1, 2, 2]
    puppets[1].kill()
    puppets[0].begin("sync", revision=0, value=1.0)
    puppets[0].value()
    assert puppets[0].call("world") == [2, 1, 2, 1]


# ---- many at once ----


def test_more_collectives_than_lanes_of_a_small_pool(start: Start) -> None:
    puppets = gathered(start, [0, 0], pool_size=1)
    for tag in range(24):
        together(puppets, "launch", value=1.0, count=50_000, tag=tag)
    assert together(puppets, "wait") == [[2.0] * 24] * 2


def test_blocking_reduces_from_several_threads_that_reuse_their_tags(start: Start) -> None:
    puppets = gathered(start, [0, 0, 0], pool_size=1)
    ends = together(puppets, "threads", value=1.0, count=5000, threads=6, rounds=8)
    assert ends == [3.0 * 6 * 8] * 3
