"""Makes every fallible libc call fail, at a peer and at the master, in runs of real processes.

For each fault (inject/faults.py) a run is played (inject/runs.py): that process gets an error, or
dies where libzmq aborts, or goes on; all others get through the story, and nothing hangs. The
default suite has a sample; `pytest -m slow tests/integration/test_injection.py` plays thousands.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inject.faults import FOR_EVER, Fault
from peers.waiting import PATIENCE_S

INJECT = Path(__file__).resolve().parents[1] / "support" / "inject"
LIMIT_S = 30.0  # for one run, see runs.py
SETTINGS = {
    "RUN_LIMIT_S": str(LIMIT_S),
    "PCCL_HEARTBEAT_MS": "500",
    "PCCL_HEARTBEAT_TIMEOUT_MS": "3000",
    "PCCL_MASTER_PATIENCE_S": "15",
    "PCCL_LOG_LEVEL": "WARN",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
# What a peer's program may be told; a MemoryError and an OSError may come from anywhere, and the
# interpreter and numpy raise others too where they have no memory (RuntimeError, SystemError).
TOLD = ("PCCLError", "KickedError", "MasterLostError", "MemoryError", "OSError")
Result = dict[str, Any]


class Player:
    """A process that plays runs: what it is told, one at a time."""

    def __init__(self, library: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(INJECT / "runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SETTINGS, "LD_PRELOAD": str(library)},
        )
        self._results: queue.Queue[Result] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._results.put(json.loads(line))

    def play(self, fault: Fault) -> Result:
        """One run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fault.record()) + "\n")
        self.process.stdin.flush()
        return self._results.get(timeout=2 * LIMIT_S)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=2 * LIMIT_S)
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """It has inject/fail.c preloaded."""
    compiler = shutil.which("cc")
    if compiler is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("calls are made to fail by a library in C that glibc loads first")
    library = tmp_path_factory.mktemp("inject") / "fail.so"
    command = [compiler, "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-o", str(library)]
    subprocess.run([*command, str(INJECT / "fail.c"), "-ldl"], check=True, timeout=PATIENCE_S)
    made = Player(library)
    yield made
    made.close()


def wrong(fault: Fault, result: Result) -> str:
    """The violation in a run's result; empty if there is none."""
    how, stood = result["how"], result["stood"]
    if hangs_in_the_interpreter(fault, result) or shuts_newcomers_out(fault, result):
        return ""
    if stood and not is_its_own(fault, stood):
        return f"{stood}\n{result['stacks']}"
    if result["disagreement"]:
        return f"the peers disagree: {result['disagreement']}"
    if fault.at == "master" and result["restarted"] and how == "status 0":
        return "the master ended by itself, with status 0"
    if how == "runs" and not stood:
        return "it neither goes on nor ends"
    interpreter = fault.kinds == "memory" and fault.module in ("python", "multiarray")
    if ":" in how and how.partition(":")[0] not in TOLD and not interpreter:
        return f"its program was told {how}"
    if "internal error" in how and not interpreter:
        return how
    if how.startswith("SIG") and not may_abort(fault, result):
        return f"it died by {how}: {result['log']}"
    return ""


def hangs_in_the_interpreter(fault: Fault, result: Result) -> bool:
    """CPython's `Thread.start` waits for ever for a thread that had no memory to begin."""
    waits = re.search(r"threading.py\", line \d+ in start\n", result["stacks"].get(fault.at, ""))
    return fault.module == "python" and waits is not None


def shuts_newcomers_out(fault: Fault, result: Result) -> bool:
    """A master that has no descriptors for ever lets nobody in, and serves those that are there.

    Newcomers wait, or their `connect` says that the master is silent.
    """
    said, stood = result["stacks"].get("master", ""), result["stood"]
    lets_nobody_in = fault.at == "master" and fault.width == FOR_EVER and "accept" in fault.kinds
    waits = "first peers do not take steps" in stood or "newcomer takes no steps" in stood
    waits = waits or ("connect: MASTER_CONNECTION_FAILED" in stood and "said nothing for" in stood)
    served = "existing ones are served" in said and "it did not run for" not in said
    return lets_nobody_in and waits and served


def is_its_own(fault: Fault, stood: str) -> bool:
    """Whether a peer without the fault was told of what the fault has done to its connection.

    A connection between it and the master that is reset at the master's end is its connection.
    """
    return fault.at == "master" and fault.kinds in ("send", "receive") and "KickedError" in stood


def may_abort(fault: Fault, result: Result) -> bool:
    """libzmq aborts where it has no memory, no thread, or no descriptor for what it cannot miss.

    While Python prints where its threads stood then, they go on, and one may crash.
    """
    calls = {"memory", "thread", "event", "epoll", "accept", "socket", "pair"}
    aborted = result["how"] == "SIGABRT" or "Fatal Python error: Aborted" in result["log"]
    return aborted and bool(calls & set(fault.kinds.split("+")))


def check(player: Player, faults: list[Fault]) -> None:
    """Plays them all, and tells of all that went wrong."""
    results = [(fault, player.play(fault)) for fault in faults]
    found = [(fault, why) for fault, result in results if (why := wrong(fault, result))]
    assert not found, "\n".join(f"{fault}: {why}" for fault, why in found)


LISTENS = 3  # the socket by which a peer's engine listens, after what Python has asked the system
SAMPLE = {
    "memory of the C core": [
        Fault("peer1", "memory", "_core", 1),
        Fault("peer1", "memory", "_core", 25, tcp=True),
        Fault("peer1", "memory", "_core", 60),
        Fault("newcomer", "memory", "_core", 40, tcp=True),
    ],
    "other memory": [
        Fault("peer1", "memory", "libzmq", 200),
        Fault("master", "memory", "libzmq", 100),
        Fault("peer1", "memory", "multiarray", 40),
        Fault("peer1", "memory", "python", 169),
    ],
    "descriptors": [
        Fault("peer1", "socket", nth=2),
        Fault("peer1", "socket", nth=LISTENS),
        Fault("peer1", "pair", nth=1),
        Fault("newcomer", "event", nth=7),
        Fault("newcomer", "event", nth=13),
        Fault("newcomer", "event", nth=20, width=FOR_EVER, tcp=True),
        Fault("newcomer", "directory", nth=1),
    ],
    "connections": [
        Fault("newcomer", "lookup", nth=2, tcp=True),
        Fault("newcomer", "thread", nth=16),
        Fault("peer1", "send", "libzmq", 20, tcp=True),
        Fault("master", "accept", nth=2),
        Fault("master", "receive", "libzmq", 60),
    ],
    "the master": [
        *(Fault("master", "event", nth=nth) for nth in (15, 18)),
        Fault("master", "socket", nth=3),
        Fault("master", "thread", nth=3),
        Fault("master", "journal_write", nth=4),
    ],
}


LONG = {"connections", "descriptors"}  # several seconds each


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=[pytest.mark.slow] if group in LONG else []) for group in SAMPLE],
)
def test_a_sample_of_calls_fails(player: Player, group: str) -> None:
    check(player, SAMPLE[group])


def test_calls_do_fail(player: Player) -> None:
    """The harness does what it says: calls are counted, the chosen one fails, others do not."""
    result = player.play(Fault("peer1", "socket", nth=LISTENS))
    assert (result["seen"]["calls"], result["seen"]["hits"]) == (LISTENS, 1)
    assert "Too many open files" in result["how"]
    result = player.play(Fault("peer1", "memory", "_core", sites=True))
    assert (result["seen"]["hits"], result["how"]) == (0, "status 0")
    assert len(result["seen"]["sites"]) > 10
    assert not result["stood"] and not result["disagreement"]


# ---- all of them ----

KINDS = [  # of calls, and from where
    *(("memory", module) for module in ("_core", "libzmq", "multiarray", "python")),
    *((kind, "") for kind in ("socket", "pair", "event", "epoll", "accept", "connect")),
    ("lookup", "_socket"),  # of names, in Python; libzmq is given addresses, which cannot fail so
    *((kind, "") for kind in ("thread", "bind", "listen", "directory")),
    *((kind, "libzmq") for kind in ("send", "receive")),
]
JOURNAL = [(f"journal_{call}", "") for call in ("open", "write", "sync", "truncate")]
EACH = [
    *(("peer1", kind, module, tcp) for kind, module in KINDS for tcp in (False, True)),
    *(("newcomer", kind, module, True) for kind, module in KINDS),
    *(("master", kind, module, False) for kind, module in KINDS + JOURNAL),
]
CALLS_MAX = 40  # more than so many calls are not made to fail one by one


def every(player: Player, at: str, kinds: str, module: str, tcp: bool) -> Iterator[Fault]:
    """Every call; of many, the first and one in the middle of each place in the code."""
    sites = module not in ("python", "multiarray")
    dry = player.play(Fault(at, kinds, module, sites=sites, tcp=tcp))
    assert not dry["stood"], dry
    calls, places = dry["seen"]["calls"], dry["seen"]["sites"]
    if calls <= CALLS_MAX:
        for nth in range(1, calls + 1):
            yield Fault(at, kinds, module, nth, tcp=tcp)
    elif sites and len(places) > 3:
        for site, count, _ in places:
            for nth in sorted({1, (count + 1) // 2}):
                yield Fault(at, kinds, module, nth, site=site, tcp=tcp)
    else:
        for nth in range(1, calls, calls // CALLS_MAX):
            yield Fault(at, kinds, module, nth, tcp=tcp)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("at", "kinds", "module", "tcp"), EACH, ids=lambda each: str(each) or "any"
)
def test_each_call_fails(player: Player, at: str, kinds: str, module: str, tcp: bool) -> None:
    check(player, list(every(player, at, kinds, module, tcp)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("at", ["peer1", "newcomer", "master"])
@pytest.mark.parametrize(
    ("kinds", "module"),
    [("socket+pair+accept+event+epoll", ""), ("lookup", "_socket"), ("connect", "")],
)
def test_calls_fail_for_ever(player: Player, at: str, kinds: str, module: str) -> None:
    """From some call on: a process that is out of descriptors, or has no network."""
    faults = [Fault(at, kinds, module, nth, FOR_EVER, tcp=True) for nth in range(1, 30)]
    check(player, faults)
