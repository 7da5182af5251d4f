"""The table of docs/reference/errors.md: each situation with real processes, and its error.

Who, where, in which phase, after how long, and what to do: as far as there is such a thing.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from pages import listed
from peers.cluster import Cluster
from peers.processes import Answer, Master, Puppet, gathered
from peers.waiting import entered, reached, wait_until

import pccl
from pccl import operands
from pccl.cli.main import main
from pccl.protocol import messages as m
from pccl.protocol.master.history import OUTNUMBERED
from pccl.protocol.master.status import Phase
from pccl.protocol.rounds import HELD_MAX, OpenRounds, Vote
from pccl.runtime.encryption import new_keys

LARGE = 1 << 22  # elements: such a collective goes around the ring
PEER = r"peer \d+ \((you, )?[^ ]+, 127\.0\.0\.1:\d+\)"
SECONDS = r"\d+\.\d s after the call began"
POSIX = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")


@pytest.fixture
def stage() -> Iterator[Callable[..., list[Puppet]]]:
    """stage(address, groups) gives peer processes that are all accepted; they end with the test."""
    started: list[Puppet] = []

    def start(address: str, groups: list[int], **env: str) -> list[Puppet]:
        def one(group: int) -> Puppet:
            started.append(Puppet(address, group, **env))
            return started[-1]

        return gathered(one, groups)

    yield start
    for puppet in started:
        if puppet.process.returncode is None:
            puppet.kill()


@pytest.fixture
def lone() -> Iterator[Callable[..., Puppet]]:
    """lone(address) is a peer process that has not connected yet; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(address: str, **env: str) -> Puppet:
            puppet = Puppet(address, **env)
            stack.callback(puppet.kill)
            return puppet

        yield start


Stage = Callable[..., list[Puppet]]
Lone = Callable[..., Puppet]


def says(answer: Answer, error: str, result: str, *patterns: str) -> str:
    """Checks an error that a process reports; the remedy of its class must be in the text too."""
    assert (answer.get("error"), answer.get("result")) == (error, result), answer
    text = f"{error}: {answer['text']}"
    for pattern in (*patterns, re.escape(getattr(pccl, error).remedy)):
        assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"
    listed(text)
    return text


# ---- other peers ----


def in_the_middle(master: pccl.MasterNode, puppets: list[Puppet]) -> None:
    """All have entered a collective, and the last one stands still."""
    puppets[-1].call("launch", value=1.0, count=LARGE, tag=0)
    entered(master)
    os.kill(puppets[-1].process.pid, signal.SIGSTOP)
    for puppet in puppets[:-1]:
        puppet.begin("all_reduce", count=LARGE)
    reached(master, Phase.RUNNING)


@POSIX
def test_a_peer_is_killed(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0, 0])
        in_the_middle(master, puppets)
        puppets[2].kill()
        # who is told depends on who hears of it first, the master or a neighbor
        broke = rf"lost {PEER}: its connection broke, because its process ended or because nothing"
        lane = "a lane (was disconnected|could not be set up)"
        lost = rf"{broke}|{PEER} could not complete: its connection to {PEER}: {lane}"
        around = "while its data went around the ring"
        for puppet in puppets[:2]:
            says(puppet.end(), "PeerLostError", "RANK_CONNECTION_LOST", lost, around, SECONDS)


@POSIX
def test_a_peer_freezes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("PCCL_HEARTBEAT_MS", "200"), ("PCCL_HEARTBEAT_TIMEOUT_MS", "1000")):
        monkeypatch.setenv(name, text)
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0, 0])
        in_the_middle(master, puppets)
        lost = rf"lost {PEER}: .*because nothing was heard of it for 1 s"
        for puppet in puppets[:2]:
            says(puppet.end(), "PeerLostError", "RANK_CONNECTION_LOST", lost, SECONDS)
        os.kill(puppets[2].process.pid, signal.SIGCONT)
        puppets[2].call("wait")
        puppets[2].begin("update_topology")
        says(puppets[2].end(), "KickedError", "RANK_CONNECTION_FAILED", "it was given up as lost")


def test_all_others_are_gone(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        puppets[0].begin("all_reduce")
        entered(master)
        puppets[1].kill()
        alone = rf"this peer is alone in its group: {PEER}: its connection broke"
        entering = "while peers were still entering it"
        answer = puppets[0].end()
        says(answer, "PeerLostError", "RANK_CONNECTION_LOST", alone, entering, SECONDS)
        puppets[0].begin("all_reduce")
        where = f"alone in its group of the run at {re.escape(master.address)}"
        says(puppets[0].end(), "TooFewPeersError", "TOO_FEW_PEERS", where)


def test_other_work_and_other_calls(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        for puppet, dtype in zip(puppets, ("float32", "float64"), strict=True):
            puppet.begin("all_reduce", dtype=dtype)
        for puppet in puppets:
            called = (
                rf"{PEER} called all_reduce\(1000 elements of float{bits}, sum\) with tag 0"
                for bits in (32, 64)
            )
            says(puppet.end(), "MismatchError", "INVALID_ARGUMENT", *called, SECONDS)
        puppets[0].begin("update_topology")
        puppets[1].begin("all_reduce")
        for puppet in puppets:
            called = (rf"{PEER} called update_topology\(\)", rf"{PEER} called all_reduce\(")
            says(puppet.end(), "MismatchError", "INVALID_USAGE", *called, SECONDS)


def test_others_do_not_come_in_time(stage: Stage, lone: Lone) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        puppets[0].begin("update_topology", timeout=0.2)
        waited = rf"waited for {PEER} \(while peers were still entering it, {SECONDS}\)"
        says(puppets[0].end(), "PCCLTimeoutError", "TIMEOUT", waited)
        newcomer = lone(master.address)
        for limit_s in (1.5, 6, 24, 96):  # a busy machine may register it only after the first
            newcomer.begin("connect", timeout=limit_s)
            answer = newcomer.end()
            if "did not admit" in answer["text"]:
                break
        where = rf"the peers of the run at {re.escape(master.address)} did not admit .*within "
        todo = r"each of them must call update_topology\(\)"
        says(answer, "PCCLTimeoutError", "TIMEOUT", where, todo)


def test_one_has_no_time_for_an_optimization(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")  # or there would be nothing to measure
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        puppets[0].begin("optimize_topology")
        entered(master)
        puppets[1].begin("optimize_topology", timeout=0.05)  # to measure takes longer
        impatient = rf"optimize_topology: TIMEOUT: {PEER} waited no longer"
        for puppet in puppets:
            says(puppet.end(), "PCCLTimeoutError", "TIMEOUT", impatient)


def test_a_straggler_is_dropped(stage: Stage) -> None:
    slow = Master(PCCL_STRAGGLER_S="1")
    try:
        puppets = stage(slow.address, [0, 0, 0])
        for puppet in puppets[:2]:
            puppet.begin("all_reduce")
        waited = r"others waited for it in all_reduce\(.* with tag 0 for 1 s"
        assert [puppet.end() for puppet in puppets[:2]] == [{"value": 2.0}] * 2
        puppets[2].begin("update_topology")
        says(puppets[2].end(), "KickedError", "RANK_CONNECTION_FAILED", waited)
    finally:
        slow.kill()


def test_shared_state_of_another_form(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        for puppet, count in zip(puppets, (10, 11), strict=True):
            puppet.begin("sync", revision=0, value=1.0, count=count)
        assert puppets[0].value() == [0, 1.0]
        first = r"entry 0 \('x'\) has element count 10 there and 11 here"
        says(puppets[1].end(), "KickedError", "INVALID_ARGUMENT", first, SECONDS)


def test_shared_state_of_a_later_run_and_one_that_cannot_begin(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        for puppet in puppets:
            puppet.begin("sync", revision=0, value=1.0, min_peers=3, timeout=0.5)
        few = "the run has not begun after 0.5 s: min_peers is 3 "
        for puppet in puppets:
            says(puppet.end(), "PCCLTimeoutError", "TIMEOUT", few)
        for puppet in puppets:
            puppet.begin("sync", revision=0, value=1.0)
        assert [puppet.value() for puppet in puppets] == [[0, 1.0]] * 2
        for puppet, revision in zip(puppets, (1, 7), strict=True):
            puppet.begin("sync", revision=revision, value=1.0)
        assert puppets[0].value() == [1, 1.0]
        later = "this peer offers revision 7, and the others of its group are at 1"
        says(puppets[1].end(), "PCCLError", "INVALID_ARGUMENT", later, SECONDS)


def test_shared_state_that_lacks_an_entry(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0])
        for puppet, more in zip(puppets, ("ab", "b"), strict=True):
            puppet.begin("sync", revision=0, value=1.0, more=more)
        assert puppets[0].value() == [0, 1.0]
        first = r"entry 1 \('a'\) is missing here \(there are 3 entries there and 2 here\)"
        says(puppets[1].end(), "KickedError", "INVALID_ARGUMENT", first, SECONDS)


# ---- before anything happens ----


def test_calls_at_the_wrong_time(stage: Stage, lone: Lone) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        stranger = lone(master.address)
        stranger.begin("all_reduce")
        says(stranger.end(), "PCCLError", "INVALID_USAGE", r"call connect\(\) first")
        puppet = stage(master.address, [0, 0])[0]
        puppet.call("launch", value=1.0, count=10, tag=3)
        puppet.begin("update_topology")
        says(puppet.end(), "PCCLError", "PENDING_ASYNC_OPS", r"tags \[3\]")
        puppet.begin("launch", value=1.0, count=10, tag=3)
        says(puppet.end(), "PCCLError", "INVALID_ARGUMENT", "tag 3 is in use by a collective")


def test_two_threads_in_two_rounds() -> None:
    with Cluster(2) as cluster:
        comm, other = cluster.comms
        thread = threading.Thread(target=comm.update_topology)
        thread.start()
        entered(cluster.master)
        with pytest.raises(pccl.PCCLError, match=r"is in update_topology\(\)") as caught:
            comm.sync_shared_state(pccl.SharedState.from_tensors({"x": np.zeros(1)}))
        listed(f"PCCLError: {caught.value}")
        other.update_topology()
        thread.join()


# ---- the master ----


def test_nothing_answers(lone: Lone) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    puppet = lone(f"127.0.0.1:{port}")
    puppet.begin("connect", n_attempts=2)
    where = rf"no pccl master answers at 127\.0\.0\.1:{port} \(Connection refused\), 2 attempts in "
    says(puppet.end(), "MasterLostError", "MASTER_CONNECTION_FAILED", where + r"1\.\d s")
    puppet.begin("connect", timeout=0.2)
    where = rf"has answered at 127\.0\.0\.1:{port} within 0\.2 s \(Connection refused, 1 attempt\)"
    says(puppet.end(), "PCCLTimeoutError", "TIMEOUT", where)


def test_the_master_dies_and_does_not_come_back(stage: Stage) -> None:
    master = Master()
    try:
        puppets = stage(master.address, [0, 0], PCCL_MASTER_PATIENCE_S="1")
        puppets[0].begin("all_reduce")
        master.kill()
        where = rf"the connection to the master at {re.escape(master.address)} broke"
        gone = "it did not come back within 1 s"
        answer = puppets[0].end()
        says(answer, "MasterLostError", "MASTER_CONNECTION_FAILED", where, gone, SECONDS)
    finally:
        master.kill()


def test_the_master_is_stopped(stage: Stage) -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    puppets = stage(master.address, [0, 0])
    puppets[0].begin("all_reduce")
    entered(master)
    master.interrupt()
    says(puppets[0].end(), "MasterLostError", "MASTER_CONNECTION_FAILED", "was stopped", SECONDS)


def test_the_masters_port_is_taken() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        expected = f"on {master.address}: Address.*Try another port"
        with pytest.raises(pccl.PCCLError, match=expected) as caught:
            pccl.MasterNode(master.address).run()
        listed(f"PCCLError: {caught.value}")


# ---- who may come in ----


def test_another_version(lone: Lone) -> None:
    program = (
        "import sys, pccl\n"
        "from pccl.protocol import messages as m\n"
        "m.PROTOCOL_VERSION += 1\n"
        "pccl.Communicator(sys.argv[1]).connect()\n"
    )
    with pccl.MasterNode("127.0.0.1:0") as master:
        ended = subprocess.run(
            [sys.executable, "-c", program, master.address],
            capture_output=True,
            text=True,
            timeout=50,
        )
    text = ended.stderr.splitlines()[-1]
    ours, theirs = m.PROTOCOL_VERSION, m.PROTOCOL_VERSION + 1
    assert f"protocol version {theirs}, the master (pccl {pccl.__version__}) version {ours}" in text
    assert "install the same version of pccl" in text
    listed(text.removeprefix("pccl.errors."))


def test_a_key_that_is_not_allowed(lone: Lone, tmp_path: Path) -> None:
    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    for directory in (ours, foreign):
        assert main(["keys", str(directory)]) == 0
    (foreign / "master.key").write_bytes((ours / "master.key").read_bytes())
    key = re.escape(pccl.Security.from_dir(foreign).peer_keys().public)
    with pccl.MasterNode("127.0.0.1:0", security=ours) as master:
        puppet = lone(master.address, PCCL_CURVE_DIR=str(foreign))
        puppet.begin("connect", n_attempts=1)
        says(puppet.end(), "KickedError", "INVALID_USAGE", f"`allowed` does not have.*{key}")
        (foreign / "master.key").write_text(new_keys().public)
        puppet = lone(master.address, PCCL_CURVE_DIR=str(foreign))
        puppet.begin("connect", n_attempts=1)
        answer = puppet.end()
        where = re.escape(master.address)
        wrong = rf"{where} \(the handshake failed: .*master\.key is not its key"
        says(answer, "MasterLostError", "MASTER_CONNECTION_FAILED", wrong)
        puppet = lone(master.address)
        puppet.begin("connect", n_attempts=1)
        wanted = r"the master wants encryption \(pass security=, or set PCCL_CURVE_DIR\)"
        says(puppet.end(), "MasterLostError", "MASTER_CONNECTION_FAILED", wanted)


# ---- addresses and ports ----


class Translator:
    """A gateway: whoever connects to it by IPv4 is seen by the master at another address, of IPv6.

    So nothing that a peer listens at can be reached where the master sees the peer, as behind NAT.
    """

    def __init__(self, port: int) -> None:
        self._to = ("::1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def _serve(self) -> None:
        ways: dict[socket.socket, socket.socket] = {}
        while not self._stop.is_set():
            for source in select.select([self._server, *ways], [], [], 0.1)[0]:
                if source is self._server:
                    inside, outside = source.accept()[0], socket.create_connection(self._to)
                    ways[inside], ways[outside] = outside, inside
                elif source in ways:
                    self._carry(source, ways)
        for end in (self._server, *ways):
            end.close()

    @staticmethod
    def _carry(source: socket.socket, ways: dict[socket.socket, socket.socket]) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
        if data:
            with contextlib.suppress(OSError):  # the other end has gone: its turn comes
                ways[source].sendall(data)
        else:
            for end in (source, ways.pop(source)):
                ways.pop(end, None)
                end.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def gateway() -> Iterator[tuple[pccl.MasterNode, Translator]]:
    """A master, and a gateway to it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with pccl.MasterNode("[::]:0") as master:
        translator = Translator(int(master.address.rpartition(":")[2]))
        yield master, translator
        translator.close()


def test_a_newcomer_behind_nat(
    gateway: tuple[pccl.MasterNode, Translator], stage: Stage, lone: Lone
) -> None:
    master, translator = gateway
    direct = "127.0.0.1:" + master.address.rpartition(":")[2]
    puppets = stage(direct, [0], PCCL_TRANSPORT="tcp")
    newcomer = lone(translator.address, PCCL_TRANSPORT="tcp", PUPPET_IPV4="1")
    newcomer.begin("connect")
    where = r"it cannot be reached at \[::1\]:\d+, where the master has tried \(connection refused"
    says(newcomer.end(), "KickedError", "RANK_CONNECTION_FAILED", where, SECONDS, "PCCL_ADVERTISE")
    told = lone(translator.address, PCCL_TRANSPORT="tcp", PCCL_ADVERTISE="127.0.0.1")
    told.begin("connect")
    puppets[0].call("gather", size=2)
    assert told.value() is None
    for puppet in (puppets[0], told):
        puppet.begin("all_reduce", count=LARGE)
    assert [puppet.value() for puppet in (puppets[0], told)] == [2.0, 2.0]


def test_a_newcomer_that_its_neighbor_cannot_reach(stage: Stage, lone: Lone) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0], PCCL_INLINE_BYTES="0")
        for puppet in puppets:
            puppet.begin("all_reduce")
        assert [puppet.value() for puppet in puppets] == [2.0, 2.0]
        env = {"PCCL_ADVERTISE": "240.0.0.1", "PCCL_TRANSPORT": "tcp", "PCCL_INLINE_BYTES": "0"}
        newcomer = lone(master.address, **env)
        newcomer.begin("connect")
        for puppet in puppets:
            puppet.begin("gather", size=3)
        assert [puppet.value() for puppet in (*puppets, newcomer)] == [None] * 3
        for puppet in (*puppets, newcomer):
            puppet.begin("insist", value=1.0)
        where = rf"{PEER} could not reach peer 3 \(you, [^ ]+, 240\.0\.0\.1:\d+\)"
        says(newcomer.end(), "KickedError", "RANK_CONNECTION_FAILED", where, SECONDS)
        assert [puppet.value() for puppet in puppets] == [2.0, 2.0]


def test_a_newcomer_that_reaches_no_peer(stage: Stage, lone: Lone) -> None:
    env = {"PCCL_INLINE_BYTES": "0", "PCCL_TRANSPORT": "tcp"}
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0], **env)
        caged = lone(master.address, **env, PUPPET_CAGED="1")
        caged.begin("connect")
        for puppet in puppets:
            puppet.begin("gather", size=3)
        assert [puppet.value() for puppet in (*puppets, caged)] == [None] * 3
        for puppet in (*puppets, caged):
            puppet.begin("insist", value=1.0)
        told = rf"peer 3 \(you, .*\) could not reach {PEER} \(.*, whom the master reaches"
        says(caged.end(), "KickedError", "RANK_CONNECTION_FAILED", told)
        assert [puppet.value() for puppet in puppets] == [2.0, 2.0]


@POSIX
def test_the_time_of_one_is_over(stage: Stage) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        puppets = stage(master.address, [0, 0, 0])
        puppets[2].call("launch", value=1.0, count=LARGE, tag=0)
        entered(master)
        os.kill(puppets[2].process.pid, signal.SIGSTOP)
        puppets[1].begin("all_reduce", count=LARGE)
        puppets[0].begin("all_reduce", count=LARGE, timeout=1.0)
        running = (Phase.RUNNING, 1)  # peers
        wait_until(lambda: [(w.phase, w.missing_count) for w in master.status().waits] == [running])
        os.kill(puppets[2].process.pid, signal.SIGCONT)
        words = rf"peer 1 \([^ ]+, 127\.0\.0\.1:\d+\) could not complete: .*, {SECONDS}"
        says(puppets[1].end(), "PCCLTimeoutError", "TIMEOUT", words)
        says(puppets[0].end(), "PCCLTimeoutError", "TIMEOUT", SECONDS)


def test_errors_that_are_hard_to_provoke_are_listed_too() -> None:
    lost = "all_reduce: RANK_CONNECTION_LOST: peer 3 (10.0.0.1:1) could not complete"
    listed(f"PCCLError: {lost}: it ran out of memory: no memory for a message")
    rounds = OpenRounds()
    why = rounds.too_much(1, Vote(1, None, held=HELD_MAX + 1), 0)
    listed(f"PCCLError: all_reduce: INVALID_USAGE: {why}")
    refused = f"the master refused: {OUTNUMBERED.why}"
    listed(f"MasterLostError: all_reduce: MASTER_CONNECTION_FAILED: {refused}")
    many = {f"{i:0256}": array for i, array in enumerate(np.zeros((m.PARTS_MAX, 1)))}
    with pytest.raises(ValueError, match="Use shorter keys") as raised:
        operands.all_reduce(many, None, "sum")
    listed(f"ValueError: {raised.value}")


def test_no_port_is_free(lone: Lone) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        puppet = lone(master.address, PCCL_PORT_RANGE=f"{port}-{port}")
        puppet.begin("connect")
        none = f"the ports {port} to {port}: none is free: choose a wider PCCL_PORT_RANGE"
        says(puppet.end(), "PCCLError", "INVALID_USAGE", none)


def test_something_else_listens_at_the_masters_port(lone: Lone) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.linger = 0
        port = other.bind_to_random_port("tcp://127.0.0.1")
        puppet = lone(f"127.0.0.1:{port}")
        puppet.begin("connect", n_attempts=1)
        # libzmq tells one or the other: its handshake stops at the wrong type of socket
        closed = "it closed the connection without an answer"
        refused = r"the handshake failed: .*, or it is not a pccl master"
        says(
            puppet.end(),
            "MasterLostError",
            "MASTER_CONNECTION_FAILED",
            f"{closed}|{refused}",
        )
