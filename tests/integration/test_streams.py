"""Every stream connects or is abandoned with a reason; internal errors end the membership."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace
from pages import listed
from peers.cluster import Cluster, client_of, in_threads
from peers.processes import Master
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.ext import lib
from pccl.protocol import messages as m
from pccl.runtime import limits, resolve
from pccl.runtime.client import control, streams
from pccl.runtime.client import engine as engine_module
from pccl.runtime.client.connection import Dealer
from pccl.runtime.client.engine import (
    ANOTHER,
    FAILED,
    REFUSED,
    STARVED,
    STREAM_LOST,
    UNREACHABLE,
    Event,
)
from pccl.runtime.client.streams import Refused, Streams
from pccl.runtime.config import Config, machine_id
from pccl.runtime.resolve import Found, Resolver
from pccl.runtime.sockets import Waiter
from pccl.support import parse_address

COUNT = 100_000  # elements: too many to travel with the votes
LIMIT_S = 0.2
NAME = m.PeerInfo(7, 0, "peer.example", 1234, "", "elsewhere")
NUMBER = m.PeerInfo(8, 0, "10.0.0.8", 1234, "", "elsewhere")
HERE = m.PeerInfo(9, 0, "10.0.0.9", 1234, "/nowhere/e", "here")


class Names:
    """In place of getaddrinfo: what it says of a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.failures = 0  # so many look-ups fail
        self.answer = threading.Event()
        self.answer.set()
        self.addresses = ["127.0.0.1"]
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, *arguments: Any, **named: Any) -> list[Any]:
        if not str(host).endswith(".example"):
            return self._real(host, *arguments, **named)
        self.asked.append(host)
        self.answer.wait(20)
        if self.failures:
            self.failures -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        kinds = [(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in self.addresses]
        return [(kind, socket.SOCK_STREAM, 6, "", (address, 0)) for kind, address in kinds]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch)
    yield names
    names.answer.set()


class FakeEngine:
    """Notes the orders."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.lanes: list[tuple[int, int]] = []  # of each stream, with its shares

    def open_stream(self, number: int) -> None:
        self.told.append(("open", number))

    def connect_stream(
        self, number: int, endpoint: str, *, lanes: int, shares: int, **_: object
    ) -> None:
        self.told.append(("connect", number, endpoint))
        self.lanes.append((lanes, shares))

    def close_stream(self, number: int) -> None:
        self.told.append(("close", number))

    def lose_stream(self, number: int, why: str) -> None:
        self.told.append(("lose", number, why))


class FakeRendezvous:
    """Notes who is asked to come to this peer; without a port of its own, the master says where."""

    def __init__(self) -> None:
        self.asked: list[m.PeerInfo] = []
        self.port = 0
        self.visited: set[tuple[str, int]] = set()

    def ask(self, to: m.PeerInfo, lanes: int) -> tuple[str, str]:
        self.asked.append(to)
        return "ab" * 16, f"127.0.0.1:{self.port}" if self.port else ""


class StreamsHarness:
    """Streams over an engine that only notes, and the commands that wait for their thread."""

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        shortage: Callable[[], str] = streams.shortage,
        lanes: int = 0,
    ) -> None:
        self.engine = FakeEngine()
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.resolver = Resolver(self.posted.put)
        self.rendezvous = FakeRendezvous()
        self.streams = Streams(
            self.engine,  # type: ignore[arg-type]
            self.resolver,
            Config(handshake_timeout_s=limit_s, lanes=lanes),
            0,
            lambda info: info.machine == "here",
            self.rendezvous,  # type: ignore[arg-type]
            time.monotonic,
            shortage,
            machine_id(),
        )

    def work(self) -> None:
        self.posted.get(timeout=PATIENCE_S)()

    def wait(self) -> str:
        """Until a stream is given up: why."""
        while math.isfinite(due_s := self.streams.due_s):
            with contextlib.suppress(queue.Empty):
                self.posted.get(timeout=max(0.0, due_s - time.monotonic()))()
            self.streams.tick()
        assert self.engine.told[-1][0] == "lose"
        return str(self.engine.told[-1][2])


def lost(stream: int, status: int = UNREACHABLE) -> Event:
    return Event(STREAM_LOST, status, 0, stream, False, 0, 0, 0, 0, 0, 0, "refused")


def failed(stream: int) -> Event:
    return Event(FAILED, STARVED, 7, stream, False, 0, 0, 0, 0, 0, 0, "refused")


def test_an_address_is_connected_at_once_and_given_up_when_no_lane_stands() -> None:
    harness = StreamsHarness()
    harness.streams.open(1, NUMBER, 5)
    assert harness.engine.told == [("open", 1), ("connect", 1, "tcp://10.0.0.8:1234")]
    assert harness.wait() == "no lane to tcp://10.0.0.8:1234 stood within 1.2 s"
    assert harness.streams.lost(lost(1)) == (NUMBER, True)
    assert harness.streams.why(failed(1)) == f"its connection to {NUMBER}: refused"
    assert harness.streams.why(failed(0)) == "refused"
    harness.streams.close(1)
    assert harness.streams.lost(lost(1)) == (None, False)
    assert harness.streams.why(failed(1)) == "its connection to a neighbor: refused"


def test_streams_that_fail_together_blame_nobody_but_the_next_one_does() -> None:
    """The peer at their other ends may be dying, or lack memory for a moment."""
    harness = StreamsHarness(limit_s=20)
    for stream in (1, 2):
        harness.streams.open(stream, NUMBER, 5)
    for stream in (1, 2):
        assert harness.streams.lost(lost(stream)) == (NUMBER, False)
    failed_s = time.monotonic()
    while time.monotonic() == failed_s:  # a clock may be coarse
        pass
    harness.streams.open(3, NUMBER, 5)
    assert harness.streams.lost(lost(3)) == (NUMBER, True)


class Listeners:
    """Addresses of this machine at one port: some greet as engines do, some are silent."""

    def __init__(self, **said: bytes) -> None:
        self.servers: list[socket.socket] = []
        self.port = 0
        self._open: list[socket.socket] = []
        for last, words in said.items():
            server = socket.create_server((f"127.0.0.{last[1:]}", self.port))
            self.port = server.getsockname()[1]
            self.servers.append(server)
            threading.Thread(target=self._serve, args=(server, words), daemon=True).start()

    def _serve(self, server: socket.socket, words: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = server.accept()[0]
                self._open.append(connection)
                connection.sendall(words)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self.servers, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # it wakes the thread that accepts
            each.close()


def several(port: int, *last: int) -> m.PeerInfo:
    """A peer at addresses of this machine, which is taken for another one's."""
    first, *others = [f"127.0.0.{number}" for number in last]
    return m.PeerInfo(8, 0, first, port, "", machine_id(), others=tuple(others))


def test_the_first_host_that_greets_is_taken_and_remembered() -> None:
    with Listeners(_2=b"", _3=b"SSH-2.0", _4=b"\xff\x00") as there:
        harness = StreamsHarness(limit_s=20)
        info = several(there.port, 2, 9, 3, 4)  # silent, refuses, is no peer
        harness.streams.open(1, info, 5)
        harness.streams.open(2, info, 5)
        assert harness.engine.told == [("open", 1), ("open", 2)]
        harness.work()
        found = f"tcp://127.0.0.4:{there.port}"
        assert harness.engine.told[2:] == [("connect", 1, found), ("connect", 2, found)]
        harness.streams.open(3, info, 5)
        assert harness.engine.told[-1] == ("connect", 3, found), "without another attempt"
        assert harness.streams.neighbors[0] == (info, ("127.0.0.4", there.port))


def test_a_foreign_greeting_costs_no_peer_its_membership() -> None:
    with Listeners(_2=b"\xff", _3=b"\xff") as there:
        harness = StreamsHarness(limit_s=20)
        info = several(there.port, 2, 3)
        for number, last in ((1, 2), (2, 3)):
            harness.streams.open(number, info, 5)
            harness.work()
            assert harness.engine.told[-1] == (
                "connect",
                number,
                f"tcp://127.0.0.{last}:{there.port}",
            )
            if number == 1:
                assert harness.streams.lost(lost(1, ANOTHER)) == (info, False)
                assert harness.streams.text(lost(1)) == "refused"
        harness.streams.up(2)
        harness.streams.open(3, info, 5)
        assert harness.engine.told[-1][2] == f"tcp://127.0.0.3:{there.port}"
        assert harness.streams.lost(lost(3)) == (info, False)
        assert harness.streams.text(lost(3)) == "refused; 127.0.0.2: refused"


def test_a_peer_that_answers_nowhere_is_given_up_with_all_that_was_tried() -> None:
    with Listeners(_2=b"") as there:
        harness = StreamsHarness()
        info = several(there.port, 2, 3)
        harness.streams.open(1, info, 5)
        why = harness.wait()
        assert re.search(r"127\.0\.0\.2: no answer within 0\.\d+ s", why)  # what is left of 0.2
        assert "127.0.0.3: Connection refused" in why
        assert harness.streams.lost(lost(1)) == (info, False), "it may be a moment's trouble"
        assert harness.streams.text(lost(1)) == why, "the engine repeats less of it"
        harness.streams.open(2, info, 5)
        harness.wait()
        assert harness.streams.lost(lost(2)) == (info, True)


def test_hosts_may_be_names(names: Names) -> None:
    with Listeners(_2=b"\xff") as there:
        harness = StreamsHarness(limit_s=20)
        names.addresses = ["::1", "127.0.0.3", "127.0.0.2"]
        info = replace(NAME, port=there.port, others=("other.example",))
        harness.streams.open(1, info, 5)
        harness.work()
        assert harness.engine.told[-1] == ("connect", 1, f"tcp://127.0.0.2:{there.port}")


def test_a_stream_that_is_up_has_no_time_limit() -> None:
    harness = StreamsHarness()
    harness.streams.open(1, NUMBER, 5)
    harness.streams.up(1)
    assert harness.streams.due_s == math.inf
    assert harness.streams.lost(lost(1, lib.PCCL_ESTREAM)) == (NUMBER, False)


def test_a_process_without_sockets_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    harness = StreamsHarness()
    harness.streams.open(1, NUMBER, 5)
    monkeypatch.setattr(socket, "socket", none)
    assert "this process gets no socket (Too many open files)" in harness.wait()


def test_a_process_without_sockets_blames_itself() -> None:
    harness = StreamsHarness(shortage=lambda: ": this process gets no socket")
    for stream in range(1, 6):
        harness.streams.open(stream, NUMBER, 5)
    assert harness.streams.lost(lost(1, REFUSED)) == (NUMBER, False)
    harness.streams.up(2)
    harness.wait()
    assert harness.streams.lost(lost(3)) == (NUMBER, False)
    assert harness.streams.lost(lost(4)) == (NUMBER, False)
    with pytest.raises(Refused, match="3 times in a row: refused"):
        harness.streams.lost(lost(5, REFUSED))


def test_no_sockets_for_direct_streams_end_nothing_because_the_rings_carry_their_rows() -> None:
    harness = StreamsHarness()
    for stream in range(1, 6):
        harness.streams.open(stream, NUMBER, 5, shares=3)
        assert harness.streams.lost(lost(stream, REFUSED)) == (NUMBER, False)


def test_streams_that_send_at_the_same_time_have_fewer_lanes_each() -> None:
    for lanes, shares, each in ((0, 1, 0), (0, 7, 0), (16, 1, 16), (16, 7, 3), (16, 63, 1)):
        harness = StreamsHarness(lanes=lanes)
        harness.streams.open(1, NUMBER, 5, shares)
        assert harness.engine.lanes == [(each, shares)]


def test_a_name_is_resolved_in_a_thread_and_cached(names: Names) -> None:
    harness = StreamsHarness()
    names.addresses = ["::1", "127.0.0.3", "127.0.0.4"]
    harness.streams.open(1, NAME, 5)
    harness.streams.open(2, NAME, 5)
    assert harness.engine.told == [("open", 1), ("open", 2)]
    harness.work()
    assert harness.engine.told[2:] == [
        ("connect", 1, "tcp://127.0.0.3:1234"),
        ("connect", 2, "tcp://127.0.0.3:1234"),
    ]
    harness.streams.lost(lost(1))
    harness.streams.open(3, NAME, 5)  # where nobody answered, another address comes next
    harness.streams.lost(lost(3))
    harness.streams.open(4, NAME, 5)
    assert harness.engine.told[-1] == ("connect", 4, "tcp://[::1]:1234")
    assert names.asked == ["peer.example"]


def test_a_name_that_fails_for_a_moment_is_looked_up_again(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NAME_RETRY_S", 0.01)
    harness = StreamsHarness(limit_s=60)
    names.failures = 2
    harness.streams.open(1, NAME, 5)
    for _ in range(2):
        harness.work()
        due_s = harness.streams.due_s
        assert math.isfinite(due_s)
        wait_until(lambda: time.monotonic() > due_s)  # noqa: B023
        harness.streams.tick()
    harness.work()
    assert harness.engine.told[-1] == ("connect", 1, "tcp://127.0.0.1:1234")


def test_a_name_that_never_resolves_is_given_up(names: Names) -> None:
    harness = StreamsHarness()
    names.failures = 1000
    harness.streams.open(1, NAME, 5)
    harness.work()
    why = harness.wait()
    assert "the name peer.example does not resolve: Temporary failure in name resolution" in why
    assert harness.streams.lost(lost(1)) == (NAME, True)


def test_an_answer_that_is_late_is_for_the_next_attempt(names: Names) -> None:
    harness = StreamsHarness()
    names.answer.clear()
    harness.streams.open(1, NAME, 5)
    assert harness.wait() == "the name peer.example did not resolve within 0.2 s"
    names.answer.set()
    harness.work()
    assert harness.engine.told[-1][0] == "lose"
    harness.streams.open(2, NAME, 5)
    assert harness.engine.told[-1] == ("connect", 2, "tcp://127.0.0.1:1234")


def test_without_threads_no_name_resolves(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    found: list[Found] = []
    Resolver(lambda command: command()).find("peer.example", found.append)
    assert "no thread to resolve a name in: can't start new thread" in found[0].why
    with pytest.raises(OSError, match="no thread"):
        resolve.addresses("peer.example", 1)


def test_resolving_a_name_has_a_time_limit(names: Names) -> None:
    names.answer.clear()
    with pytest.raises(OSError, match=r"the name master\.example did not resolve within 0\.2 s"):
        resolve.reachable("master.example", 1, LIMIT_S)
    names.answer.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names.addresses = ["127.0.0.2", "127.0.0.1"]  # nobody listens at the first one
        assert resolve.reachable("master.example", port, LIMIT_S) == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        resolve.reachable("master.example", port, 10)


def test_an_address_that_swallows_everything_leaves_time_for_the_next(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.addresses = ["127.0.0.2", "127.0.0.1"]
    waited: list[float] = []

    class Swallowed(socket.socket):
        def connect(self, where: Any) -> None:
            limit_s = self.gettimeout()
            assert limit_s is not None
            waited.append(limit_s)
            if where[0] == "127.0.0.2":
                threading.Event().wait(limit_s)
                raise TimeoutError("timed out")
            super().connect(where)

    monkeypatch.setattr(socket, "socket", Swallowed)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert resolve.reachable("master.example", port, LIMIT_S) == "127.0.0.1"
    assert len(waited) == 2 and waited[0] <= LIMIT_S / 2


def test_a_silent_address_does_not_delay_the_next(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GREETING_S", 3600.0)
    names.addresses = ["127.0.0.2", "127.0.0.1"]
    with socket.create_server(("127.0.0.2", 0)) as silent:
        port = silent.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)) as master, ThreadPoolExecutor() as pool:

            def greet() -> None:
                with master.accept()[0] as connection:
                    connection.sendall(resolve.GREETING)
                    connection.recv(1)

            greeted = pool.submit(greet)
            assert resolve.reachable("master.example", port, 3600.0) == "127.0.0.1"
            greeted.result()


@pytest.mark.parametrize("address", ["master.example", "fe80::1%\u00fc", "127.0.0.1.1", ""])
def test_an_invalid_address_is_an_error_of_the_system(address: str) -> None:
    with pytest.raises(socket.gaierror):
        resolve.destination(address, 1)


def test_a_socket_file_that_is_gone_is_no_way(caplog: pytest.LogCaptureFixture) -> None:
    harness = StreamsHarness()
    harness.streams.open(1, HERE, 5)
    assert harness.engine.told[-1] == ("connect", 1, "tcp://10.0.0.9:1234")
    harness.streams.open(2, HERE, 5)
    assert len(caplog.records) == 1
    assert "is not reached at /nowhere/e (No such file or directory)" in caplog.text


def test_an_ipc_connection_that_fails_is_made_by_tcp_next(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    harness = StreamsHarness()
    path = str(tmp_path / "e")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        info = m.PeerInfo(9, 0, "10.0.0.9", 1234, path, "here")
        harness.streams.open(1, info, 5)
        assert harness.engine.told[-1] == ("connect", 1, f"ipc://{path}")
        assert harness.streams.lost(lost(1)) == (info, False), "TCP is still to be tried"
        assert f"is not reached at {path} (refused)" in caplog.text
        harness.streams.open(2, info, 5)
        assert harness.engine.told[-1] == ("connect", 2, "tcp://10.0.0.9:1234")
        assert harness.streams.lost(lost(2)) == (info, False), "it may be a moment's trouble"
        harness.streams.open(3, info, 5)
        assert harness.streams.lost(lost(3)) == (info, True)
        harness.streams.open(4, info, 5)
        harness.streams.up(4)
        harness.streams.open(5, info, 5)
        assert harness.streams.lost(lost(5)) == (info, False), "it was reached meanwhile"


# ---- whole peers ----


def sums(cluster: Cluster) -> list[float]:
    """An all-reduce of ones: the sums."""

    def one(_: int, comm: pccl.Communicator) -> float:
        x = np.ones(COUNT, np.float32)
        comm.all_reduce(x, x, op=pccl.ReduceOp.SUM)
        return float(x[0])

    return cluster.each(one)


def test_a_name_server_that_fails_for_a_moment_costs_nothing(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    monkeypatch.setenv("PCCL_ADVERTISE", "peer.example")
    with Cluster(2) as cluster:
        names.failures = 3
        assert sums(cluster) == [2, 2]
        assert len(names.asked) > 2


def test_removed_socket_files_cost_no_peer_its_membership(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Cluster(2) as cluster:
        assert sums(cluster) == [2, 2]
        paths = [client_of(comm).hello.ipc for comm in cluster.comms]
        for path in paths:
            os.unlink(path)
        cluster.join()
        assert sums(cluster) == [3, 3, 3]
        assert any(path in caplog.text for path in paths)


class BrokenLib:
    """The C core, but its engines stop on an error when they are told to."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def pccl_engine_run(self, _: object) -> int:
        self.stop.wait(20)
        return int(lib.PCCL_EZMQ)

    def pccl_engine_errno(self, _: object) -> int:
        return errno.EMFILE


def test_a_stopped_engine_ends_the_membership_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenLib()
    with Cluster(2) as cluster:
        monkeypatch.setattr(engine_module, "lib", broken)
        comm = cluster.join()

        def goes_on(index: int, each: pccl.Communicator) -> list[pccl.PCCLError]:
            x = np.ones(COUNT, np.float32)
            if index == 2:
                broken.stop.set()
            try:
                each.all_reduce(x, x, op=pccl.ReduceOp.SUM)
            except pccl.PCCLError as error:
                return [error]
            assert index < 2 and (x == 2).all(), "peer 3 had left already"
            return []

        *others, (own,) = cluster.each(goes_on)
        assert all(isinstance(error, pccl.PeerLostError) for told in others for error in told)
        assert own.result is pccl.Result.INTERNAL_ERROR
        assert "the lane engine stopped: errno 24, too many open files" in str(own)
        listed(f"{type(own).__name__}: {own}")
        assert "check that the master runs" not in str(own)
        with pytest.raises(pccl.PCCLError, match="the lane engine stopped"):
            comm.update_topology()
        cluster.comms.remove(comm)
        comm.close()


def test_a_process_without_descriptors_tries_on_to_get_back_to_its_master(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    refused = queue.Queue[None]()

    class Scarce(Dealer):
        def __init__(self, *arguments: Any) -> None:
            if refused.qsize() < 3:
                refused.put(None)
                raise OSError(errno.EMFILE, "no connection can be opened: Too many open files")
            super().__init__(*arguments)

    master = Master("--state", str(tmp_path / "master.db"))
    try:
        with pccl.Communicator(master.address) as comm:
            monkeypatch.setattr(control, "Dealer", Scarce)
            master.kill()
            master.start()
            (pending,) = in_threads([comm.are_peers_pending])
            assert not pending
            assert refused.qsize() == 3
    finally:
        master.kill()


def test_a_silent_address_does_not_keep_a_peer_from_a_master_that_is_back(
    names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made = partialmethod(Config.__init__, handshake_timeout_s=600.0)  # the test's limit is shorter
    monkeypatch.setattr(Config, "__init__", made)
    master = Master("--state", str(tmp_path / "master.db"))
    try:
        port = parse_address(master.address)[1]
        with pccl.Communicator(f"master.example:{port}") as comm:
            names.addresses = ["127.0.0.2", "127.0.0.1"]
            with socket.create_server(("127.0.0.2", port)):  # accepts, and says nothing
                master.kill()
                master.start()
                assert comm.are_peers_pending() is False
    finally:
        master.kill()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("on purpose"), "an internal error of pccl, RuntimeError: on purpose"),
        (MemoryError(), "this process has no memory left"),
        (zmq.ZMQError(errno.ENOMEM), "this process has no memory left"),
    ],
)
def test_whatever_ends_the_control_thread_ends_every_wait(
    error: Exception,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wait = Waiter.wait

    def fails_there(waiter: Waiter, timeout_s: float | None) -> list[Any]:
        if threading.current_thread() in threads:
            raise error
        return wait(waiter, timeout_s)

    with Cluster(1) as cluster:
        threads = [one for one in threading.enumerate() if one.name == "pccl-control"]
        cluster.join()
        monkeypatch.setattr(Waiter, "wait", fails_there)

        first, second = cluster.comms

        def fails() -> str:
            with pytest.raises(pccl.PCCLError) as told:
                first.update_topology()
                first.update_topology()
            return str(told.value)

        def goes_on() -> str:
            second.update_topology()  # alone, in the end
            return ""

        said, _ = in_threads([fails, goes_on])
        assert why in said
    logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert logged == ("internal error" in why)
