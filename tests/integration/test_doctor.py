"""`pccl doctor`, and the master's dial-back."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl.cli.main import main
from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.effects import Effect, Send
from pccl.protocol.master.inputs import Hello
from pccl.protocol.reach import cure, matters
from pccl.runtime import limits


def doctor(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pccl", "doctor", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


def line(text: str, title: str) -> str:
    """The finding of that title."""
    return next(each for each in text.splitlines() if each[5:].startswith(title))


def test_this_machine() -> None:
    code, text = doctor()
    assert code == 0
    assert line(text, "all_reduce").startswith("ok")
    for title in ("pccl", "python", "pyzmq", "numpy", "engine backend", "arithmetic"):
        assert line(text, title)


def test_a_master_that_reaches_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        code, text = doctor(master.address)
        assert code == 0, text
        assert "1 peers are in its run" in line(text, "master")
        for title in ("its version", "own port", "kernels", "clock"):
            assert line(text, title).startswith("ok"), text
        assert "the master reaches 127.0.0.1:" in text
        assert comm.are_peers_pending() is False, "it has joined"


def test_a_master_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_ADVERTISE", "240.0.0.1")
    monkeypatch.setattr(limits, "DIAL_S", 0.2)  # of the master, which is in this process
    with pccl.MasterNode("127.0.0.1:0") as master:
        code, text = doctor(master.address)
    assert code == 1
    assert line(text, "own port").startswith("BAD")
    assert "the master cannot reach 240.0.0.1:" in text and "PCCL_PORT_RANGE" in text


def test_a_name_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_ADVERTISE", "localhost")
    with pccl.MasterNode("127.0.0.1:0") as master:
        code, text = doctor(master.address)
    assert code == 0
    assert line(text, "own port").startswith("hint")
    assert "the master has not tried localhost:" in text


def test_no_master_and_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port
    code, text = doctor(f"127.0.0.1:{port}")
    assert code == 1
    assert f"nothing answers at 127.0.0.1:{port}" in line(text, "master")


def test_keys(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("ours", "foreign"):
        assert main(["keys", str(tmp_path / name)]) == 0
    key = (tmp_path / "ours" / "master.key").read_bytes()
    (tmp_path / "foreign" / "master.key").write_bytes(key)
    with pccl.MasterNode("127.0.0.1:0", security=tmp_path / "ours") as master:
        for name, expected in (("ours", 0), ("foreign", 1)):
            monkeypatch.setenv("PCCL_CURVE_DIR", str(tmp_path / name))
            code, text = doctor(master.address)
            assert code == expected, text
        assert "does not have this machine's key" in line(text, "master")


# ---- what the master makes of a dial ----


def peer(host: str, machine: str = "a", ipc: str = "x") -> m.PeerInfo:
    return m.PeerInfo(1, 0, host, 5000, ipc, machine)


def test_when_it_matters_that_a_peer_cannot_be_reached() -> None:
    seen, elsewhere = "203.0.113.7", peer("198.51.100.2", "b")
    assert matters(peer(seen), seen, [elsewhere])
    assert not matters(peer(seen), seen, []), "nobody is there yet"
    assert not matters(peer(seen), seen, [peer(seen)]), "all are on one machine"
    assert matters(peer(seen), seen, [peer(seen, ipc="")]), "which speak TCP all the same"
    assert matters(peer("1.1.1.1"), seen, [elsewhere]), "a public address is the same for all"
    assert not matters(peer("192.168.1.5"), seen, [elsewhere]), "a network of their own"
    assert not matters(peer("my.host"), seen, [elsewhere]), "a name is not resolved"


def said(actions: list[Effect]) -> list[m.MasterMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_an_unreachable_newcomer_is_warned_or_refused() -> None:
    master = Master(1, lambda work, parts: b"", secret=b"s")
    hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "", 5000, "x", "a", b"")
    first = said(master.feed(Hello(b"1", hello, "203.0.113.7", "no answer")))[0]
    assert isinstance(first, m.Welcome)
    assert "cannot be reached at 203.0.113.7:5000" in first.warning
    near = said(master.feed(Hello(b"2", hello, "203.0.113.7", "no answer")))[0]
    assert isinstance(near, m.Welcome), "it is on the same machine"
    remote = msgspec.structs.replace(hello, machine="b")
    (refused,) = said(master.feed(Hello(b"3", remote, "198.51.100.2", "no answer")))
    assert isinstance(refused, m.Refused)
    assert refused.result == pccl.Result.RANK_CONNECTION_FAILED.value
    assert "198.51.100.2:5000" in refused.why and "PCCL_ADVERTISE" in refused.why
    (other_group,) = said(
        master.feed(
            Hello(b"4", msgspec.structs.replace(remote, group=7), "198.51.100.2", "no answer")
        )
    )
    assert isinstance(other_group, m.Welcome), "nobody of its group needs to reach it"
    (reached,) = said(master.feed(Hello(b"5", remote, "198.51.100.2")))
    assert isinstance(reached, m.Welcome) and not reached.warning


def test_the_remedy_for_a_loopback_address() -> None:
    assert "connect to the master by an address that all can reach" in cure(peer("127.0.0.1"))
    assert "PCCL_PORT_RANGE" in cure(peer("203.0.113.7"))
