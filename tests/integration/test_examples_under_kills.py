"""Every example that trains, as `pccl run` runs it, while its peers are killed at random moments.

All peers must come to the end: those that were there all the time with the same bits; who was
started again too late hears that the run is finished, and ends with 0.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from peers.waiting import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COPIES, KILLS = 3, 3
PATIENCE_S = 120.0
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d .* pccl ")
SIZES = ("1 KB", "100 KB", "10 MB")  # of what a step exchanges

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds the copies in /proc"),
    pytest.mark.timeout(4 * PATIENCE_S),
]


@dataclass(frozen=True)
class Recipe:
    """How an example is run.

    steps: of the run, for each of the sizes: enough to outlast the kills.
    option: the one that sets its size, and its values; an example of a model has no smaller ones.
    words: the other arguments; {own} is a directory of the copy.
    last: with what its last line begins, which is the same on all peers.
    """

    steps: tuple[int, int, int]
    option: str = "--width"
    sizes: tuple[float, ...] = (1, 64, 6800)
    words: tuple[str, ...] = ()
    count: str = "--steps"
    last: str = "shared state: "


INNER = ("--inner-steps", "5")
RECIPES = {
    "launch/train.py": Recipe(
        (150, 150, 100),
        "--elements",
        (256, 25_600, 2_560_000),
        ("--seconds", "0.02", "--min-peers", "2"),
        last="done: ",
    ),
    "checkpoint.py": Recipe(
        (20_000, 8000, 300), "--elements", (256, 25_600, 2_560_000), ("{own}/file",), last="step "
    ),
    "data_parallel.py": Recipe(
        (200_000, 120_000, 5_000), words=("--batch", "32"), count="--samples", last="weights "
    ),
    "delayed.py": Recipe((800, 800, 60), words=INNER),
    "diloco.py": Recipe((800, 800, 60), words=INNER),
    "exactly_once.py": Recipe(  # counts letters: its array has one size
        (0, 0, 0), "--round-s", (0.1,), ("{text}",), count="", last="exact: "
    ),
    "from_pypccl.py": Recipe(
        (15_000, 6000, 150), "--elements", (256, 25_600, 2_560_000), last="weights "
    ),
    "from_torch_distributed.py": Recipe(
        (15_000, 6000, 100), sizes=(28, 2_800, 280_000), words=("--peers", "3"), last="weights "
    ),
    "from_torchft.py": Recipe((15_000, 6000, 100), sizes=(28, 2_800, 280_000), last="step "),
    "fsdp2.py": Recipe((600, 600, 60), words=(*INNER, "--checkpoints", "{own}"), last="shard "),
    "heterogeneous.py": Recipe((100, 100, 60), words=("--inner-seconds", "0.2")),
    "resume.py": Recipe((800, 800, 60), words=("{own}/file", *INNER)),
    "sparse.py": Recipe((800, 800, 60), words=INNER),
    "streaming.py": Recipe((800, 800, 60), words=("--inner-steps", "6", "--overlap", "1")),
}
NOT_TRAINING = {"all_reduce.py", "language.py", "quantization.py", "weights.py"}
ELSEWHERE = {"elastic.py"} | {path.name for path in EXAMPLES.glob("tutorial_*.py")}  # killed, too
CASES = [
    pytest.param(name, index, id=f"{name}-{size}", marks=[] if sampled else [pytest.mark.slow])
    for name, recipe in RECIPES.items()
    for index, size in enumerate(SIZES[: len(recipe.sizes)])
    for sampled in [(name, size) == ("launch/train.py", "100 KB")]
]
# a copy's own directory, and torch's threads: three copies share the processors
ALONE = "OMP_NUM_THREADS=1 RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0"
ENTER = f'export {ALONE}; cd "$DIRECTORY/$LOCAL_RANK" && exec "$@"'


class Launched:
    """`pccl run`, and what its copies have said."""

    def __init__(self, words: list[str], directory: Path) -> None:
        for number in range(COPIES):
            (directory / str(number)).mkdir()
        run = [sys.executable, "-m", "pccl.cli.main", "run", "-n", str(COPIES), "--restarts", "99"]
        self.process = subprocess.Popen(
            [*run, "--", "sh", "-c", ENTER, "sh", sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "DIRECTORY": str(directory)},
        )
        self.said: list[list[str]] = [[] for _ in range(COPIES)]  # by copy, since it was started
        self.all: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.all.append(line.rstrip())
            number, _, text = line.rstrip().partition("] ")
            if not number[1:].isdigit():
                continue
            if text.startswith("pccl run:"):
                self.said[int(number[1:])] = []  # it has died, and all that it wrote was read
            else:
                self.said[int(number[1:])].append(text)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def at_work(self) -> list[int]:
        """The copies that have the run's state: they have made a step since they were started."""
        return [
            number
            for number, lines in enumerate(self.said)
            if not all(map(LOG_LINE.match, lines))  # one that is refused says nothing else
        ]

    def kill(self, number: int) -> bool:
        """kill -9 of a copy; whether it was there."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        for pid in map(int, found.stdout.split()):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"LOCAL_RANK=%d" % number in environment:
                self.said[number] = []
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_every_example_is_here() -> None:
    names = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*.py")}
    assert names == {name for name in RECIPES if "/" not in name} | NOT_TRAINING | ELSEWHERE


@pytest.mark.parametrize(("name", "size"), CASES)
def test_the_run_goes_on(name: str, size: int, tmp_path: Path) -> None:
    recipe, draw = RECIPES[name], random.Random(f"{name} {size}")
    if name not in ("launch/train.py", "checkpoint.py", "exactly_once.py", "from_pypccl.py"):
        pytest.importorskip("torch")
    (tmp_path / "text").write_bytes(Path(__file__).read_bytes() * 20)
    words = [str(EXAMPLES / name), recipe.option, str(recipe.sizes[size])]
    words += [recipe.count, str(recipe.steps[size])] if recipe.count else []
    words += [word.format(own=".", text=tmp_path / "text") for word in recipe.words]
    launched = Launched(words, tmp_path)
    kills = 0
    try:
        while kills < KILLS and not launched.over:
            wait_until(lambda: len(launched.at_work()) > 1 or launched.over, PATIENCE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launched.process.wait(draw.uniform(0, 0.5))  # any moment of its steps
            if len(launched.at_work()) > 1:
                kills += launched.kill(draw.choice(launched.at_work()))
        status = launched.process.wait(PATIENCE_S)
    finally:
        launched.close()
    text = "\n".join(launched.all[-60:])
    assert status == 0, text
    assert kills >= 2, f"it was over too soon: {text}"
    last = [
        next((line for line in reversed(said) if line.startswith(recipe.last)), None)
        for said in launched.said
    ]
    ends = {line for line in last if line is not None}
    assert len(ends) == 1, f"{last}: {text}"
