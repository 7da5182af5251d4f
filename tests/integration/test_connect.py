"""The time limits of `connect`, in every state of the master."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from peers.cluster import in_threads
from peers.ports import unused_port
from peers.waiting import wait_until

import pccl
from pccl.runtime import limits

LIMIT_S = 0.3
LONGER_S = 60.0
MUCH_S = 10.0  # on a busy machine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTEMPT_INTERVAL_S", 0.05)


@contextlib.contextmanager
def absent() -> Iterator[str]:
    """No process listens."""
    yield f"127.0.0.1:{unused_port()}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The kernel accepts, and no process answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def hanging_up() -> Iterator[str]:
    """Every connection is accepted and closed, as by a proxy of a master that is down."""

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def nameless() -> Iterator[str]:
    """The name server does not answer."""
    over = threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        over.wait(60)
        raise OSError("nothing was found")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        try:
            yield "master.example:1"
        finally:
            over.set()


@contextlib.contextmanager
def not_admitting() -> Iterator[str]:
    """The peers of the run do not let anybody in."""
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address):
        yield master.address


STATES = {
    absent: r"no pccl master has answered at .* within 0\.3 s \(Connection refused, \d+ attempts\)",
    silent: r"has answered at .* within 0\.3 s \(no answer within 0[.\d]* s, 1 attempt\)",
    hanging_up: r"has answered at .* within 0\.3 s \(.*, \d+ attempts?\)",
    nameless: r"within 0\.3 s \(the name master\.example did not resolve within 0[.\d]* s, 1 ",
    not_admitting: r"did not admit this one within (0\.3|[139]|27) s",
}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("patience", [None, 100.0])
def test_its_own_limit_always_wins(
    state: Callable[[], contextlib.AbstractContextManager[str]],
    patience: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LAST_WORDS_MS", 60_000)  # nobody waits for them where nobody hears
    with state() as address:
        # on a busy machine, the master may register the peer only after the first limits
        for limit_s in (LIMIT_S, 1.0, 3.0, 9.0, 27.0) if state is not_admitting else (LIMIT_S,):
            comm = pccl.Communicator(address, connect_timeout=patience)
            began_s = time.monotonic()
            with pytest.raises(pccl.PCCLTimeoutError) as caught:
                comm.connect(1000, timeout=limit_s)
            assert limit_s <= time.monotonic() - began_s < LONGER_S
            if re.search(STATES[state], str(caught.value)):
                break
        else:
            raise AssertionError(str(caught.value))
    assert caught.value.result is pccl.Result.TIMEOUT
    with pytest.raises(pccl.PCCLError, match="is not connected"):
        comm.update_topology()


def wait_until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    wait_until(lambda: any(text in record.getMessage() for record in caplog.records))


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_master_that_comes_later_is_waited_for(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "pccl")
    if how == "variable":
        monkeypatch.setenv("PCCL_CONNECT_TIMEOUT_S", "60")
    address = f"127.0.0.1:{unused_port()}"
    comm = pccl.Communicator(address, connect_timeout=60 if how == "argument" else None)

    def join() -> int:
        with comm:
            return comm.world_size

    def serve() -> int:
        wait_until_said(caplog, "attempt 6 to reach the master")
        master.run()
        return 1

    master = pccl.MasterNode(address)
    try:
        assert in_threads([join, serve]) == [1, 1]
    finally:
        master.interrupt()


def test_the_patience_of_the_program_comes_before_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCL_CONNECT_TIMEOUT_S", "60")
    with absent() as address:
        comm = pccl.Communicator(address, connect_timeout=LIMIT_S)
        with pytest.raises(pccl.MasterLostError, match=r"no pccl master answers.* in 0\.[3-9] s"):
            comm.connect(1)
        with pytest.raises(pccl.PCCLTimeoutError, match=r"within 0\.1 s"):
            comm.connect(timeout=0.1)


def test_without_it_attempts_count() -> None:
    with absent() as address, pytest.raises(pccl.MasterLostError, match=r"refused.*, 3 attempts "):
        pccl.Communicator(address).connect(3, timeout=MUCH_S)


def test_a_long_connect_logs_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "pccl")
    monkeypatch.setattr(limits, "QUIET_S", 0.1)
    with absent() as address:
        with pytest.raises(pccl.MasterLostError):
            pccl.Communicator(address, connect_timeout=1).connect()
        waits = [each.getMessage() for each in caplog.records]
        assert 1 <= len(waits) <= 4, "with growing gaps"
        start = f"connect has waited 0 s for a master at {address} (Connection refused, "
        assert waits[0].startswith(start) and waits[0].endswith(" s more"), waits
        with pytest.raises(pccl.MasterLostError):
            pccl.Communicator(address).connect(5)
        assert "times more (connect_timeout= gives it longer)" in caplog.text


@pytest.mark.parametrize(
    ("limit", "error"), [(-1, ValueError), (float("nan"), ValueError), ("5", TypeError)]
)
def test_no_patience(limit: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="connect_timeout is"):
        pccl.Communicator("127.0.0.1:1", connect_timeout=limit)


GREETINGS = {
    "ssh": (b"SSH-2.0-OpenSSH_9.2\r\n", r"another service answers there: it says b'SSH-2\.0"),
    "http": (b"", r"another service answers there: it says b'HTTP/1\.1 400"),
    "silent": (b"", "it accepts connections, and said nothing for 0.4 s"),
}


@pytest.mark.parametrize("kind", GREETINGS)
def test_another_service_at_the_masters_port_is_an_error_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time, unless the program has said how long it waits."""
    monkeypatch.setattr(limits, "GREETING_S", 0.4)
    greeting, said = GREETINGS[kind]

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting)
            while connection.recv(100):
                if kind == "http":
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(pccl.MasterLostError, match=rf"{said}.*1 attempt in"):
                pccl.Communicator(address).connect(n_attempts=5)
            with pytest.raises(pccl.MasterLostError, match=r"master answers at .*\d+ attempts in"):
                pccl.Communicator(address, connect_timeout=1.5).connect()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
