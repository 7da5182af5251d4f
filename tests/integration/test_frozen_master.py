"""A master that does not run for a while: a stopped process, a machine that was asleep."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import Master
from puppets import Puppet, gathered, together

from pccl.runtime.server.pulse import Pulse

BEATS = {"PCCL_HEARTBEAT_MS": "200", "PCCL_HEARTBEAT_TIMEOUT_MS": "1000"}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pulse_tells_pauses_from_waiting() -> None:
    pulse = Pulse(2.0, [clock := Clock(), other := Clock()])
    clock.now_s = 110.0
    assert pulse.beat(10.0) == 0.0
    clock.now_s = 111.0
    other.now_s = 115.0  # it goes on while the machine sleeps
    assert pulse.beat(0.5) == 14.5
    other.now_s = 10.0
    assert pulse.beat(0.0) == 0.0
    clock.now_s = 113.0
    assert pulse.beat(0.0) == 0.0
    clock.now_s = 115.5
    assert pulse.beat(0.0) == 2.5
    assert Pulse(60.0).beat(0.0) == 0.0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
@pytest.mark.parametrize(
    ("journaled", "busy"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_master_that_was_stopped_goes_on_with_all_its_peers(
    journaled: bool, busy: bool, tmp_path: Path
) -> None:
    options = ["--state", str(tmp_path / "master.db")] if journaled else []
    master = Master(*options, **BEATS)
    puppets: list[Puppet] = []

    def start(group: int) -> Puppet:
        puppets.append(Puppet(master.address, group, **BEATS))
        return puppets[-1]

    try:
        gathered(start, [0, 0, 0])
        assert together(puppets, "insist", value=1.0) == [3.0] * 3
        if busy:  # one of them waits for the others when it happens
            puppets[0].begin("insist", value=2.0)
        master.process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2.5)  # all connections break
        master.process.send_signal(signal.SIGCONT)
        thawed_s = time.monotonic()
        for puppet in puppets[busy:]:
            puppet.begin("insist", value=2.0)
        assert [puppet.value() for puppet in puppets] == [6.0] * 3
        print(f"the run went on {time.monotonic() - thawed_s:.2f} s after the thaw")
        assert together(puppets, "world") == [[3, 3, 1, 3]] * 3
        if journaled:  # and it may be killed then
            master.kill()
            master.start()
            assert together(puppets, "insist", value=1.0) == [3.0] * 3
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
        for puppet in puppets:
            puppet.kill()
        master.kill()
