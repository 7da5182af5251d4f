"""A receiver of shared state while no data arrives, without peers or an engine."""

from __future__ import annotations

import numpy as np

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fetched, Follow
from pccl.runtime.client.call import Call
from pccl.runtime.client.sync import Synchronization
from pccl.tensors import Buffer


class Client:
    """A peer whose clock is set by the test, and which only counts its reports."""

    serve_limit = 0
    peer = None

    def __init__(self) -> None:
        self.time_s, self.reports = 0.0, 0

    def now(self) -> float:
        return self.time_s

    def sync(self, *_: object) -> None:
        """It offers its content."""

    def fetch(self, *_: object) -> int:
        return 7

    def remind(self, *_: object) -> None:
        """It repeats requests."""

    def post(self, event: object) -> None:
        self.reports += 1


def test_it_soon_reports_that_its_holders_cannot_be_reached_however_often_that_happens() -> None:
    client, memory = Client(), Buffer.of(np.zeros(4, np.float32))
    manifest = m.Manifest(0, 0, (m.Entry("x", memory.dtype.value, 4, False, b""),))
    one = Synchronization(
        client,  # type: ignore[arg-type]
        Call(1),
        manifest,
        [memory],
        None,
        lambda entries: None,
        lambda synced, entries: None,
    )
    steps = one.run()
    next(steps)
    waited_s = []
    for seq in range(1, 20):
        plan = m.SyncPlan(1, seq, (), (2,), (0,), (bytes(16),))
        steps.send(Follow(1, plan))
        failed_s, before = client.time_s, client.reports
        pause_s = steps.send(Fetched(1, seq, False, "a wall"))
        while client.reports == before:
            client.time_s += pause_s
            pause_s = steps.send(None)
        waited_s.append(client.time_s - failed_s)
    assert waited_s[0] < waited_s[1] < waited_s[2], (
        "its holders may have died, as the master knows soon"
    )
    assert max(waited_s) < 10
