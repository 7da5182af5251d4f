"""The master's dial-back: which peers it reaches, and what it does not reveal."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from peers.strangers import HELLO, PATIENCE_S, serving, speaker, welcome
from peers.waiting import wait_until

from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.config import Config
from pccl.runtime.encryption import new_keys
from pccl.runtime.server.dial import (
    ANOTHER,
    ASKER_MAX,
    OTHER_COST,
    UNTOLD,
    Dialler,
    Target,
    dial_hosts,
)
from pccl.runtime.server.server import Server
from pccl.runtime.sockets import Waiter
from pccl.security import KeyPair

TOKEN = "0123456789abcdef"
LOCAL, ELSEWHERE = "127.0.0.1", "10.1.2.3"


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter()
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


class Caller:
    """A dialler, and what has come of its dials."""

    def __init__(
        self,
        waiter: Waiter,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: KeyPair | None = None,
    ) -> None:
        self.waiter, self.dialler = waiter, Dialler(waiter, context, keys)
        self.said: list[str | None] = []

    def begin(self, target: Target, asker: str | None = LOCAL) -> None:
        self.dialler.dial(target, time.monotonic(), self.said.append, asker)

    def step(self) -> None:
        for read in self.waiter.wait(0.0):
            read()
        self.dialler.tick(time.monotonic())

    def dial(self, target: Target, asker: str | None = LOCAL) -> str | None:
        before = len(self.said)
        self.begin(target, asker)

        def ended() -> bool:
            self.step()
            return len(self.said) > before

        wait_until(ended)
        assert not self.dialler.busy
        return self.said[-1]


@pytest.fixture
def caller(waiter: Waiter, context: zmq.Context[zmq.Socket[bytes]]) -> Caller:
    return Caller(waiter, context)


def test_a_peer_with_the_right_token_is_reached(backend: str, caller: Caller) -> None:
    engine = Engine(EngineOptions(dialler=TOKEN.encode()), host=LOCAL)
    for asker in (LOCAL, ELSEWHERE, None):
        assert caller.dial(Target(LOCAL, engine.port, token=TOKEN), asker) == ""
    assert caller.dial(Target(LOCAL, engine.port, token="f" * 16)) == ANOTHER
    assert engine.dropped == 0
    engine.close()


@pytest.mark.parametrize("call", ["get_monitor_socket", "connect"])
def test_a_master_without_descriptors_reports_no_dial(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """And it goes on, with nothing left open: the context ends."""

    real = getattr(zmq.Socket, call)

    def none(of: zmq.Socket[bytes], what: object) -> object:
        if str(what).startswith("inproc:"):
            return real(of, what)
        raise zmq.ZMQError(errno.EMFILE)

    engine = Engine(EngineOptions(dialler=TOKEN.encode()), host=LOCAL)
    with monkeypatch.context() as patched:
        patched.setattr(zmq.Socket, call, none)
        assert caller.dial(Target(LOCAL, engine.port, token=TOKEN)) is None
    assert caller.dial(Target(LOCAL, engine.port, token=TOKEN)) == ""
    engine.close()


def test_a_peer_with_the_right_key_is_reached(
    waiter: Waiter, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    master, peer = new_keys(), new_keys()
    caller = Caller(waiter, context, master)
    options = EngineOptions(
        curve_public=peer.public.encode(),
        curve_secret=peer.secret.encode(),
        dialler=master.public.encode(),
    )
    engine = Engine(options, host=LOCAL)
    assert caller.dial(Target(LOCAL, engine.port, curve=peer.public)) == ""
    assert caller.dial(Target(LOCAL, engine.port, curve=new_keys().public)) == ANOTHER
    assert caller.dial(Target(LOCAL, engine.port, token=TOKEN)) is None, "it has no key"
    engine.close()


def test_reasons_of_failed_dials(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        target = Target(LOCAL, silent.getsockname()[1], token=TOKEN)
        monkeypatch.setattr(limits, "DIAL_S", 0.1)
        assert caller.dial(target) == "no answer within 0.1 s"
    assert caller.dial(target) == "connection refused: nothing listens at that port"


@pytest.mark.parametrize(
    ("said", "why"), [(b"SSH-2.0\r\n", "something else"), (b"", "closed as soon")]
)
def test_other_programs_answer(caller: Caller, said: bytes, why: str) -> None:
    with socket.create_server((LOCAL, 0)) as other:
        caller.begin(Target(LOCAL, other.getsockname()[1], token=TOKEN))
        with other.accept()[0] as connection:
            connection.sendall(said)
        wait_until(lambda: caller.step() or bool(caller.said))
        assert caller.said[0] is not None
        assert why in caller.said[0]


def test_a_dial_reveals_nothing_of_other_hosts(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what answers there, nor how soon."""
    monkeypatch.setattr(limits, "DIAL_S", 0.3)
    with ExitStack() as stack:
        silent, greets, speaks = (
            stack.enter_context(socket.create_server((LOCAL, 0))) for _ in range(3)
        )
        engine = Engine(EngineOptions(dialler=b"f" * 16), host=LOCAL)
        free = socket.create_server((LOCAL, 0))
        free.close()
        ports = [each.getsockname()[1] for each in (silent, greets, speaks)]
        began_s = time.monotonic()
        for port in (*ports, engine.port, 1):
            caller.begin(Target(LOCAL, port, token=TOKEN), ELSEWHERE)
        for server, said in ((greets, b"\xff" + bytes(9)), (speaks, b"SSH-2.0")):
            with server.accept()[0] as connection:
                connection.sendall(said)
        wait_until(lambda: caller.step() or caller.said)
        assert time.monotonic() >= began_s + limits.DIAL_S
        wait_until(lambda: caller.step() or not caller.dialler.busy)
        assert caller.said == [UNTOLD] * 5
        engine.close()


def test_names_and_targets_without_a_token_are_not_dialled(caller: Caller) -> None:
    assert caller.dial(Target("some.name", 5000, token=TOKEN)) is None
    for token in ("", "guess", "x" * 200, "\u20ac" * 20):
        assert caller.dial(Target(LOCAL, 5000, token=token)) is None


def test_the_masters_own_dials_resolve_names_and_count_only_proofs(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a peer that can resolve no names could accuse those that have one, and be believed."""
    answer = threading.Event()
    names: dict[str | bytes, list[str]] = {
        "peer.name": [LOCAL],
        "two.addresses": ["127.0.0.2", LOCAL],
        "no.name": [],
        "slow.name": [LOCAL],
    }
    by_number = socket.getaddrinfo

    def by_name(host: str | bytes, *more: Any, **named: Any) -> list[Any]:
        if host not in names:
            return by_number(host, *more, **named)
        if host == "slow.name":
            answer.wait()
        if not names[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for each in names[host] for found in by_number(each, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", by_name)
    engine = Engine(EngineOptions(dialler=TOKEN.encode()), host=LOCAL)
    assert caller.dial(Target("peer.name", engine.port, token=TOKEN), None) == ""
    refused = caller.dial(Target("peer.name", 1, token=TOKEN), None)
    assert refused is not None and "refused" in refused
    assert caller.dial(Target("two.addresses", 1, token=TOKEN), None) is None
    assert caller.dial(Target("no.name", engine.port, token=TOKEN), None) is None
    monkeypatch.setattr(limits, "DIAL_S", 0.05)
    assert caller.dial(Target("slow.name", engine.port, token=TOKEN), None) is None
    answer.set()
    engine.close()


def test_a_peer_with_several_hosts_is_reached_at_any(caller: Caller) -> None:
    engine = Engine(EngineOptions(dialler=TOKEN.encode()), host=LOCAL)
    begun: list[str] = []
    real = caller.dialler.dial

    def dial(target: Target, *rest: Any) -> None:
        begun.append(target.host)
        real(target, *rest)

    caller.dialler.dial = dial  # type: ignore[method-assign]

    def answer(*hosts: str, asker: str | None = None) -> str | None:
        said: list[str | None] = []
        target = Target("", engine.port, token=TOKEN)
        dial_hosts(caller.dialler, hosts, target, time.monotonic, said.append, asker)
        wait_until(lambda: caller.step() or bool(said))
        wait_until(lambda: caller.step() or not caller.dialler.busy)
        assert len(said) == 1
        return said[0]

    assert answer(LOCAL, "127.0.0.8") == "" and begun == [LOCAL], "that is enough"
    assert answer("127.0.0.9", LOCAL, "127.0.0.8", "127.0.0.7") == ""
    refused = "connection refused: nothing listens at that port"
    both = f"127.0.0.9: {refused}; 127.0.0.8: {refused}"
    assert answer("127.0.0.9", "127.0.0.8") == both
    assert answer("127.0.0.9") == refused
    with socket.create_server(("127.0.0.9", engine.port)):  # says nothing
        begun.clear()
        began_s = time.monotonic()
        said: list[str | None] = []
        target = Target("", engine.port, token=TOKEN)
        hosts = ("127.0.0.9", LOCAL, "127.0.0.8")
        dial_hosts(caller.dialler, hosts, target, time.monotonic, said.append, LOCAL)
        wait_until(lambda: caller.step() or bool(said))
        assert said == [""] and begun == [*hosts]
        assert time.monotonic() - began_s < limits.DIAL_S / 2
        caller.dialler.close()
    engine.close()


def test_results_for_other_hosts_are_not_revealed(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DIAL_S", 0.05)
    said: list[str | None] = []
    target = Target("", 1, token=TOKEN)
    dial_hosts(caller.dialler, (LOCAL, "127.0.0.9"), target, time.monotonic, said.append, LOCAL)
    wait_until(lambda: caller.step() or bool(said))
    assert said[0] is not None and said[0].endswith(f"127.0.0.9: {UNTOLD}")


def test_a_master_without_ipv6_makes_no_dial_to_it(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.ENETUNREACH)
    assert caller.dial(Target("2001:db8::7", 1, token=TOKEN), None) is None
    assert caller.dial(Target("10.0.0.7", 1, token=TOKEN), None) is not None


def test_dials_are_bounded(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        target = Target(LOCAL, silent.getsockname()[1], token=TOKEN)
        for _ in range(ASKER_MAX // OTHER_COST):
            caller.begin(target, ELSEWHERE)
        assert not caller.said
        caller.begin(target, ELSEWHERE)
        assert caller.said == [None], "this asker has asked too often"
        caller.dialler.dial(target, time.monotonic() + OTHER_COST, caller.said.append, ELSEWHERE)
        assert caller.said == [None], "after a while it may ask again"
        monkeypatch.setattr(limits, "DIALS_MAX", 1 + ASKER_MAX // OTHER_COST)
        caller.begin(target, None)
        assert caller.said == [None] * 2, "too many at the same time"
        caller.dialler.close()
        assert not caller.dialler.busy


def test_askers_that_are_remembered_are_bounded(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ASKERS_MAX", 10)
    refused = Target(LOCAL, 1, token=TOKEN)
    for i in range(20):
        caller.begin(refused, f"10.0.0.{i}")
    assert caller.said == [None] * 10
    caller.dialler.dial(refused, time.monotonic() + 60, caller.said.append, "10.0.0.99")
    assert len(caller.said) == 10, "those of a minute ago are forgotten"
    caller.dialler.close()


# ---- at the master ----


def asked(server: Server, hello: m.Hello) -> m.MasterMessage:
    with speaker(zmq.DEALER, server.port) as newcomer:
        newcomer.send(m.encode(hello))
        return welcome(newcomer)


def test_a_refused_newcomer_is_not_dialled() -> None:
    server = Server("127.0.0.1", 0, Config())
    with socket.create_server((LOCAL, 0)) as target, serving(server):
        target.settimeout(PATIENCE_S)
        port = target.getsockname()[1]
        known = {"host": "", "port": port, "dial": TOKEN}
        for refused in ({"protocol": 1}, {"ipc": "\n"}, {"curve": "no key"}):
            hello = m.Hello(**{**fields(HELLO), **known, **refused})  # type: ignore[arg-type]
            assert isinstance(asked(server, hello), m.Refused)
        target.settimeout(0.1)
        with pytest.raises(TimeoutError):
            target.accept()


def test_a_newcomer_learns_that_another_peer_answers_at_its_address(backend: str) -> None:
    """A port forwarding leads to another peer."""
    server = Server("127.0.0.1", 0, Config())
    other = Engine(EngineOptions(dialler=b"f" * 16), host=LOCAL)
    with serving(server):
        known = {"host": "", "port": other.port, "dial": TOKEN}
        told = asked(server, m.Hello(**{**fields(HELLO), **known}))  # type: ignore[arg-type]
        assert isinstance(told, m.Welcome)
        assert ANOTHER in told.warning
    other.close()


def test_a_dial_that_fails_with_an_error_of_the_master_has_no_result_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that was dropped meanwhile would become a peer, and be lost at once."""
    caplog.set_level(logging.INFO, "pccl")
    server, look_up = Server("127.0.0.1", 0, Config()), socket.getaddrinfo
    fails = iter([True])

    def failing(*asked: Any, **more: Any) -> Any:
        if next(fails, False):
            raise RuntimeError("can't allocate lock")
        return look_up(*asked, **more)

    other = Engine(EngineOptions(dialler=TOKEN.encode()), host=LOCAL)
    known = {"port": other.port, "dial": TOKEN, "host": "127.0.0.2", "others": (LOCAL,)}
    hello = m.Hello(**{**fields(HELLO), **known})  # type: ignore[arg-type]
    with serving(server), speaker(zmq.DEALER, server.port) as newcomer:
        monkeypatch.setattr(socket, "getaddrinfo", failing)
        newcomer.send(m.encode(hello))
        wait_until(lambda: "caused an internal error" in caplog.text)
        assert isinstance(asked(server, hello), m.Welcome)  # after the first dial has ended
        assert caplog.text.count("joined") == 1
    other.close()


def fields(message: m.Hello) -> dict[str, object]:
    return {name: getattr(message, name) for name in m.Hello.__struct_fields__}
