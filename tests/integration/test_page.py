"""The page that shows a run: what a browser makes of it, and that it makes nothing else."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from simulation.manual import WORK, ManualRun

from pccl.protocol import messages as m
from pccl.protocol.master import Status
from pccl.protocol.master.status import ClientStatus, EventStatus, WeightsStatus
from pccl.runtime import limits
from pccl.runtime.server import web
from pccl.runtime.server.web import Web

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


def a_run() -> Status:
    """Peer 3 is waited for, and a newcomer waits for all."""
    run = ManualRun(3)
    run.say(b"1", m.StartVote(2, 7, WORK))
    run.say(b"2", m.StartVote(2, 7, WORK))
    run.join(b"4")
    run.master.now_s = 75.0
    run.master.run.groups[0].rates = {(1, 2): 10**8, (3, 1): 5 * 10**6}
    events = (EventStatus(20.0, "the first"), EventStatus(7.0, "the latest"))
    return msgspec.structs.replace(run.master.status(), events=events)


@contextmanager
def shown(status: Status | None) -> Iterator[str]:
    """The address at which this status is shown; None: no master answers."""

    def ask() -> Future[Status]:
        future: Future[Status] = Future()
        if status is not None:
            future.set_result(status)
        return future

    web = Web("127.0.0.1", 0, ask)
    web.start()
    yield web.address
    web.close()


def seen(address: str, home: Path) -> str:
    """The document after some seconds in a browser. Checks that the browser reports no errors."""
    assert BROWSER is not None
    options = ["--headless", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={home}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    work = ["--virtual-time-budget=4000", "--dump-dom", f"http://{address}/"]
    ended = subprocess.run(
        [BROWSER, *options, *work], capture_output=True, text=True, timeout=50, check=True
    )
    complaints = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in complaints if "503 (Service" not in line] == []
    return ended.stdout.partition("<script>")[0]


def test_the_page_loads_nothing_from_other_hosts() -> None:
    body, _, policy, _ = web.load()
    text = body.decode()
    assert policy.count("'sha256-") == 2 and "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ") and "frame-ancestors 'none'" in policy
    assert len(web.INLINE.findall(text)) == 2 == len(re.findall("<(?:script|style)", text))
    addresses = re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"')>]*)""", text)
    assert {*addresses} <= {"data:,", "status.json", "metrics", "events", "healthz", "#${tip}"}
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]  # a name
    unsafe = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bon[a-z]+=|style="
    assert not re.search(unsafe, text)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
@in_a_browser
def test_it_shows_why_a_run_waits(tmp_path: Path) -> None:
    with shown(a_run()) as address:
        text = seen(address, tmp_path)
    waits = text.split('id="waits"')[1].split("<h2>")[0]
    assert re.search(r'class="card wait late".*?75\.0 s.*? in all_reduce\(1000 elements', waits)
    assert ">peer 3 (10.0.0.1:1) must enter it<" in waits
    assert '<progress max="3" value="2"' in waits
    assert "must call update_topology()" in waits
    rows = re.findall(r'<tr class="(\w*)"><td class="" data-name="peer">(\d)', text)
    assert rows == [("", "1"), ("", "2"), ("missing", "3"), ("", "4")]
    ring = re.findall(r'<g class="(\w*)">.*?>(\d)</text>', text.replace("<g>", '<g class="">'))
    assert ring == [("stands", "1"), ("stands", "2"), ("missing", "3")]
    assert text.count('marker-end="url(#tip-1-2-3)"') == 3
    assert re.findall(r"<title>(.*?)</title>", text.partition("<body>")[2]) == [
        "1 → 2: 800 Mbit/s",
        "2 → 3: not measured",
        "3 → 1: 40 Mbit/s",
    ]
    happened = ["7.0 s ago: the latest", "20.0 s ago: the first"]
    assert re.findall(r'<li class="">(.*?)</li>', text) == happened
    assert ">slowest link 3 → 1: 40 Mbit/s<" in text


@pytest.mark.slow
@in_a_browser
def test_it_shows_the_followers_of_the_weights(tmp_path: Path) -> None:
    publisher = ClientStatus(1, "10.0.0.9", 41, 12, 12, None, None, False, None, (3,))
    subscriber = ClientStatus(3, "fd00::3", 41, 11, None, 12, 1, True, 12_300_000, ())
    weights = WeightsStatus(12, {11: 1, 12: 2}, (publisher, subscriber), 2)
    with shown(msgspec.structs.replace(a_run(), weights=weights)) as address:
        text = seen(address, tmp_path).split('id="weights"')[1].split("</section>")[0]
    assert text.startswith(">") and ">version 12 · 2 with version 12 · 1 with version 11<" in text
    rows = [re.findall(r">([^<]*)</td>", row) for row in text.split("<tbody")[1].split("<tr ")[1:]]
    assert rows == [
        ["1", "", "10.0.0.9:41", "12", "12", "", "", "", "3"],
        ["3", "", "[fd00::3]:41", "11", "", "12", "1, slowly", "98 Mbit/s", ""],
        [],
    ]
    with shown(a_run()) as address:
        assert '<section id="weights" hidden="">' in seen(address, tmp_path)


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("peers", [2, 10, 11, 20, 21])
def test_the_arrows_of_a_ring_lead_from_each_peer_to_the_next(peers: int, tmp_path: Path) -> None:
    with shown(ManualRun(peers).master.status()) as address:
        text = seen(address, tmp_path)
    number = r"([\d.e-]+)"
    arcs = re.findall(rf'd="M{number} {number}A80 80 0 0 1 {number} {number}" marker', text)
    assert len(arcs) == (peers if peers <= 20 else 0)
    for arc in arcs:
        x, y, u, v = (float(place) - 110 for place in arc)
        turn = math.atan2(x * v - y * u, x * u + y * v) % (2 * math.pi)
        assert 0.0 < turn < 2 * math.pi / peers, "clockwise, and not around the whole ring"


@pytest.mark.slow
@in_a_browser
def test_texts_of_peers_are_escaped(tmp_path: Path) -> None:
    status = a_run()
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    waits = tuple(msgspec.structs.replace(w, why=markup, call=markup) for w in status.waits)
    peers = tuple(msgspec.structs.replace(p, host=markup) for p in status.peers)
    with shown(msgspec.structs.replace(status, waits=waits, peers=peers)) as address:
        text = seen(address, tmp_path)
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") == 2 * len(waits) + len(peers)


@pytest.mark.slow
@in_a_browser
def test_it_shows_that_the_master_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_ANSWER_S", 0.05)
    with shown(None) as address:
        text = seen(address, tmp_path)
    assert "the master does not answer: the master has not answered for 0.05 s" in text
