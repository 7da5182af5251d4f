"""stress/wan says which host failed, and loss.py what it has measured; networks need root."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pccl.cli.chaos.network import NetworkError

FOLDER = Path(__file__).resolve().parents[2] / "stress" / "wan"
NETWORK = FOLDER / "network.py"


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program loss.py as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("wan_loss", FOLDER / "loss.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wan_loss", module)
    spec.loader.exec_module(module)
    return module


def run(loss: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loss.py", *words])
    code: int = loss.main()
    return code


def hosts(**programs: str) -> dict[str, subprocess.Popen[str]]:
    return {
        host: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for host, code in programs.items()
    }


def test_the_error_names_the_failed_host() -> None:
    reports = runpy.run_path(str(NETWORK))["reports"]
    assert reports(hosts(a="print(7)", b="print([8])"), 30.0) == [7, [8]]
    with pytest.raises(SystemExit, match="host b: its process ended with status 3"):
        reports(hosts(a="print(7)", b="raise SystemExit(3)"), 30.0)


def test_loss_measures_what_is_missing_and_compares_it_with_gloo(
    loss: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    measured = []

    def measure(job: Any, timeout_s: float) -> Any:
        measured.append((job.way, job.steps))
        factor = {"ddp-gloo": 1.0, "sync": 0.5}.get(job.way, 0.1)
        end = 2.0 if job.way == "streaming" else 1.5
        points = [(factor * at_s, end + 2 - at_s / 50) for at_s in (50.0, 75.0, 100.0)]
        return loss.Result(job, points, sent_mb=3.0, late=0.01, kill=[1.0, 2.0])

    monkeypatch.setattr(loss, "measure", measure)
    words = ["--mbits", "100", "--ways", "sync", "streaming", "--steps", "10"]
    words += ["--results", str(tmp_path / "results"), "--output", str(tmp_path)]
    assert run(loss, monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert measured == [("ddp-gloo", 10), ("sync", 30), ("streaming", 30)]
    assert "| 100 Mbit/s | sync, int4 | 50 s | 0.50 | 1.500 after 50 s | 30 | 3.0 | 1.0% |" in text
    assert "| streaming, int4 | not reached |  | 2.000 after 10 s |" in text
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()
    assert run(loss, monkeypatch, *words) == 0 and len(measured) == 3
    assert capsys.readouterr() == (text, "")


def test_gradients_that_take_less_than_their_time_wait_for_it(loss: Any) -> None:
    pace = loss.Pace(0.05)
    pace.begin()
    began_s = loss.time.monotonic()
    pace.end()
    assert loss.time.monotonic() - began_s > 0.04 and pace.late_s == 0
    pace.end()  # as if it had taken longer
    assert pace.late_s > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["ddp-pccl-int8", "streaming", "decoupled-kill"])
def test_a_short_run_over_an_emulated_link(
    loss: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    pytest.importorskip("torch")
    args = ["--mbits", "1000", "--rtt-ms", "10", "--ways", way, "--steps", "60"]
    monkeypatch.setattr(sys, "argv", ["loss.py", *args])
    job = loss.jobs(loss.parser().parse_args())[-1]
    try:
        result = loss.measure(job, 300.0)
    except NetworkError as error:
        pytest.skip(f"no emulated network: {error}")
    assert result.job == job and result.sent_mb > 0
    assert 2 < result.points[-1][1] < result.points[0][1] < 6
    assert len(result.kill) == (2 if way == "decoupled-kill" else 0)
