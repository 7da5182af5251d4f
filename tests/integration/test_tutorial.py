"""The tutorial's programs, in its order: one process, several with a loss, inference."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 120.0
COPIES = 3
ENVIRONMENT = {n: value for n, value in os.environ.items() if not n.startswith("PCCL")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a copy in /proc"),
    pytest.mark.timeout(3 * PATIENCE_S),
]


def python(program: str, *words: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{program}.py"), *map(str, words)]


def printed(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copies_of(parent: int) -> list[int]:
    """The processes that `pccl run` has started."""
    return [
        int(child)
        for task in Path(f"/proc/{parent}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The output of several processes, one killed after its first round, and the model."""
    model = tmp_path_factory.mktemp("tutorial") / "tutorial.pt"
    program = python("tutorial_together", "--rounds", 5, "--min-peers", COPIES, "--output", model)
    run = subprocess.Popen(
        [sys.executable, "-m", "pccl", "run", "-n", str(COPIES), "--", *program],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    lines = []
    try:
        for line in run.stdout:
            lines.append(line)
            if "round 1:" in line and not any("round 1:" in before for before in lines[:-1]):
                os.kill(copies_of(run.pid)[-1], signal.SIGKILL)
        assert run.wait(PATIENCE_S) == 0
    finally:
        run.terminate()
        run.communicate()
    return lines, model


def test_one_process_learns() -> None:
    output = printed(python("tutorial_alone", "--steps", 40))
    first, second = map(float, re.findall(r"validation loss ([\d.]+)", output))
    assert second < first < 5.6


def test_the_others_go_on_with_the_same_weights(trained: tuple[list[str], Path]) -> None:
    said = "".join(trained[0])
    rounds = re.findall(r"^\[(\d)\] round (\d+): (\d) peers, loss ([\d.]+)$", said, re.MULTILINE)
    by_round: dict[int, set[str]] = {}
    for _, number, _, loss in rounds:
        by_round.setdefault(int(number), set()).add(loss)
    assert sorted(by_round) == [1, 2, 3, 4, 5]
    assert all(len(losses) == 1 for losses in by_round.values()), said
    assert min(int(peers) for *_, peers, _ in rounds) == COPIES - 1, "one was killed"
    assert float(*by_round[5]) < float(*by_round[1])


def test_the_model_writes_a_text_without_pccl(trained: tuple[list[str], Path]) -> None:
    output = printed(python("tutorial_generate", trained[1], "--prompt", "The ", "--tokens", 20))
    assert output.startswith("The ") and len(output) > 4
