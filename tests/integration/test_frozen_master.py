"""A master that does not run for a while: a stopped process, a machine that was asleep."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from peers.cluster import gather, in_threads
from peers.processes import Master, Puppet, gathered, stop, together
from peers.strangers import Proxy, serving, speaker
from peers.waiting import wait_until

import pccl
from pccl import extension
from pccl.protocol import master as protocol
from pccl.protocol.master import inputs, restart
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.restart import WAIT_S
from pccl.runtime.config import Config
from pccl.runtime.server.connections import Connections
from pccl.runtime.server.server import Pauses, Server
from pccl.runtime.sockets import RouterMail, Waiter
from pccl.runtime.tcp import Shutter

BEATS = {"PCCL_HEARTBEAT_MS": "200", "PCCL_HEARTBEAT_TIMEOUT_MS": "1000"}


SLEEPS = pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock of sleep there")


class Sleeper:
    """This machine, whose sleep one of its clocks counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._slept_s, real = 0.0, time.clock_gettime

        def read(clock: int) -> float:
            return real(clock) + (self._slept_s if clock == time.CLOCK_BOOTTIME else 0.0)

        monkeypatch.setattr(time, "clock_gettime", read)

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds


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
    step_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the master and at the peers of one run: a loss and an admission take no longer."""
    wall, journal = time.time, tmp_path / "master.db"
    with pccl.MasterNode("127.0.0.1:0", state=journal) as master, contextlib.ExitStack() as opened:
        proxy = opened.enter_context(Proxy(master.address))
        comms = [pccl.Communicator(at) for at in (master.address, master.address, proxy.address)]
        for one in comms:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 3) for one in comms])
        monkeypatch.setattr(restart, "WAIT_S", 1.0)
        proxy.refuse()  # the third peer does not come back
        master.interrupt()
        again = opened.enter_context(pccl.MasterNode(master.address, state=journal))
        wait_until(lambda: len(again.status().awaited) == 1)
        monkeypatch.setattr(time, "time", lambda: wall() + step_s)
        in_threads([one.update_topology for one in comms[:2]])
        assert [one.world_size for one in comms[:2]] == [2, 2]
    assert "did not run" not in caplog.text


class Ticks:
    """How far a master's clock, which does not count pauses, is behind, at each tick.

    Args:
        pause_s: it pauses for this time while it handles the first message after `armed` is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0) -> None:
        self.behind_s: list[float] = []
        self.armed = threading.Event()
        self.paused: int | None = None  # the number of ticks before the pause
        feed = protocol.Master.feed

        def noted(machine: protocol.Master, event: inputs.Event) -> list[Effect]:
            if isinstance(event, inputs.Tick):
                self.behind_s.append(time.monotonic() - event.now_s)
            elif self.armed.is_set() and self.paused is None:
                threading.Event().wait(pause_s)
                self.paused = len(self.behind_s)
            return feed(machine, event)

        monkeypatch.setattr(protocol.Master, "feed", noted)

    def next(self) -> float:
        """The value at a tick that begins from now on."""
        seen = len(self.behind_s)
        wait_until(lambda: len(self.behind_s) > seen + 1)
        return self.behind_s[seen + 1]


@SLEEPS
def test_sleep_of_the_machine_freezes_no_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock that measures graces stands still while the machine sleeps."""
    sleeper, ticks = Sleeper(monkeypatch), Ticks(monkeypatch)
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address):
        before_s = ticks.next()
        sleeper.sleep(3600.0)
        assert abs(ticks.next() - before_s) < 1000
        assert "it did not run for 3600." in caplog.text


def test_a_pause_in_a_message_makes_no_peer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the loop has checked its wait, and before the next tick."""
    ticks = Ticks(monkeypatch, pause_s=0.4)
    server = Server("127.0.0.1", 0, Config(heartbeat_ms=100, heartbeat_timeout_ms=500))
    with serving(server), speaker(zmq.DEALER, server.port) as stranger:
        ticks.next()
        before_s = min(ticks.behind_s)
        ticks.armed.set()
        stranger.send(b"a connection's first message comes with the chores")
        wait_until(lambda: ticks.paused is not None and len(ticks.behind_s) > ticks.paused)
        assert ticks.behind_s[ticks.paused or 0] - before_s > 0.35


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
        stop(master.process)
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
    tried, feed, failures = threading.Semaphore(0), protocol.Master.feed, iter([True])

    def refuses(*_: object) -> bool:
        tried.release()
        raise OSError(errno.EMFILE, "no descriptors")

    def fails_once(machine: protocol.Master, event: inputs.Event) -> list[Effect]:
        todo = feed(machine, event)
        if isinstance(event, inputs.Received) and next(failures, False):
            raise MemoryError  # it goes on as after a restart
        return todo

    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as opened:
        comms = [pccl.Communicator(master.address) for _ in range(2)]
        for one in comms:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 2) for one in comms])
        with monkeypatch.context() as patch:
            patch.setattr(Shutter, "shut", refuses)
            patch.setattr(protocol.Master, "feed", fails_once)
            call = threading.Thread(target=comms[0].update_topology)
            call.start()
            for _ in range(12):  # two connections, 0.1 s apart: longer than WAIT_S
                assert tried.acquire(timeout=20)
        in_threads([call.join, comms[1].update_topology])
        assert not master.status().recovering
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
        stop(master.process)
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


class Nap:
    """The machine sleeps while a master is at one place of its loop. Connections break, and peers
    come back, meanwhile.

    Args:
        proxies: the ways of all peers to the master, by their numbers.
        place: a function that the master's loop calls.
        after: the nap comes after such a call, not before it.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        proxies: dict[int, Proxy],
        place: tuple[type, str],
        after: bool,
    ) -> None:
        self._sleeper = Sleeper(monkeypatch)
        self._proxies = proxies
        self._naps: list[list[int]] = []
        self._here = {*proxies}  # the peers whose connections a master knows
        call, feed = getattr(*place), protocol.Master.feed

        def interrupted(*args: Any) -> Any:
            if not after:
                self._nap()
            result = call(*args)
            if after:
                self._nap()
            return result

        def noted(machine: protocol.Master, event: inputs.Event) -> list[Effect]:
            todo = feed(machine, event)
            if isinstance(event, inputs.Resume):
                self._here.add(event.message.info.peer)
            return todo

        monkeypatch.setattr(protocol.Master, "feed", noted)
        monkeypatch.setattr(*place, interrupted)

    def plan(self, *naps: list[int]) -> None:
        """Plans a nap for each set of peers whose connections break then, once all are there."""
        self._naps = [*naps]

    def over(self, peers: list[int]) -> bool:
        """True if all naps are over, and the master has heard of these peers since."""
        return not self._naps and self._here.issuperset(peers)

    def _nap(self) -> None:
        if not self._naps or not self._here.issuperset(self._naps[0]):
            return
        if threading.current_thread().name != "pccl-master":
            return
        lost = self._naps.pop(0)
        self._here.difference_update(lost)
        for peer in lost:
            self._proxies[peer].cut()
        wait_until(self._proxies[lost[0]].is_back)
        self._sleeper.sleep(100.0)


@SLEEPS
@pytest.mark.parametrize(
    ("place", "after"),
    [
        ((RouterMail, "take"), False),
        ((Connections, "take_lost"), False),
        pytest.param((RouterMail, "take"), True, marks=pytest.mark.slow),
        pytest.param((Waiter, "wait"), True, marks=pytest.mark.slow),
    ],
)
def test_a_pause_at_any_moment_costs_no_peer(
    place: tuple[type, str], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pause comes while the master waits for the third peer, which never comes back."""
    monkeypatch.setattr(restart, "WAIT_S", 60.0)
    with pccl.MasterNode("127.0.0.1:0") as master, contextlib.ExitStack() as opened:
        proxies = [opened.enter_context(Proxy(master.address)) for _ in range(3)]
        comms = [pccl.Communicator(proxy.address) for proxy in proxies]
        for one in comms:
            opened.callback(one.close)
        in_threads([lambda one=one: gather(one, 3) for one in comms])
        numbers = [extension.member(one).number for one in comms]
        *stay, gone = numbers
        nap = Nap(monkeypatch, dict(zip(numbers, proxies, strict=True)), place, after)
        proxies[2].refuse()
        nap.plan([stay[0], gone], [stay[0]])
        wait_until(lambda: nap.over(stay) and master.status().awaited == (gone,))
        monkeypatch.setattr(restart, "WAIT_S", float("-inf"))
        wait_until(lambda: not master.status().recovering)
        assert [peer.peer for peer in master.status().peers] == sorted(stay)
        in_threads([one.update_topology for one in comms[:2]])
        assert [one.world_size for one in comms[:2]] == [2, 2]
