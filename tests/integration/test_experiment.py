"""examples/experiment: its results, tables and figures, and short runs of each kind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

import experiment  # noqa: E402
from experiment import churn, tables, training  # noqa: E402
from experiment.runs import (  # noqa: E402
    ARMS,
    BASELINE,
    SIZES,
    SWEEP_SEED,
    Arm,
    Result,
    Results,
    Run,
    Size,
    arms_of,
)
from experiment.text import Text  # noqa: E402

from pccl.cli.demo.model import GPT, Shape  # noqa: E402

TINY = Size("tiny", width=8, layers=1, heads=2, context=8, rounds=10)


def made(run: Run, loss: float, tx_bytes: float = 0.0) -> Result:
    return Result(
        size=run.size, arm=run.arm, rates=run.rates, seed=run.seed, loss=loss, tx_bytes=tx_bytes
    )


def swept(results: Results, arm: Arm) -> None:
    for place, rates in enumerate(arm.grid):
        results.add(made(Run(TINY, arm, rates, SWEEP_SEED), 3.0 - 0.1 * place))


# ---- settings and results ----


@pytest.mark.parametrize("size", [*SIZES.values(), TINY])
def test_a_size_says_what_its_model_has_and_learns(size: Size) -> None:
    model = GPT(Shape(size.width, size.layers, size.heads, size.context))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert all(size.batch % arm.peers == 0 for arm in ARMS.values())
    if size is not TINY:
        assert 0.95 < size.tokens / size.parameters / size.tokens_each < 1.1


def test_a_long_run_is_for_what_needs_it() -> None:
    long = SIZES["200k-long"]
    found = [arm.name for arm in arms_of(long, ARMS.values())]
    assert found == [BASELINE, "sync-4", "sparse-4"]
    assert arms_of(SIZES["200k"], ARMS.values()) == [*ARMS.values()]
    rates = ARMS["sparse-4"].grid[0]
    runs = [Run(long, ARMS[name], rates, 1) for name in found[1:]]
    rows = [
        tables.Row(run.arm, long, rates, (made(run, 1.0, 5.0),), (gap,))
        for run, gap in zip(runs, (0.02, 0.03), strict=True)
    ]
    bars = tables.bars(rows).splitlines()[2:]
    assert len(bars) == 1 and "sparse-4 | twice sync-4 | +4.00 % | +3.00 %" in bars[0]
    assert bars[0].endswith("| yes |")


def test_all_sweeps_of_arms_have_the_same_size() -> None:
    assert {len(arm.grid) for arm in ARMS.values() if not arm.like} == {len(ARMS[BASELINE].grid)}
    assert all(ARMS[arm.like].grid for arm in ARMS.values() if arm.like)


def test_a_result_is_found_again_and_a_whole_sweep_chooses_the_best(tmp_path: Path) -> None:
    file = tmp_path / "results"
    results, arm = Results(file), ARMS["sync-4"]
    assert results.rates(arm, TINY) is None
    swept(results, arm)
    again = Results(file)
    assert again.rates(ARMS["sync-4-int4"], TINY) == again.rates(arm, TINY) == arm.grid[-1]
    assert again.rates(ARMS["sync-8"], TINY) == msgspec.structs.replace(arm.grid[-1], outer_lr=0.8)
    assert again.rates(ARMS["sparse-4"], TINY) is None
    run = Run(TINY, arm, arm.grid[0], 1)
    assert again.get(run) is None
    again.add(made(run, 2.0, 5.0))
    assert Results(file).get(run) == again.get(run)
    assert len([*Results(file)]) == len(arm.grid) + 1


def test_gaps_are_of_the_same_seed_and_what_was_not_run_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    base, arm = ARMS[BASELINE], ARMS["sync-4-int4"]
    for each in (base, ARMS["sync-4"]):
        swept(results, each)
    for seed, loss in ((1, 2.0), (2, 3.0)):
        for each, factor, sent in ((base, 1.0, 0.0), (arm, 1.01 + seed / 100, 1e4)):
            rates = results.rates(each, TINY)
            assert rates is not None
            results.add(made(Run(TINY, each, rates, seed), factor * loss, sent))
    row = tables.row_of(results, arm, TINY, TINY, seeds=3)
    assert row is not None and row.saving is not None
    assert row.gaps == pytest.approx((0.02, 0.03)) and row.gap == pytest.approx(0.025)
    assert row.saving == pytest.approx(TINY.steps * 6 * TINY.parameters / 1e4)
    assert tables.row_of(results, ARMS["muon-4-int4"], TINY, TINY, seeds=3) is None
    text = tables.arms([row], [(TINY, ARMS["muon-4-int4"])])
    assert "| +2.50 % ± 0.71 | 2 |" in text and "Not run with N = tiny: muon-4-int4." in text
    bars = tables.bars([row])
    assert "| +2.50 % at 1/534 of the bytes | yes |" in bars and "| not run |  |" in bars
    pytest.importorskip("matplotlib")
    from experiment import figures  # here: matplotlib takes each worker half a second

    figures.sizes([row], tmp_path / "sizes.svg")
    figures.savings([row], tmp_path / "savings.svg")
    assert all(b"<svg" in path.read_bytes() for path in tmp_path.glob("*.svg"))


def test_the_law_meets_the_published_points_and_goes_on() -> None:
    for peers in (2, 4, 8):
        for parameters, gap in tables.published(peers).items():
            assert tables.law(peers, parameters) == pytest.approx(gap, rel=0.25)
    assert tables.law(4, 2e5) == pytest.approx(0.15, abs=0.01)
    assert tables.law(4, 6e5) == pytest.approx(0.10, abs=0.01)


def test_samples_are_the_same_again_and_none_is_of_the_validation(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 200)
    text, again = (Text([file], context=8, samples=64, seed=1) for _ in range(2))
    assert (text.samples(range(10, 20)) == again.samples(range(64))[10:20]).all()
    assert text.samples([3]).shape == (1, 9)
    assert text.validation().shape[1] == 9
    with pytest.raises(ValueError, match="too few"):
        Text([file], context=2000, samples=64, seed=1)


# ---- runs ----


def run_of(name: str) -> Run:
    arm = ARMS[name]
    return Run(TINY, arm, (ARMS[arm.like] if arm.like else arm).grid[0], 1)


def test_gradients_of_all_peers_at_once_are_those_of_each() -> None:
    replicas = training.Replicas(run_of("sync-4"), 4)
    text = torch.randint(256, (4, 3, 9), generator=torch.Generator().manual_seed(0))
    replicas.models[2].position.data.add_(1.0)  # they differ after a while
    replicas.backward(text, progress=0.5)
    for model, own in zip(replicas.models, text, strict=True):
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(own).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.CLIP)
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_a_short_run(name: str) -> None:
    run = run_of(name)
    result = (churn if run.arm.kill_every else training).train(run)
    assert result.run == run and 2 < result.loss < 6
    assert (result.tx_bytes > 0) == (run.arm.peers > 1)
    assert result.kills == (1 if run.arm.kill_every else 0)


@pytest.mark.slow
def test_fragments_need_not_divide_the_steps_of_a_round() -> None:
    run = run_of("streaming-4-int4")
    options = {"mode": "streaming", "fragments": 4, "overlap": 3}
    arm = msgspec.structs.replace(run.arm, options=options)
    assert 2 < training.train(msgspec.structs.replace(run, arm=arm)).loss < 6


@pytest.mark.slow
def test_what_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "SMALLEST", TINY)
    words = ["sweep", "--arms", BASELINE, "--jobs", "2", "--results", str(tmp_path / "results")]
    assert experiment.main(words) == 0
    out, err = capsys.readouterr()
    assert f"| {BASELINE} | 4 of 4 |" in out and "[4/4]" in err
    assert experiment.main(words) == 0
    assert capsys.readouterr() == (out, "")


def test_only_known_arms_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiment.parser().parse_args(["arms", "--arms", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
