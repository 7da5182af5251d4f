"""Names of peers, and what logs and status say about who is there, who is gone, and who is late."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import scripts
from peers.cluster import grow, in_threads
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.protocol.master.status import PeerStatus

WARNED = Path(__file__).resolve().parents[1] / "support" / "programs" / "warned.py"
LOST = """
import os, sys
import numpy as np
import pccl
comm = pccl.Communicator(sys.argv[1], name="mortal")
comm.connect()
comm.all_reduce(np.ones(4))
sys.stdin.read()
os._exit(7)
"""


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_names_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_NAME", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pccl.MasterNode("127.0.0.1:0") as master:

        def called(**kwargs: str) -> str:
            with pccl.Communicator(master.address, **kwargs) as comm:  # type: ignore[arg-type]
                return comm.peers[0]

        assert f":{os.getpid()}, 127.0.0.1:" in called()
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert f":{os.getpid()}/3, 127.0.0.1:" in called()
        monkeypatch.setenv("PCCL_NAME", "from the environment")
        assert "(from the environment, 127.0.0.1:" in called()
        assert "(given, 127.0.0.1:" in called(name="given")
    for name in ("x" * 65, "a\nb", "\x1b[31m"):
        with pytest.raises(ValueError, match="name is"):
            pccl.Communicator("127.0.0.1:1", name=name)


def test_a_mismatch_marks_the_reading_peer_with_you() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comms = [pccl.Communicator(master.address, name=name) for name in ("left", "right")]
        comms[0].connect()
        in_threads([comms[1].connect, lambda: grow(comms[0], 2)])

        def fails(comm: pccl.Communicator, n: int) -> str:
            with pytest.raises(pccl.MismatchError) as caught:
                comm.all_reduce(np.ones(n))
            return str(caught.value)

        texts = in_threads([lambda i=i: fails(comms[i], 4 + i) for i in range(2)])  # type: ignore[misc]
        assert "peer 1 (you, left, " in texts[0] and "peer 2 (right, " in texts[0]
        assert "peer 1 (left, " in texts[1] and "peer 2 (you, right, " in texts[1]
        for comm in comms:
            comm.close()


def test_losses_and_joins_are_logged_with_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pccl")
    with pccl.MasterNode("127.0.0.1:0") as master:
        here = pccl.Communicator(master.address, name="survivor")
        here.connect()
        program = [sys.executable, "-c", LOST, master.address]
        mortal = subprocess.Popen(program, stdin=subprocess.PIPE)
        grow(here, 2)
        here.all_reduce(np.ones(4))
        assert said(caplog) == [], "a run that begins is no news"
        mortal.communicate(timeout=PATIENCE_S)
        assert mortal.returncode == 7
        wait_until(lambda: sum("lost: " in text for text in said(caplog)) == 2)
        at_peer, at_master = sorted(said(caplog), key=lambda text: text.startswith("master"))
        why = "its connection broke, because its process ended"
        lost = rf"lost: peer 2 \(mortal, 127.*\): {why}.*"
        assert re.match(f"peer 1: {lost}; 1 in its group now", at_peer)
        assert re.match(f"master: {lost}; 1 peer now", at_master)
        caplog.clear()
        guest = pccl.Communicator(master.address, name="guest")
        in_threads([guest.connect, lambda: grow(here, 2)])
        assert any("joined: peer 3 (guest" in text for text in said(caplog))
        guest.close()
        wait_until(lambda: any("left: peer 3 (" in text for text in said(caplog, logging.INFO)))
        here.close()
    assert [text for text in said(caplog) if "lost" in text] == [], "to leave is no loss"


def test_a_late_peer_is_named() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comms = [pccl.Communicator(master.address, name=name) for name in ("early", "late")]
        comms[0].connect()
        in_threads([comms[1].connect, lambda: grow(comms[0], 2)])

        def call(index: int) -> None:
            comms[index].all_reduce(np.ones(4))

        in_threads([lambda i=i: call(i) for i in range(2)])  # type: ignore[misc]

        def late() -> None:
            wait_until(lambda: bool(master.status().waits))
            wait_until(lambda: peers()["late"].awaited_s > 0.2)
            call(1)

        def peers() -> dict[str, PeerStatus]:
            return {peer.name: peer for peer in master.status().peers}

        in_threads([lambda: call(0), late])
        found = peers()
        assert found["late"].late_total_s > 0.2 > found["early"].late_total_s
        assert found["late"].late_s > 0.02 and not found["late"].awaited_s
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("method", ["DiLoCo", "DDP"])
def test_a_training_process_is_warned_of_a_loss_and_of_a_newcomer(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any setting of the log, at the peers and at the master."""
    pytest.importorskip("torch")
    started: list[Any] = []

    def start(master: str, name: str) -> Any:
        env = {"PCCL_NAME": name, "PCCL_MASTER": master}
        started.append(scripts.start(WARNED, method, env=env))
        return started[-1]

    def wait_for(peer: Any, *wanted: str) -> None:
        """Until it has said all of that, in any order: its log is written by another thread."""
        missing = {*wanted}
        for line in peer.stdout:
            missing -= {text for text in missing if text in line}
            if not missing:
                return
        raise AssertionError(missing)

    with pccl.MasterNode("127.0.0.1:0") as master:
        try:
            survivor = start(master.address, "survivor")
            mortal = start(master.address, "mortal")
            wait_for(survivor, "2 peers\n")
            mortal.kill()
            wait_for(survivor, "WARNING peer ", "1 peers\n")
            start(master.address, "newcomer")
            wait_for(survivor, ": joined: peer 3 (newcomer, ", "2 peers\n")
        finally:
            for peer in started:
                peer.kill()
                peer.wait()
                peer.stdin.close()
                peer.stdout.close()
    told = [text for text in said(caplog) if text.startswith("master: ")]
    assert re.match(r"master: lost: peer [12] \(mortal, .*; 1 peer now", told[0])
    assert re.match(r"master: joined: peer 3 \(newcomer, .*; 2 peers now", told[1])
