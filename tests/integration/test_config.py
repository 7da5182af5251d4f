"""Settings: an invalid value is refused at the start, in a sentence that names the variable."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl import master
from pccl.cli import main as cli
from pccl.runtime.config import RANGES, Config

VARIABLES = [range_.variable for range_ in RANGES.values() if range_.variable]


def test_values_within_the_limits_are_accepted_and_others_refused() -> None:
    assert Config.from_env({}) == Config()
    for name, (variable, least, most) in RANGES.items():
        fitting = {"heartbeat_timeout_ms": most} if name == "heartbeat_ms" else {}
        if name == "heartbeat_timeout_ms":
            fitting = {"heartbeat_ms": 1}
        for value in (least, most):
            if (name, value) == ("heartbeat_ms", most):
                fitting = {"heartbeat_timeout_ms": most + 1}
            config = replace(Config(), **{**fitting, name: value})  # type: ignore[arg-type]
            assert getattr(config, name) == value
            if variable:
                env = {RANGES[other].variable: str(n) for other, n in fitting.items()}
                assert Config.from_env({**env, variable: str(value)}) == config
        for value in (least - 1, most + 1, 1 << 32, 1 << 80, float("nan"), float("inf")):
            if value != getattr(Config, name):
                with pytest.raises(ValueError, match=f"{name} is .*from {least} to {most}"):
                    replace(Config(), **{name: value})  # type: ignore[arg-type]


def test_every_number_has_limits() -> None:
    numbers = {
        f.name for f in fields(Config) if f.type in ("int", "float", "int | None", "float | None")
    }
    assert numbers == RANGES.keys()


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1e3", " 1", "²", "4294967296", "9" * 5000])
def test_a_variable_that_is_impossible_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable} is .*: it must be a whole number from \d"):
        Config.from_env({variable: text})


def test_a_heartbeat_is_shorter_than_its_time_out() -> None:
    for env in (
        {"PCCL_HEARTBEAT_MS": "6000"},
        {"PCCL_HEARTBEAT_TIMEOUT_MS": "1000"},
        {"PCCL_HEARTBEAT_MS": "300", "PCCL_HEARTBEAT_TIMEOUT_MS": "300"},
    ):
        with pytest.raises(
            ValueError, match=r"PCCL_HEARTBEAT_MS is .* the time-out must be longer"
        ):
            Config.from_env(env)


def test_a_peer_and_a_master_refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        monkeypatch.setenv("PCCL_LANES", "4294967296")
        with pytest.raises(ValueError, match=r"PCCL_LANES is '4294967296': .* from 1 to 256"):
            pccl.Communicator(master.address).connect()
    with pytest.raises(ValueError, match="PCCL_LANES"):
        pccl.MasterNode("127.0.0.1:0").run()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen-address", ":1"], "':1' names no host"),
        (["--listen-address", "127.0.0.1:x"], "'x' is not a port number"),
        (["--curve-dir", "/nowhere"], "/nowhere"),
        ([], "PCCL_HEARTBEAT_MS is '0'"),
    ],
)
def test_the_command_reports_a_bad_setting_in_one_line(
    options: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_MS", "0")
    for command, words in ((master.main, options), (cli.main, ["master", *options])):
        status, said = command(words), capfd.readouterr().err
        assert (status, said.count("\n")) == (2, 1), said
        assert said.startswith("pccl master: ") and says in said


@pytest.mark.parametrize("words", ["doctor", "bench all_reduce"])
def test_commands_with_a_bad_setting_say_so_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_MS", "x")
    assert cli.main(words.split()) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"pccl {words.split()[0]}: PCCL_HEARTBEAT_MS is 'x'"), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["pccl.master"], ["pccl", "master"]])
def test_a_process_with_a_bad_setting_ends(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_MS", "0")
    words = [sys.executable, "-m", *command]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path.home()
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("pccl master: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "PCCL_HEARTBEAT_MS is '0'" in ended.stderr


def test_a_misspelt_setting_is_warned_of_once_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {"PCCL_HEARBEAT_MS": "100", "PCCL_UNHEARD_OF": "1", "PCCL_HEARTBEAT_MS": "200"}
    assert Config.from_env(env).heartbeat_ms == 200
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "PCCL_HEARBEAT_MS is not a setting of pccl, and has no effect: did you mean "
        "PCCL_HEARTBEAT_MS?",
        "PCCL_UNHEARD_OF is not a setting of pccl, and has no effect: docs/howto/tuning.md lists "
        "all",
    ]
    Config.from_env(env)
    assert len(caplog.records) == len(told), "once"
