"""stress/wan says which host failed; its networks themselves need root."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

NETWORK = Path(__file__).resolve().parents[2] / "stress" / "wan" / "network.py"


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
