"""Scripts written for pypccl 1.0 run unchanged, while peers of theirs are killed and others join.

They use the compatible names only, as users of pypccl do (tests/support/programs/pypccl). Each
reports, for each step that it takes, the digest of its weights, which must be the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.processes import Report, Reporter

import pccl

SCRIPTS = Path(__file__).resolve().parents[1] / "support" / "programs" / "pypccl"
PATIENCE_S = 100.0
Start = Callable[..., Reporter]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(name, *words) starts a script at a fresh master; all are killed in the end."""
    started: list[Reporter] = []
    with pccl.MasterNode("127.0.0.1:0") as master:

        def one(name: str, *words: object) -> Reporter:
            path = SCRIPTS / f"{name}.py"
            started.append(Reporter(path, master.address, *words, patience_s=PATIENCE_S))
            return started[-1]

        yield one
        for script in started:
            script.kill()


def whole(world: int) -> Callable[[Report], bool]:
    return lambda report: report["world"] == world


def learned(script: Reporter) -> None:
    """It goes on until its model is right."""
    script.wait_for(lambda report: report["loss"] < 0.05)


def agree(scripts: list[Reporter]) -> None:
    """All peers of a group that report a step have the same weights."""
    digests: dict[tuple[int, int], str] = {}
    steps = 0
    for script in scripts:
        script.kill()
        for report in script.reports:
            steps += 1
            at = report["group"], report["step"]
            if report["digest"]:
                assert digests.setdefault(at, report["digest"]) == report["digest"], report
    assert steps > len(digests) > 0, "no step was reported by two peers"


@pytest.mark.parametrize(
    "name", ["ddp", pytest.param("diloco", marks=pytest.mark.slow), "async_diloco"]
)
def test_peers_are_killed_and_join(start: Start, name: str) -> None:
    if name == "diloco":
        pytest.importorskip("torch", reason="this script trains with it")
    scripts = [start(name, seed) for seed in range(3)]
    for script in scripts:
        script.wait_for(whole(3))
    scripts[0].kill()
    for script in scripts[1:]:
        script.wait_for(whole(2))
    late = start(name, 7)
    for script in (*scripts[1:], late):
        script.wait_for(whole(3))
    scripts[1].kill()
    for script in (scripts[2], late):
        script.wait_for(whole(2))
        learned(script)
    agree([*scripts, late])


def test_a_peer_of_one_group_is_killed_and_another_joins(start: Start) -> None:
    scripts = [start("fsdp", seed, seed % 2) for seed in range(4)]  # two replicas of two shards
    for script in scripts:
        script.wait_for(whole(2))
    third = start("fsdp", 4, 0)
    for script in (scripts[0], scripts[2], third):
        script.wait_for(whole(3))
    scripts[0].kill()
    for script in (scripts[2], third):
        script.wait_for(whole(2))
    late = start("fsdp", 5, 0)
    for script in (scripts[2], third, late):
        script.wait_for(whole(3))
    for script in (*scripts[1:], third, late):
        learned(script)
    agree([*scripts, third, late])
