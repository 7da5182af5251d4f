"""A master that does not run for a while: a stopped process, a machine that was asleep."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from peers.cluster import client_of, gather, in_threads
from peers.processes import Master, Puppet, gathered, together
from peers.waiting import machine_of, wait_until

import pccl
from pccl import extension
from pccl.protocol.master import inputs, restart
from pccl.protocol.master.restart import WAIT_S
from pccl.runtime.config import Config
from pccl.runtime.server import server as server_module
from pccl.runtime.server.pauses import Pauses
from pccl.runtime.server.server import Server

BEATS = {"PCCL_HEARTBEAT_MS": "200", "PCCL_HEARTBEAT_TIMEOUT_MS": "1000"}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_are_distinguished_from_waits(caplog: pytest.LogCaptureFixture) -> None:
    pauses = Pauses(4.0, running := Clock(), elapsed := Clock())

    def after(running_s: float, elapsed_s: float, waited_s: float) -> tuple[float, str]:
        """The seconds that a check adds to `total_s`, and those that it logs."""
        caplog.clear()
        running.now_s += running_s
        elapsed.now_s += elapsed_s
        before_s = pauses.total_s
        pauses.check(waited_s)
        seconds = [f"{record.args[0]:.1f}" for record in caplog.records]  # type: ignore[index]
        return pauses.total_s - before_s, "".join(seconds)

    assert after(10.0, 10.0, 10.0) == (0.0, "")
    assert after(2.0, 2.0, 0.0) == (0.0, ""), "up to the limit"
    assert after(2.5, 2.5, 0.0) == (2.5, "2.5"), "stopped"
    assert after(1.0, 15.0, 0.5) == (0.5, "14.5"), "asleep: only part of it counted as waiting"
    assert after(0.0, 3600.0, 1.0) == (0.0, "3599.0")
    assert after(1.0, 1.0, 1.0) == (0.0, "")
    real = Pauses(60.0)
    real.check()
    assert real.total_s == 0.0


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_delays_nothing(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the master and at the peers of one run: a loss and an admission take no longer."""
    wall = time.time
    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as opened:
        comms = [pccl.Communicator(master.address) for _ in range(3)]
        for one in comms:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 3) for one in comms])
        assert master._server is not None
        server = master._server
        monkeypatch.setattr(time, "time", lambda: wall() + step_s)
        began_s = server._awake_s()
        wait_until(lambda: server._awake_s() > began_s + 0.2)
        assert server._pauses.total_s == 0.0
        monkeypatch.setattr(restart, "WAIT_S", 0.5)
        server._faltered = "a test"  # as after a restart: it waits for peers, one never comes
        client_of(comms[2])._resolver.find = lambda *_: None
        server._waiter.wake()
        wait_until(lambda: not server._faltered and not server._master.recovering)
        in_threads([one.update_topology for one in comms[:2]])
        assert [one.world_size for one in comms[:2]] in ([2, 2], [3, 3])


def test_sleep_of_the_machine_freezes_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that measures graces stands still while the machine sleeps."""
    running, elapsed, ticks = Clock(), Clock(), list[inputs.Tick]()
    server = Server("127.0.0.1", 0, Config())
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=running))
    monkeypatch.setattr(server, "_feed", lambda event: ticks.append(event) or [])
    server._pauses = Pauses(1.0, running, elapsed)
    with contextlib.closing(server):
        for slept_s in (0.0, 3600.0, 0.0, 0.0):
            running.now_s += 0.1
            elapsed.now_s += 0.1 + slept_s
            server._do_chores(True)
    begin_s = ticks[0].now_s
    after_s = [tick.now_s - begin_s for tick in ticks]
    assert after_s == pytest.approx([0.0, 0.0, 0.1, 0.2]), "the wake-up itself is a pause"
    assert server._pauses.woke_lately


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
@pytest.mark.parametrize(
    ("journaled", "busy"),
    [
        pytest.param(True, True, marks=pytest.mark.slow),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_master_resumes_with_all_its_peers(
    journaled: bool, busy: bool, tmp_path: Path
) -> None:
    options = ["--state", str(tmp_path / "master.db")] if journaled else []
    master = Master(*options, **BEATS)
    puppets: list[Puppet] = []

    def start(group: int) -> Puppet:
        puppets.append(Puppet(master.address, group, **BEATS))
        return puppets[-1]

    try:
        gathered(start, [0, 0, 0])
        assert together(puppets, "insist", value=1.0) == [3.0] * 3
        if busy:  # one of them waits for the others when it happens
            puppets[0].begin("insist", value=2.0)
        master.process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2.5)  # all connections break
        master.process.send_signal(signal.SIGCONT)
        thawed_s = time.monotonic()
        for puppet in puppets[busy:]:
            puppet.begin("insist", value=2.0)
        assert [puppet.value() for puppet in puppets] == [6.0] * 3
        print(f"the run went on {time.monotonic() - thawed_s:.2f} s after the thaw")
        assert together(puppets, "world") == [[3, 3, 1, 3]] * 3
        if journaled:  # and it may be killed then
            master.kill()
            master.start()
            assert together(puppets, "insist", value=1.0) == [3.0] * 3
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
        for puppet in puppets:
            puppet.kill()
        master.kill()


def test_a_connection_that_cannot_be_closed_yet_is_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master that goes on as after a restart does not count the time until then."""
    monkeypatch.setattr(restart, "WAIT_S", 0.3)
    tried = threading.Semaphore(0)

    def refuses(*_: object) -> bool:
        tried.release()
        raise OSError(errno.EMFILE, "no descriptors")

    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as opened:
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        for one in comms:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 2) for one in comms])
        server = master._server
        assert server is not None
        with monkeypatch.context() as patch:
            patch.setattr(server._connections._shutter, "shut", refuses)
            server._faltered = "a test"  # as after a restart
            server._waiter.wake()
            for _ in range(12):  # two connections, 0.1 s apart: longer than WAIT_S
                assert tried.acquire(timeout=20)
        wait_until(lambda: not server._master.recovering)
        in_threads([one.update_topology for one in comms])
        assert [one.world_size for one in comms] == [2, 2]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits another process")
def test_a_master_that_wakes_without_descriptors_loses_no_peer() -> None:
    """It goes on as after a restart when a peer dies then, and cannot accept those who return."""
    import resource

    master, puppets = Master(**BEATS), list[Puppet]()
    pid = master.process.pid
    try:
        puppets += gathered(lambda group: Puppet(master.address, group, **BEATS), [0, 0, 0])
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        master.process.send_signal(signal.SIGSTOP)
        threading.Event().wait(0.7)  # a pause, in which no connection breaks
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (2, hard))
        master.process.send_signal(signal.SIGCONT)
        puppets.pop().kill()
        for puppet in puppets:
            puppet.begin("insist", value=2.0)
        threading.Event().wait(WAIT_S + 1.0)  # longer than a restarted master waits for peers
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert [puppet.value() for puppet in puppets] == [4.0] * 2
        assert together(puppets, "world") == [[2, 2, 1, 2]] * 2
    finally:
        os.kill(pid, signal.SIGCONT)
        for puppet in puppets:
            puppet.kill()
        master.kill()


def test_a_pause_before_the_chores_makes_no_peer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause comes after the loop has checked its wait, for example in a message."""
    clock, ticks = Clock(), list[inputs.Tick]()
    server = Server("127.0.0.1", 0, Config())
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(server, "_feed", lambda event: ticks.append(event) or [])
    server._pauses = Pauses(1.0, clock, clock)
    with contextlib.closing(server):
        for seconds in (0.0, 0.1, 100.0, 0.2):
            clock.now_s += seconds
            server._do_chores(True)
    begin_s = ticks[0].now_s
    assert [tick.now_s - begin_s for tick in ticks] == pytest.approx([0.0, 0.1, 0.1, 0.3])


class Nap:
    """Pauses of a server at one place of its loop. Connections break and peers come back meanwhile.

    Args:
        server: from now on, a clock that is set by hand tells it its pauses.
        moment: the method of the server that begins with a pause.
    """

    def __init__(self, server: Server, moment: str) -> None:
        self._server = server
        self._clock = Clock()
        self._pauses: list[list[int]] = []
        self._broken: set[bytes] = set()  # connections
        server._pauses = Pauses(server._timeout_s, self._clock, self._clock)
        original = getattr(server, moment)

        def interrupted(*args: object) -> object:
            if self._pauses and all(map(self._conn, self._pauses[0])):
                self._sleep(self._pauses.pop(0))
            return original(*args)

        setattr(server, moment, interrupted)

    def plan(self, *pauses: list[int]) -> None:
        """Plans a pause for each set of peers whose connections break then, once all are there."""
        self._pauses = [*pauses]
        self._server._waiter.wake()

    def over(self, peers: list[int]) -> bool:
        """True if all pauses are over, and these peers are back."""
        return not self._pauses and all(self._conn(n) not in (None, *self._broken) for n in peers)

    def _conn(self, peer: int) -> bytes | None:
        """The connection of a peer or, after the first pause, of one that has come back."""
        master = self._server._master
        if not self._broken:
            return master.peers[peer].conn
        back = master._recovery.back if master._recovery else {}
        return back[peer].conn if peer in back else None

    def _sleep(self, peers: list[int]) -> None:
        began_s = time.monotonic()
        conns = [conn for conn in map(self._conn, peers) if conn is not None]
        assert len(conns) == len(peers)
        self._broken.update(conns)
        for conn in conns:
            line = self._server._connections.senders[conn]
            with socket.socket(fileno=os.dup(line.descriptor)) as one:
                one.shutdown(socket.SHUT_RDWR)
        assert self._server._router.poll(20_000), "nobody came back"
        self._clock.now_s += max(self._server._timeout_s, time.monotonic() - began_s)


@pytest.mark.skipif(sys.platform == "win32", reason="no dup of a socket there")
@pytest.mark.parametrize(
    "moment",
    [
        "_read_router",
        "_handle_losses",
        pytest.param("_converse", marks=pytest.mark.slow),
        pytest.param("_flush", marks=pytest.mark.slow),
        pytest.param("_do_chores", marks=pytest.mark.slow),
    ],
)
def test_a_pause_at_any_moment_costs_no_peer(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pause comes while the master waits for the third peer, which never comes back."""
    monkeypatch.setattr(restart, "WAIT_S", 60.0)
    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as opened:
        *comms, gone = [pccl.Communicator(master.address) for _ in range(3)]
        for one in [*comms, gone]:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 3) for one in [*comms, gone]])
        numbers = sorted(extension.member(one).number for one in comms)
        client_of(gone)._resolver.find = lambda *_: None
        assert master._server is not None
        nap = Nap(master._server, moment)
        nap.plan([numbers[0], extension.member(gone).number], [numbers[0]])
        wait_until(lambda: nap.over(numbers))
        monkeypatch.setattr(restart, "WAIT_S", float("-inf"))
        wait_until(lambda: not machine_of(master).recovering)
        assert [peer.peer for peer in master.status().peers] == numbers
        in_threads([one.update_topology for one in comms])
        assert [one.world_size for one in comms] == [2, 2]
