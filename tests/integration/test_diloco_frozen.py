"""A process of DiLoCo is frozen in the middle of a step: the others wait for the grace only."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peers.processes import Reporter  # noqa: E402
from peers.waiting import (  # noqa: E402
    Gate,
    pass_gate,
    wait_until,
)

import pccl  # noqa: E402
from pccl.diloco import DiLoCo  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform"),
]
STEPS = 4


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "grace_s", "heartbeats_s"),
    [
        ("sync", 1.0, 60.0),
        pytest.param("delayed", 1.0, 60.0, marks=SLOW),
        pytest.param("sync", 60.0, 2.5, marks=SLOW),
        pytest.param("delayed", 60.0, 2.5, marks=SLOW),
    ],
)
def test_the_others_do_not_wait_for_it_and_it_comes_back(
    mode: str,
    grace_s: float,
    heartbeats_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its deadline is over, or its connection is lost: it joins again in both cases."""
    frozen, comes_back = Gate(tmp_path / "frozen"), Gate(tmp_path / "comes back")
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", str(int(1000 * heartbeats_s)))
    with pccl.MasterNode("127.0.0.1:0") as master:
        words = Path(__file__), master.address, mode, grace_s
        where = [("others", comes_back.path)] * 2 + [("frozen", frozen.path)]
        peers = [Reporter(*words, *each, patience_s=60) for each in where]
        try:
            peers[2].wait_for(lambda report: report.get("waits", False))
            os.kill(peers[2].process.pid, signal.SIGSTOP)
            frozen.open()
            peers[0].wait_for(lambda report: report.get("contributors") == 2)
            os.kill(peers[2].process.pid, signal.SIGCONT)
            wait_until(lambda: any(not peer.accepted for peer in master.status().peers))
            comes_back.open()
            back = peers[2].wait_for(lambda report: report.get("rejoined", False))
            again = peers[2].wait_for(lambda report: report.get("contributors") == 3)
            same = [p.wait_for(lambda report: report.get("k") == again["k"]) for p in peers[:2]]
        finally:
            for gate in (frozen, comes_back):
                gate.open()
            for peer in peers:
                peer.kill()
    assert back["contributors"] == 0 and again["k"] > back["k"]
    assert [one["contributors"] for one in same] == [3, 3]
    assert {one["digest"] for one in same} == {again["digest"]}
    waited_s = [report["waited_s"] for report in peers[0].reports if "waited_s" in report]
    assert 0.5 < max(waited_s) < min(grace_s, heartbeats_s) + 2.0, "a busy machine takes its time"


def train(address: str, mode: str, grace_s: str, role: str, gate: str) -> None:
    """Reports each round until it is killed.

    The frozen one waits at its gate in the middle of the third round; the others wait at theirs
    after the first round without it.
    """
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pccl.Communicator(address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=STEPS,
            mode=mode,  # type: ignore[arg-type]
            min_peers=3,
            deadline_peers=2,
            grace=float(grace_s),
        )
        rounds = 0
        while True:
            if role == "frozen" and (rounds, diloco.inner_step) == (2, 2):
                say(waits=True)
                pass_gate(gate)
            model(torch.randn(2, 4)).pow(2).sum().backward()
            outer = diloco.step()
            if outer:
                rounds += 1
                say(
                    k=outer.outer_step,
                    contributors=outer.contributors,
                    rejoined=outer.rejoined,
                    waited_s=outer.total_s,
                    digest=diloco.state_digest(),
                )
                if role == "others" and outer.contributors == 2:
                    pass_gate(gate)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])
