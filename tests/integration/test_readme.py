"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pccl

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:48148"


def ten_lines() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return program


@pytest.mark.parametrize(
    "program", [ten_lines(), (ROOT / "examples" / "all_reduce.py").read_text(encoding="utf-8")]
)
def test_two_peers_average(program: str, tmp_path: Path) -> None:
    assert ADDRESS in program
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = [
            subprocess.Popen(
                [sys.executable, "-c", program.replace(ADDRESS, master.address)],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            ends = [peer.communicate(timeout=30) for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
                peer.communicate()
    for output, errors in ends:
        assert not errors
        assert "the mean over 2 peers is 1.5" in output


def test_the_first_screen_has_a_picture_and_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    screen = "\n".join(lines[:26])
    assert len(re.findall(r"^python3 -m venv \.venv && ", screen, re.MULTILINE)) == 2
    (picture,) = re.findall(r"^!\[[^]]+\]\(([^)]+)\)", screen, re.MULTILINE)
    assert (ROOT / picture).stat().st_size < 100 << 10
