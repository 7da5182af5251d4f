"""examples/experiment: its orders and its table without processes, and a short run with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

for package in ("torch", "matplotlib"):
    pytest.importorskip(package)

import experiment  # noqa: E402
from experiment import plots, runner, runs, table  # noqa: E402
from experiment.runs import (  # noqa: E402  # noqa: E402
    BASELINE,
    VARIANTS,
    Averaged,
    Churn,
    Finished,
    Loaded,
    Point,
    Settings,
    Task,
    Variant,
    encode,
)
from experiment.text import Text  # noqa: E402

from pccl.diloco import muloco, sparseloco  # noqa: E402

FOLDER = Path(experiment.__file__).parent
SETTINGS = Settings(steps=80, inner_steps=10)
BY_NAME = {variant.name: variant for variant in VARIANTS}


class PoolHarness:
    """A pool without processes; the test says what they report."""

    def __init__(self) -> None:
        self.news: list[tuple[int, str | int]] = []
        self.orders: list[tuple[str, int]] = []

    def start(self, number: int, task: str) -> None:
        self.orders.append(("start", number))

    def go(self, number: int) -> None:
        self.orders.append(("go", number))

    def kill(self, number: int) -> None:
        self.orders.append(("kill", number))
        self.news = [(who, what) for who, what in self.news if who != number]

    def free(self, number: int) -> None:
        self.orders.append(("free", number))

    def hear(self, timeout_s: float) -> tuple[int, str | int]:
        return self.news.pop(0)

    def errors(self, number: int) -> str:
        return f"what {number} has said"

    def say(self, number: int, *news: Any) -> None:
        self.news += [(number, one if isinstance(one, int) else encode(one)) for one in news]


def play(harness: PoolHarness, variant: Variant) -> runner.Run:
    run = runner.Run(
        harness,  # type: ignore[arg-type]
        Task("127.0.0.1:1", SETTINGS, variant),
        lambda point: None,
    )
    run.follow()
    return run


def rounds(*steps: int) -> list[Averaged]:
    return [Averaged(step, 3, 100 * step, float(step)) for step in steps]


def test_peers_are_killed_in_turn_and_replaced_by_spares() -> None:
    harness = PoolHarness()
    for number in (0, 1, 2, 4):
        harness.say(number, Loaded(7))
    harness.say(0, *rounds(1, 2))
    harness.say(1, *rounds(2))  # it was killed: not heard any more
    harness.say(0, *rounds(3, 4))  # nobody stands by yet
    harness.say(5, Loaded(7))
    harness.say(0, *rounds(5, 6, 7, 8))  # too late for another one
    for number in (4, 5):
        harness.say(number, *rounds(8))
    for number in (0, 4, 5):
        harness.say(number, Finished(900, 2.5, "same"))
    result = play(harness, Variant("x", 3, {}, churn=Churn(every_rounds=2))).result()
    starting = [("start", 0), ("start", 1), ("start", 2), ("go", 2), ("go", 1), ("go", 0)]
    first = [("start", 4), ("kill", 1), ("go", 4)]
    second = [("start", 5), ("kill", 2), ("go", 5)]
    last = [("start", 7), ("free", 0), ("kill", 7), ("free", 4), ("free", 5)]
    assert harness.orders == [*starting, *first, *second, *last]
    assert (result.kills, result.parameters, result.tx_bytes) == (2, 7, 900)
    assert result.tokens == SETTINGS.tokens


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ([(0, Finished(1, 2.5, "a")), (1, Finished(1, 2.5, "b"))], "the same bits"),
        ([(0, Finished(1, 2.5, "a")), (1, 3)], "peer 1 has ended with exit status 3\nwhat 1"),
    ],
)
def test_a_run_that_has_gone_wrong_has_no_result(last: list[Any], why: str) -> None:
    harness = PoolHarness()
    for number in (0, 1):
        harness.say(number, Loaded(7), *rounds(1))
    for number, *news in last:
        harness.say(number, *news)
    with pytest.raises(runner.Failed, match=why):
        play(harness, Variant("x", 2, {})).result()


def test_presets_equal_those_of_the_library() -> None:
    for name, preset in (("sparseloco-4", sparseloco()), ("muloco-4", muloco(4))):
        options = BY_NAME[name].options
        assert options == {key: value for key, value in preset.items() if key != "inner_steps"}


# ---- results ----


def made(variant: Variant, loss: float, tx_bytes: float) -> runs.Result:
    return runs.Result(
        settings=SETTINGS,
        variant=variant,
        parameters=1000,
        validation=loss,
        tx_bytes=tx_bytes,
        curve=(Point(1000, 500, 3.0), Point(2000, 1000, loss)),
        rounds=tuple(Averaged(i, variant.peers, 100 * i, i * 1.5) for i in range(1, 9)),
        kills=int(variant.churn != Churn()),
        load=0.5,
    )


def test_a_result_is_found_again_if_nothing_has_changed(tmp_path: Path) -> None:
    result = made(BY_NAME["sync-4"], 2.0, 1e6)
    runs.save(tmp_path, result)
    assert runs.load(tmp_path, result.variant, SETTINGS) == result
    other = msgspec.structs.replace(SETTINGS, seed=7)
    assert runs.load(tmp_path, result.variant, other) is None
    assert runs.load(tmp_path, BY_NAME["sync-2"], SETTINGS) is None
    runs.place(tmp_path, result.variant).write_text("{")
    assert runs.load(tmp_path, result.variant, SETTINGS) is None


def test_gaps_and_bytes_are_against_data_parallel_among_as_many_peers(tmp_path: Path) -> None:
    baseline = made(BY_NAME[BASELINE], 2.0, 80 * 4000)
    sync = made(BY_NAME["sync-4"], 2.02, 8 * 6000)
    alone = made(BY_NAME["sync-1"], 1.99, 0)
    assert table.gap(sync, baseline) == pytest.approx(0.01)
    assert table.saving(baseline) == pytest.approx(1)
    assert table.saving(sync) == pytest.approx(10)
    assert table.saving(alone) is None
    timed = [made(BY_NAME[name], 2.0, 1e6) for name in ("calm", "failures")]
    text = table.render([baseline, alone, sync, *timed])
    assert "| sync-4 | 4 | 2.0200 | +1.00 % | +2.0 to +1.1 % | 0.05 | 10 |  |" in text
    assert "| sync-1 | 1 | 1.9900 | -0.50 % | -0.1 to -0.2 % | 0.00 |  |  |" in text
    assert "One failure in 15 s" in text and "100.0% of those without failures" in text
    paths = plots.save([baseline, alone, sync, *timed], tmp_path)
    assert [path.name for path in paths] == ["gap.svg", "loss.svg", "goodput.svg"]
    assert all(b"<svg" in path.read_bytes() for path in paths)


# ---- samples ----


def test_samples_are_the_same_for_any_number_of_peers_and_none_is_of_the_validation(
    tmp_path: Path,
) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 200)
    text = Text([str(file)], context=8, samples=64, seed=1)
    again = Text([str(file)], context=8, samples=64, seed=1)
    assert (text.samples(range(10, 20)) == again.samples(range(0, 64))[10:20]).all()
    assert text.samples([3]).shape == (1, 9)
    assert text.validation().shape[1] == 9
    with pytest.raises(ValueError, match="too few"):
        Text([str(file)], context=2000, samples=64, seed=1)


# ---- the command ----


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "nothing"], "no run named nothing"),
        (["--batch", "12"], "up to 8 peers"),
        (["--width", "10"], "no multiple of --heads"),
        (["--steps", "100"], "no multiple of --inner-steps"),
        (["--text", "no-such-file"], "no file .*no-such-file"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert experiment.main(words) == 2
    assert why.split(" .*")[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_experiment_is_made_once(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER), "--output", str(tmp_path)]
    words += ["--width", "16", "--layers", "1", "--batch", "8", "--steps", "40"]
    words += ["--inner-steps", "10", "--only", BASELINE, "sync-2", "sync-4-int4", "delayed-4"]
    first = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert first.returncode == 0, first.stdout + first.stderr
    stamps = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    assert len(stamps) == 4
    assert (tmp_path / "table.md").exists() and (tmp_path / "gap.svg").exists()
    again = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert again.stdout == first.stdout
    assert stamps == {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
