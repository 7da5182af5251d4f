"""`pccl status` and `pccl top` show a run, and say what is wrong where none is shown."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from simulation.manual import WORK, ManualRun

import pccl
from pccl.cli import main as cli
from pccl.cli import status as command
from pccl.cli import terminal as terminal_codes
from pccl.protocol import messages as m
from pccl.protocol.master import Status
from pccl.protocol.master.status import WAITS_MAX, ClientStatus, WeightsStatus
from pccl.runtime.server.web import exposition


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Somebody at a port answers this to one request; the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                request = b""
                while not request.endswith(b"\r\n\r\n"):  # what is left unread resets it
                    request += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def printed(status: Status) -> list[str]:
    """The lines, after they have been written and read again."""
    return list(command.lines(msgspec.json.decode(msgspec.json.encode(status), type=Status)))


def test_a_master_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pccl.MasterNode("127.0.0.1:0", http=0) as master, pccl.Communicator(master.address):
        assert master.http_address is not None
        assert cli.main(["status", master.http_address]) == 0
        first, *_, heads, peer, gap, registered, accepted = capsys.readouterr().out.splitlines()
        assert gap == "" and registered.endswith(" of group 0 registered")
        assert re.fullmatch(
            r"[\d.]+ s ago: joined: peer 1 \([^ ]+, 127.0.0.1:\d+\); 1 peer now", accepted
        )
        assert first.startswith(f"pccl {pccl.__version__}; peers: 1 accepted, 0 pending, 1 joined,")
        assert heads.split()[:2] == ["peer", "name"] and re.match(r"1 +[^ ]+:\d+ +127.0.0.1:", peer)
        port = master.http_address.rpartition(":")[2]
        assert cli.main(["status", "--json", port]) == 0
        assert json.loads(capsys.readouterr().out)["peers"][0]["peer"] == 1
        assert cli.main(["doctor", "--explain", master.http_address]) == 0
        assert capsys.readouterr().out == "no collective has committed yet\n"


CALL = "all_reduce(1000 elements of float32, sum) with tag 0"


def test_the_printed_status() -> None:
    run = ManualRun(3)
    for conn, now_s in ((b"1", 1.0), (b"2", 2.0)):
        run.master.now_s = now_s
        run.say(conn, m.StartVote(2, 7, WORK))
    run.join(b"4")
    run.master.now_s = 123.45
    call = "all_reduce(1000 elements of float32, sum) with tag 7"
    must = "peer 1 (10.0.0.1:1), peer 2 (10.0.0.1:1), peer 3 (10.0.0.1:1) must call"
    status = run.master.status()
    (group,) = status.groups
    measured = msgspec.structs.replace(group.rings[0], rates=(10**8, None, 5 * 10**6))
    (fast,) = printed(
        msgspec.structs.replace(
            status, waits=(), peers=(), groups=(msgspec.structs.replace(group, rings=(measured,)),)
        )
    )[3:]
    assert fast.endswith("1 -(800 Mbit/s)-> 2 -> 3 -(40 Mbit/s)-> 1, weight 1")
    lines = printed(status)
    peers = "peers: 3 accepted, 1 pending, 3 joined, 0 lost"
    assert lines[0].endswith(f"{peers}; collectives: 0 committed, 0 aborted")
    enter = "peer 3 (10.0.0.1:1) must enter it"
    assert lines[2] == f"122 s: 2 in {call} of group 0 (entering): {enter}"
    assert lines[3].startswith(f"121 s: 1 in connect() (admission): {must} update_topology()")
    assert lines[5:7] == [
        "group  peers  epoch  revision  held by  running  goodput  rings",
        "0      3      2                0        0                 1 -> 2 -> 3 -> 1, weight 1",
    ]
    newcomer = "connect(), admission, 121 s"
    for line, number, late, in_call in zip(
        lines[9:],
        (1, 2, 3, 4),
        ("121 s by now  0 µs", "121 s by now  0 µs", "122 s by now  0 µs", "0 µs          0 µs"),
        (f"{call}, entering, 122 s", f"{call}, entering, 121 s", "", newcomer),
        strict=True,
    ):
        assert line.startswith(f"{number}           10.0.0.1:1  0 ")
        assert re.sub(r"^.* ago +", "", line) == f"{late:27}{in_call}".strip()


def test_progress_of_collectives_and_cost_of_failures() -> None:
    run = ManualRun(2)
    run.master.now_s = 10.0
    run.everyone(m.FinishVote(run.start(), False, "a lane was cut"))
    run.master.now_s = 15.0
    seq = run.start()
    run.say(b"2", m.Progress(seq, 355))
    run.master.now_s = 20.0
    status = run.master.status()
    heard = [msgspec.structs.replace(peer, heartbeat_s=0.25) for peer in status.peers]
    lines = printed(msgspec.structs.replace(status, peers=tuple(heard)))
    assert lines[2].endswith(" must finish it; peer 2 has 35.5 % of it")
    assert lines[5].split()[4:7] == ["1", "50.0", "%"]
    end = f" 0.2 s ago  5.0 s by now  0 µs         {CALL}, running, 5.0 s, 36 %"
    assert lines[-1].endswith(end)


WEIGHTS = WeightsStatus(
    12,
    {0: 1, 11: 1, 12: 2},
    (
        ClientStatus(1, "10.0.0.9", 4001, 12, 12, None, None, False, None, (3,)),
        ClientStatus(3, "10.0.0.11", 4001, 11, None, 12, 1, True, 12_300_000, ()),
        ClientStatus(4, "fd00::4", 4001, 0, None, 12, None, False, None, ()),
    ),
    2,
)


def test_publishers_and_followers_of_weights() -> None:
    status = msgspec.structs.replace(ManualRun(0).master.status(), weights=WEIGHTS)
    assert printed(status)[1:] == [
        "",
        "weights: version 12; 2 with version 12, 1 with version 11, 1 with none",
        "client  name  address         has  published  fetches  from        gives to  "
        "last fetched at",
        "1             10.0.0.9:4001   12   12                              3",
        "3             10.0.0.11:4001  11              12       1, slowly             98 Mbit/s",
        "4             [fd00::4]:4001                  12       nobody yet",
        "and 2 more",
    ]
    none = msgspec.structs.replace(status, weights=WeightsStatus(0, {}, (), 0))
    assert printed(none)[2:] == ["weights: none yet; nobody follows"]
    metrics = exposition(status)
    for line in (
        "pccl_weights_version 12",
        'pccl_weights_followers{has="newest"} 2',
        'pccl_weights_followers{has="older"} 1',
        'pccl_weights_followers{has="none"} 1',
    ):
        assert f"{line}\n" in metrics
    assert "pccl_weights_version 0\n" in exposition(ManualRun(0).master.status())


def test_a_master_with_very_much_or_nothing_to_show() -> None:
    run = ManualRun(2)
    for tag in range(WAITS_MAX + 3):
        run.say(b"1", m.StartVote(tag + 2, tag, WORK))
    assert "and 3 more calls wait" in printed(run.master.status())
    status = ManualRun(0).master.status()
    (only,) = printed(status)
    assert only.endswith("collectives: 0 committed, 0 aborted")
    recovering = msgspec.structs.replace(status, recovering=True, awaited=(3, 5))
    assert printed(recovering)[1] == "the master was restarted, and waits for peer 3, peer 5"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", ": Remote end closed connection without response"),
        (b"\xff\0\0\0\0\0\0\0\1\x7f\3\0\r\n", "does not speak HTTP: BadStatusLine"),
        (http(b"it is\n", "503 Service Unavailable"), "answers 503 Service Unavailable: it is"),
        (http(b"<html>"), "is not a master of this version of pccl: JSON is malformed"),
        (http(b'{"version": "9"}'), "is not a master of this version of pccl: Object missing"),
        (http(b'{"version": "\xff"}'), "is not a master of this version of pccl"),
    ],
)
def test_another_service_answers(
    answer: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as address:
        assert cli.main(["status", address]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith("pccl status: ") and address in err and why in err


def test_no_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(command, "PATIENCE_S", 0.05)
        assert cli.main(["status", address]) == 2
        assert f"no status from {address}: it takes too long." in capsys.readouterr().err
    assert cli.main(["status", address]) == 2
    why = f"no status from {address}: Connection refused. Has the master been started with --http"
    assert why in capsys.readouterr().err


def test_control_characters_of_a_stranger_are_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = msgspec.structs.replace(ManualRun(0).master.status(), version="\x1b[2J\u202e")
    with answering(http(msgspec.json.encode(status))) as address:
        assert cli.main(["status", address]) == 0
    assert capsys.readouterr().out.startswith("pccl ?[2J?; peers: 0")
    with answering(http(b"\x1b[2J\r\nx", "500 \x1b[2J")) as address:
        assert cli.main(["status", address]) == 2
    assert "\x1b" not in capsys.readouterr().err


# ---- pccl top ----


class Terminal(io.StringIO):
    """The text written to a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One of 6 lines; in the test itself, for pytest changes stdout after fixtures."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 6)))
    return screen


def looks(monkeypatch: pytest.MonkeyPatch, *answers: Status | str) -> list[int]:
    """`pccl top` gets these answers, or errors; then Ctrl-C. The pauses that it makes."""
    coming, pauses = iter(answers), []

    def answer(host: str, port: int) -> command.Answer:
        found = next(coming)
        if isinstance(found, str):
            raise OSError(found)
        return command.Answer(b"", found)

    def pause(interval: int) -> None:
        pauses.append(interval)
        if len(pauses) == len(answers):
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "ask", answer)
    monkeypatch.setattr(command.time, "sleep", pause)
    return pauses


def test_top_shows_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    four, none = ManualRun(4).master.status(), ManualRun(0).master.status()
    pauses = looks(monkeypatch, four, "it is gone", "it is gone for good", none)
    assert cli.main(["top", "--interval", "7", "1"]) == 0
    assert pauses == [7, 7, 7, 7]
    text = screen.getvalue()
    assert text.startswith(terminal_codes.BEGIN) and text.endswith(terminal_codes.END)
    first, second, third, fourth = text.split(terminal_codes.HOME)[1:]
    rows = first.split("\n")
    assert len(rows) == 6 and rows[-1].startswith("and 5 more lines")
    assert all(len(row.partition("\x1b")[0]) < 40 for row in rows)
    began = re.match(r"since \d\d:\d\d:\d\d: ", second)
    assert began is not None and second[began.end() :].startswith("it is gone\x1b[K\npccl ")
    assert third.startswith(f"{began[0]}it is gone for good"[:39]), "since the first failure"
    assert fourth.startswith("pccl ") and "\n" not in fourth


def test_top_without_an_answer_or_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = terminal(monkeypatch)
    looks(monkeypatch, "no status from there")
    assert cli.main(["top", "1"]) == 2
    assert screen.getvalue() == "" and "no status from there" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert cli.main(["top", "1"]) == 2
    assert "it needs a terminal" in capsys.readouterr().err
