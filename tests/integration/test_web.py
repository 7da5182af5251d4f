"""The master shows its run over HTTP, to well-behaved clients and others, and harms it never."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import listed
from peers.cluster import gather, grow, in_threads
from peers.waiting import PATIENCE_S, wait_until
from simulation.manual import ManualRun

import pccl
from pccl.master_node import serve_until_signal
from pccl.protocol.master import Status
from pccl.protocol.master.status import snapshot
from pccl.runtime import limits
from pccl.runtime.server.web import Unanswered, Web, exposition, target
from pccl.support import parse_address

ROOT = Path(__file__).resolve().parents[2]
CALL = "all_reduce(1000 elements of float32, sum) with tag 7"


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0", http=0) as node:
        yield node


def client(node: pccl.MasterNode) -> socket.socket:
    assert node.http_address is not None
    return socket.create_connection(parse_address(node.http_address), timeout=20)


def exchange(node: pccl.MasterNode, request: bytes) -> tuple[int, dict[str, str], str]:
    """The status of the answer, its headers, and its body."""
    with client(node) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(node: pccl.MasterNode, path: str) -> tuple[int, dict[str, str], str]:
    return exchange(node, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())


def shown(node: pccl.MasterNode) -> dict[str, list[dict[str, object]]]:
    status, headers, body = get(node, "/status.json")
    assert status == 200 and headers["Content-Type"] == "application/json"
    return json.loads(body)


def test_the_status_of_a_run_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_KEPT_S", 0.0)
    with (
        pccl.MasterNode("127.0.0.1:0", http="127.0.0.1:0") as master,
        contextlib.ExitStack() as opened,
    ):
        first, second = (pccl.Communicator(master.address) for _ in range(2))
        for comm in (first, second):
            opened.callback(comm.close)
        first.connect()
        in_threads([lambda: grow(first, 2), lambda: gather(second, 2)])
        array = np.ones(1000, np.float32)
        handle = first.all_reduce_async(array, array, op="sum", tag=7)
        wait_until(lambda: bool(shown(master)["waits"]))
        (wait,) = shown(master)["waits"]
        assert (wait["call"], wait["phase"], wait["missing"]) == (CALL, "entering", [2])
        assert re.fullmatch(r"peer 2 \([^ ]+, 127\.0\.0\.1:\d+\) must enter it", str(wait["why"]))
        one, other = shown(master)["peers"]
        assert [call["call"] for call in one["calls"]] == [CALL] and other["calls"] == []  # type: ignore[attr-defined]
        wait_until(lambda: shown(master)["waits"][0]["waited_s"] > 0)  # type: ignore[operator]
        status, headers, text = get(master, "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        for line in ("pccl_world_size 2", 'pccl_peer_group_size{group="0"} 2', "pccl_waits 1"):
            assert line in text.splitlines()
        longest = re.search(r'^pccl_longest_wait_seconds\{phase="entering"\} (\S+)$', text, re.M)
        assert longest is not None and float(longest[1]) > 0
        assert get(master, "/healthz")[::2] == (200, "ok\n")
        events = json.loads(get(master, "/events")[2])
        assert events[-1].keys() == {"ago_s", "text"} and events[-1]["ago_s"] >= 0
        noted = [event["text"] for event in events]
        assert sum(text.startswith("joined: ") for text in noted) == 2
        second.all_reduce(array.copy(), op="sum", tag=7)
        assert handle.wait()
        assert not shown(master)["waits"]
        text = get(master, "/metrics")[2]
        assert 'pccl_collectives_total{outcome="committed"} 1\n' in text
        assert 'pccl_vote_wait_seconds_count{phase="collective"} 1\n' in text


def test_how_far_a_transfer_is_and_when_a_peer_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB at 80 Mbit/s: a lower bound, which no load can break."""
    monkeypatch.setattr(limits, "HTTP_KEPT_S", 0.0)
    monkeypatch.setattr(limits, "PROGRESS_LOOK_S", 0.02)
    monkeypatch.setenv("PCCL_SYNC_MBITS", "80")
    with pccl.MasterNode("127.0.0.1:0", http=0) as master, contextlib.ExitStack() as opened:
        comms = [opened.enter_context(contextlib.closing(pccl.Communicator(master.address)))]
        comms[0].connect()
        comms.append(opened.enter_context(contextlib.closing(pccl.Communicator(master.address))))
        in_threads([lambda: grow(comms[0], 2), lambda: gather(comms[1], 2)])
        ended = threading.Event()

        def sync(index: int) -> None:
            array = np.full(4_000_000, 1 - index, np.uint8)
            info = pccl.TensorInfo.from_numpy(array, "x")
            state = pccl.SharedState([info])
            state.revision = 1 - index
            try:
                comms[index].sync_shared_state(state)
            finally:
                ended.set()

        def watch() -> list[dict[str, Any]]:
            seen = []
            while not ended.is_set():
                seen += shown(master)["waits"]
            return seen

        *_, seen = in_threads([lambda: sync(0), lambda: sync(1), watch])  # type: ignore[list-item]
        assert isinstance(seen, list)
        told = [wait for wait in seen if wait["phase"] == "receiving" and wait["done"] is not None]
        assert told and all(0 <= wait["done"] < 1 for wait in told)
        assert re.search(r" must receive it; peer 2 has [\d.]+ % of it$", told[-1]["why"])
        for peer in shown(master)["peers"]:
            assert (sys.platform != "linux") == (peer["heartbeat_s"] is None)
            assert not peer["heartbeat_s"] or peer["heartbeat_s"] >= 0  # type: ignore[operator]


def test_metrics_have_the_format_of_prometheus(master: pccl.MasterNode) -> None:
    lines = get(master, "/metrics")[2].splitlines()
    typed = {}
    for line in lines:
        if line.startswith("# "):
            kind, name, rest = line[2:].split(" ", 2)
            typed[name] = rest if kind == "TYPE" else ""
            continue
        found = re.fullmatch(r'(pccl_[a-z_]+)(\{\w+="[^"\\\n]*"(,le="[^"]+")?\})? [\d.e+-]+', line)
        assert found, line
        assert typed[re.sub("_(bucket|sum|count)$", "", found[1])], line
    assert {*typed.values()} == {"gauge", "counter", "histogram"}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in typed.items())
    page = (ROOT / "docs" / "howto" / "observability.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(pccl_\w+)` \|", page, re.M) == list(typed)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /status.json HTTP/1.1\r\nHost: localhost:99\r\n\r\n", 200),
        (b"GET /nothing HTTP/1.1\r\nHost: [::1]:1\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),  # as TLS begins
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\r\n\r\n", 400),  # as ZMTP does
        (b"POST /status.json HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE / HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * limits.HTTP_REQUEST_BYTES + b"\r\n\r\n", 431),
        (b"x" * 300_000, 431),
    ],
)
def test_every_request_is_answered(master: pccl.MasterNode, request_: bytes, status: int) -> None:
    found, headers, body = exchange(master, request_)
    assert found == status, body
    assert len(body.encode()) == (
        0 if request_.startswith(b"HEAD") else int(headers["Content-Length"])
    )
    assert int(headers["Content-Length"]) > 0 and headers["Connection"] == "close"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assert headers.get("Allow") == ("GET, HEAD" if status == 405 else None)
    assert get(master, "/healthz")[0] == 200


def test_only_a_loopback_server_checks_the_host() -> None:
    head = b"GET /metrics HTTP/1.1\r\nHost: master.example:8080\r\n\r\n"
    assert target(head, loopback=False) == ("/metrics", True)
    with pytest.raises(Unanswered, match="only this machine is served"):
        target(head, loopback=True)


def test_idle_clients_do_not_block_others(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS", 4)
    with contextlib.ExitStack() as opened, pccl.Communicator(master.address) as comm:
        idle = [opened.enter_context(client(master)) for _ in range(6)]
        idle[-1].sendall(b"GET /status.json HTTP/1.1\r\n")
        assert get(master, "/healthz")[0] == 200
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b"", "the oldest one is cut"
        assert comm.world_size == 1 and not comm.are_peers_pending()


def test_a_request_has_a_time_limit(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_REQUEST_S", 0.05)
    with client(master) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(1) == b""


def test_many_requests_are_one_question(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_KEPT_S", 60.0)
    asked = []

    def take(*args: Any) -> Status:
        asked.append(args)
        return snapshot(*args)

    monkeypatch.setattr("pccl.protocol.master.machine.snapshot", take)
    found = in_threads([lambda path=p: get(master, path) for p in ("/metrics", "/healthz") * 5])  # type: ignore[misc]
    assert {status for status, _, _ in found} == {200} and len(asked) == 1


def test_a_blocked_master_is_not_healthy(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_ANSWER_S", 0.05)
    goes_on = threading.Event()

    def stands_still(*args: Any) -> Status:
        goes_on.wait(60)
        return snapshot(*args)

    monkeypatch.setattr("pccl.protocol.master.machine.snapshot", stands_still)
    for path in ("/healthz", "/status.json", "/metrics"):
        status, _, body = get(master, path)
        assert status == 503 and "has not answered for 0.05 s" in body
    assert get(master, "/")[0] == 200
    monkeypatch.setattr(limits, "HTTP_ANSWER_S", 20.0)
    goes_on.set()
    assert get(master, "/healthz")[0] == 200


def test_a_question_that_fails_ends_nothing(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "HTTP_KEPT_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr("pccl.protocol.master.machine.snapshot", lambda *_: 1 // 0)
        assert get(master, "/healthz")[0] == 500
    assert "ZeroDivisionError" in caplog.text
    assert get(master, "/healthz")[0] == 200


def test_the_port_is_free_at_the_end_despite_open_connections() -> None:
    node = pccl.MasterNode("127.0.0.1:0", http=0)
    assert node.http_address is None
    node.run()
    with client(node) as idle, client(node) as half:
        half.sendall(b"GET ")
        assert node.http_address is not None
        get(node, "/")  # by now those before it are known
        host, port = parse_address(node.http_address)
        node.interrupt()
        with contextlib.suppress(ConnectionError):
            assert idle.recv(1) == b"" == half.recv(1)
    again = pccl.MasterNode("127.0.0.1:0", http=f"{host}:{port}")
    with again:
        assert get(again, "/healthz")[0] == 200
    assert not [t for t in threading.enumerate() if t.name == "pccl-http"]


def test_the_command_logs_the_address_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    node = pccl.MasterNode("127.0.0.1:0", http=0)
    serving = threading.Thread(target=serve_until_signal, args=(node,))
    serving.start()
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return said.count("\n") == 2

    wait_until(is_said)
    assert said.splitlines()[1] == f"its run can be watched at http://{node.http_address}/"
    node.interrupt()
    serving.join()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = pccl.MasterNode("127.0.0.1:0", http=port)
        why = f"INVALID_USAGE: cannot serve HTTP on 127.0.0.1:{port}: "
        with pytest.raises(pccl.PCCLError, match=why) as failure:
            node.run()
        listed(f"PCCLError: {failure.value}")
    node.run()  # nothing was left of the first attempt
    node.interrupt()


def test_a_thread_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    before = set(threading.enumerate())
    for name in ("pccl-http", "pccl-master"):
        node = pccl.MasterNode("127.0.0.1:0", http=0)

        def refuse(thread: threading.Thread, refused: str = name) -> None:
            if thread.name == refused:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises(pccl.PCCLError, match="no thread could be started"):
                node.run()
        assert set(threading.enumerate()) <= before
        assert node.http_address is not None
        socket.create_server(parse_address(node.http_address)).close()


def test_no_memory_for_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.new_event_loop", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Web("127.0.0.1", 0, lambda: pytest.fail("nobody asks"))  # and the port is closed


PROGRAM = """
import os, socket, sys
import pccl
from pccl.support import parse_address
node = pccl.MasterNode("127.0.0.1:0", http=0)
node.run()
(wait, end), (ready, begin) = os.pipe(), os.pipe()
if not (child := os.fork()):
    os.write(begin, b"!")
    os.close(end)
    os.read(wait, 1)
    os._exit(0)
os.read(ready, 1)
address = parse_address(node.http_address)
node.interrupt()
socket.create_server(address, reuse_port=False).close()
os.close(end)
os.waitpid(child, 0)
print("free")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks there")
def test_a_forked_child_does_not_keep_the_port() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout == "free\n", ended.stderr


def test_links_have_two_labels() -> None:
    run = ManualRun(2)
    run.master.run.groups[0].rates = {(1, 2): 10**8}
    lines = exposition(run.master.status()).splitlines()
    rates = [line for line in lines if line.startswith("pccl_link_bandwidth_bytes_per_second{")]
    assert rates == ['pccl_link_bandwidth_bytes_per_second{src="1",dst="2"} 100000000']
