"""Invalid arguments of the commands: an error in one sentence, before anything starts."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pccl.cli import main as cli
from pccl.cli.terminal import painted


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit status of `pccl WORDS`, and what it prints to stdout and stderr."""
    try:
        status = cli.main(words)
    except SystemExit as end:  # argparse
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("master --listen-address nowhere.invalid", "cannot listen on nowhere.invalid:48148"),
        ("master --listen-address :0", "':0' names no host"),
        ("master --listen-address 127.0.0.1:99999", "'99999' is not a port number"),
        ("master --listen-address 127.0.0.1:", "'' is not a port number"),
        ("master --listen-address ::1:5", "must be in brackets"),
        ("master --listen-address tcp://127.0.0.1:0", "it must be '127.0.0.1:0' alone"),
        ("master --listen-address nowhere.invalid:0", "cannot listen on nowhere.invalid:0"),
        ("master --listen-address 127.0.0.1:0 --http nonsense", "'nonsense' is not a port number"),
        ("master --listen-address 127.0.0.1:0 --http :80", "':80' names no host"),
        (
            "master --listen-address 127.0.0.1:0 --http nowhere.invalid:0",
            "cannot serve HTTP on nowhere.invalid:0",
        ),
        ("master --curve-dir /nonexistent --listen-address 127.0.0.1:0", "/nonexistent"),
        ("doctor 127.0.0.1:99999", "'99999' is not a port number"),
        ("doctor ::1", "must be in brackets"),
        ("doctor tcp://h:1", "it must be 'h:1' alone"),
        ("status nonsense", "'nonsense' is not a port number"),
        ("status http://h:1", "it must be 'h:1' alone"),
        ("bench all_reduce --master :5", "':5' names no host"),
        ("bench all_reduce -J /proc/nope", "cannot write /proc/nope"),
        ("bench state -J /nonexistent/file", "cannot write /nonexistent/file"),
        ("bench all_gather -J .", "cannot write .: Is a directory"),
        ("keys /proc/nope", "/proc/nope"),
        ("keys here --peers 0", "'0' is not a whole number of at least 1"),
        ("keys here --peers -3", "expected one argument|not a whole number"),
        ("keys here --peers 99999999", "at most 65536"),
    ],
)
def test_impossible_options_are_refused(
    words: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = said(words.split(), capsys)
    assert (status, out) == (2, "")
    assert re.search(why, err.splitlines()[-1]), err
    assert err.splitlines()[-1].startswith(f"pccl {words.split()[0]}")
    assert not list(tmp_path.iterdir()), "nothing has begun"


def test_a_result_file_is_not_overwritten_before_there_are_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "results"
    file.write_text("of before")
    status, _, err = said(["bench", "all_reduce", "-e", "nonsense", "-J", str(file)], capsys)
    assert status == 2 and "is not a size" in err
    assert file.read_text() == "of before"


@pytest.mark.parametrize("text", ["127.0.0.1", "[::1]", "some.host"])
def test_the_port_of_a_master_may_be_left_out(text: str) -> None:
    assert cli.parser("doctor").parse_args(["doctor", text]).master == f"{text}:48148"
    command = ["bench", "barrier" if text == "" else "all_reduce", "--master", text]
    assert cli.parser("bench").parse_args(command).master == f"{text}:48148"


def test_keys_reports_the_keys_that_it_made_and_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    _, made, _ = said(["keys", run, "--peers", "2"], capsys)
    assert "the master's key pair: made\na key pair for each peer: made\n" in made
    secret = (tmp_path / "run" / "peer-1" / "peer.secret").read_bytes()
    _, more, _ = said(["keys", run, "--peers", "3"], capsys)
    assert "the master's key pair: it was there, and is kept\n" in more
    assert "a key pair for each peer: 1 made; 2 were there, and are kept\n" in more
    _, again, _ = said(["keys", run, "--peers", "3"], capsys)
    assert "a key pair for each peer: it was there, and is kept\n" in again
    _, shared, _ = said(["keys", run], capsys)
    assert "a key pair for all peers: made\n" in shared
    assert (tmp_path / "run" / "peer-1" / "peer.secret").read_bytes() == secret


def test_alone_it_prints_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "COMMAND" in out and "pccl run -n 8 --master HOST -- python train.py" in out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("status 8080 --nonsense", "usage: pccl status "),
        ("bench all_reduce --nonsense", "usage: pccl bench all_reduce "),
        ("doctor a b c", "usage: pccl doctor "),
    ],
)
def test_an_unknown_argument_is_answered_by_the_usage_of_its_command(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = said(words.split(), capsys)
    assert status == 2
    assert err.startswith(usage) and "error: unrecognized arguments: " in err.splitlines()[-1]


@pytest.mark.skipif(os.name != "posix", reason="a pipe breaks otherwise")
@pytest.mark.parametrize(
    "words", ["plan --params 7B --peers 8 --uplink 1G", "cflags", "bench kernels -n 1 -w 0"]
)
def test_it_ends_quietly_when_nobody_reads_its_output(words: str) -> None:
    """Such as `head`, which has the lines that it was asked for."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        command = [sys.executable, "-m", "pccl", *words.split()]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_bench_prints_its_usage_without_torch() -> None:
    """Also the usage of `pccl bench ddp`, which needs torch to run."""
    program = "import sys; sys.modules['torch'] = None; from pccl.cli.main import main; "
    program += "sys.exit(main(['bench', 'ddp', '--layers', '3', '--nonsense']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("usage: pccl bench ddp")


COMPLETED = {
    "pccl ru": "run",
    "pccl bench all_red": "all_reduce",
    "pccl bench all_reduce --qua": "--quantize",
    "pccl doctor --expl": "--explain",
}


@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes_commands_and_options(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash") or pytest.skip("no bash here")
    _, script, _ = said(["completion", "bash"], capsys)
    (tmp_path / "pccl.bash").write_text(script, encoding="utf-8")
    words = line.split()
    asks = f"source pccl.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
    asks += 'complete -p pccl; _shtab_pccl pccl "${COMP_WORDS[-1]}" x; echo "${COMPREPLY[@]}"'
    ended = subprocess.run([bash, "-c", asks], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1].split() == [COMPLETED[line]], ended.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    status, script, _ = said(["completion", shell], capsys)
    assert status == 0 and "pccl" in script and "all_reduce" in script
    if (program := shutil.which(shell)) is not None:
        path = tmp_path / "script"
        path.write_text(script, encoding="utf-8")
        subprocess.run([program, "-n", path], check=True)


class Terminal(io.StringIO):
    """One that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colors_need_a_terminal_or_force_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    red = "\x1b[31mwoe\x1b[0m"
    assert painted("woe", "red", Terminal()) == red
    assert painted("woe", "red", io.StringIO()) == "woe"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert painted("woe", "red", io.StringIO()) == red
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("woe", "red", Terminal()) == "woe"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert painted("woe", "red", Terminal()) == "woe"
