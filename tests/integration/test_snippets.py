"""Every snippet and command of the documentation works, where the reader stands: in the clone."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple

import numpy as np
import pytest
from peers.waiting import PATIENCE_S

import pccl
from pccl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md", *generate.pages()]
PROGRAMS = [p for top in ("examples", "stress") for p in sorted((ROOT / top).rglob("*.py"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:pccl|python|pip|pytest|make|\.venv/bin/\w+) [^`]+)`")
BEGINS = ("pccl", "python", "pip")  # commands in the docstring of a program


class Block(NamedTuple):
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    text: str
    elsewhere: bool  # it shows another library, "before"; or wants a process of its own

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """Words that a reader types, and where they stand."""

    where: str
    words: tuple[str, ...]
    settings: tuple[str, ...] = ()  # names of environment variables that are given with it

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def blocks(page: Path, *, made: bool = True) -> list[Block]:
    """The blocks of a page in order; without those that are made from the code, if so wished."""
    text = page.read_text(encoding="utf-8")
    if not made:
        text = generate.PART.sub(lambda part: "\n" * part[0].count("\n"), text)
    found = []
    for block in BLOCK.finditer(text):
        above = re.findall(r"^\*\*(Before|After)\*\*", text[: block.start()], re.MULTILINE)
        line = text[: block.start()].count("\n") + 2
        # a process has one default group: tests/integration/test_torch_*.py have such programs
        backend = any(words in block[3] for words in ("pccl.torch", 'init_process_group("pccl"'))
        # several machines share it: tests/integration/test_diloco_checkpoints.py has such programs
        shared = '"/shared/' in block[3]
        elsewhere = above[-1:] == ["Before"] or backend or shared
        found.append(Block(page, line, block[2], dedent(block[3]), elsewhere))
    return found


def commands() -> list[Command]:
    """All commands in pages, and in the docstrings of the programs that a reader may start."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and not block.elsewhere:
                found += _commands(str(block), block.text)
        prose = BLOCK.sub("", generate.PART.sub("", page.read_text(encoding="utf-8")))
        for span in INLINE.findall(prose):
            found += _commands(page.name, " ".join(span.split()))
    for program in PROGRAMS:
        text = program.read_text(encoding="utf-8")
        doc = text.split('"""')[1] if text.startswith('"""') else ""
        lines = re.sub(r"\n {20,}\[", " [", doc).splitlines()  # options on a second line
        for line in lines:
            if line.strip().startswith(tuple(f"{begin} " for begin in BEGINS)):
                bare = line.strip().replace("[", "").replace("]", "").replace(" ...", "")
                found += _commands(str(program.relative_to(ROOT)), bare)
    return found


def _commands(where: str, text: str) -> Iterator[Command]:
    for line in text.splitlines():
        words: list[str] = []
        settings: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    yield Command(where, tuple(words), tuple(settings))
                words, settings = [], []
            elif not words and re.match(r"[A-Z_]+=", word):
                settings.append(word.partition("=")[0])
            else:
                words.append(word)


COMMANDS = commands()
READABLE = [page for page in PAGES if any(b.language == "python" for b in blocks(page, made=False))]
PEERS = {"machines.md": 4}  # where the page waits for more than two
MASTER = re.compile(r'"[\w.-]+:48148"')


# ---- commands ----


class Parsed(Exception):
    """The arguments of a program are right; it is not to run."""


def check_pccl(words: list[str]) -> None:
    if len(words) > 1:
        cli.parser(words[0]).parse_args(words)
    elif words:  # only named
        assert words[0] in cli.COMMANDS


def check_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "-m":
        module, *rest = words[1:]
        if module == "pccl.master":
            check_pccl(["master", *rest])
        elif module == "pccl":
            check_pccl(rest)
        elif module == "stress":
            check_program(ROOT / "stress" / "__main__.py", rest, monkeypatch)
        else:
            assert module in ("venv", "sphinx")
        return
    if words == ["train.py"]:  # the reader's own
        return
    check_program(ROOT / words[0], words[1:], monkeypatch)


def check_program(program: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    package = program.is_dir()  # whose options another file has
    program = program / "__main__.py" if package else program
    text = program.read_text(encoding="utf-8")
    if re.search("^import ray$", text, re.MULTILINE):
        pytest.importorskip("ray")
    if not package and not re.search(r"\bargparse\b|parse_args", text):
        compile(text, program, "exec")
        assert not words or "sys.argv" in text
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*args: Any) -> None:
        parse(*args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [program.name, *words])
    monkeypatch.syspath_prepend(str(program.parent))
    there = set(sys.modules)
    try:
        with pytest.raises(Parsed):
            runpy.run_path(str(program), run_name="__main__")
    finally:  # its neighbors may have names that others have too
        for name in set(sys.modules) - there:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(program.parent)):
                del sys.modules[name]


def check_torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("torch.distributed.run")
    args = run.get_args_parser().parse_args(words)
    check_python([args.training_script, *args.training_script_args], monkeypatch)


def check_pip(words: list[str]) -> None:
    assert words[0] in ("install", "uninstall")
    for before, word in pairwise(words):
        if word.startswith("."):
            assert before == "-e", "not editable: `import pccl` would fail in the clone itself"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "c" / "Makefile").read_text(encoding="utf-8")
    assert words[:2] == ["-C", "c"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[2:])


def check_compiler(words: list[str]) -> None:
    sources = [word for word in words if word.endswith(".c")]
    assert sources and all((ROOT / source).exists() for source in sources)
    asked = " ".join(words)
    for command in re.findall(r"\$\(pccl (\w+)\)", asked):
        check_pccl([command])
    assert "$(pccl cflags)" in asked and "$(pccl libs)" in asked


def check_pytest(words: list[str]) -> None:
    files = [word for word in words if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files)


def check_linter(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = {"lint-imports": "import-linter"}.get(name, name)
    assert package in project["project"]["optional-dependencies"]["dev"]
    assert package.replace("-", "") in project["tool"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)), ids=str)
def test_a_command_and_its_options_exist(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the root of the clone, where the reader has been told to stand."""
    monkeypatch.chdir(ROOT)
    program, *words = command.words
    words = ["1" if re.fullmatch("[A-Z]+", word) else word for word in words]  # a placeholder
    match program.removeprefix(".venv/bin/"):
        case "pccl":
            check_pccl(words)
        case "python" | "python3":
            check_python(words, monkeypatch)
        case "pip":
            check_pip(words)
        case "make":
            check_make(words)
        case "cc":
            check_compiler(words)
        case "pytest":
            check_pytest(words)
        case "pccl_master":
            check_pccl(["master", *words])
        case "torchrun":
            check_torchrun(words, monkeypatch)
        case "ruff" | "mypy" | "lint-imports" | "codespell":
            check_linter(program.rpartition("/")[2])
        case other:
            known = (
                "export",
                "git",
                "nft",
                "pkill",
                "cosmic-ray",
                "cr-filter-operators",
                "cr-report",
            )
            assert other in known, "what is this? tell test_snippets.py"
    settings = (ROOT / "docs" / "howto" / "tuning.md").read_text(encoding="utf-8")
    for name in command.settings:
        assert name == "PCCL_MASTER" or f"`{name}`" in settings


def test_torchrun_takes_no_option_of_an_example_for_its_own() -> None:
    """It completes what is abbreviated, behind the name of the script too."""
    run = pytest.importorskip("torch.distributed.run")
    for example in sorted((ROOT / "examples").rglob("*.py")):
        options = re.findall(r'"(--[\w-]+)"', example.read_text(encoding="utf-8"))
        words = [word for option in options for word in (option, "1")]
        args = run.get_args_parser().parse_args([example.name, *words])
        assert args.training_script_args == words


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 50


def test_keys_and_doctor_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cheap ones, word for word."""
    monkeypatch.chdir(tmp_path)
    seen = set()
    with pccl.MasterNode("127.0.0.1:0") as master:
        for command in COMMANDS:
            words = [
                re.sub(r"^the-master[\w-]*(:48148)?$", master.address, w) for w in command.words
            ]
            if words[0] == "pccl" and words[1] in ("keys", "doctor") and len(words) > 2:
                if not {"HOST:PORT", "--explain"} & {*words}:
                    assert cli.main(words[1:]) == 0, capsys.readouterr().out
                    seen.add(words[1])
    assert seen == {"keys", "doctor"}
    assert (tmp_path / "DIR" / "peer-4").is_dir()


# ---- programs ----


def assumed(programs: list[Block], number: int, home: Path) -> dict[str, Any]:
    """The names that a page presupposes, for peer `number`."""
    weights = np.arange(10.0, dtype=np.float32) + number
    names: dict[str, Any] = {
        "pccl": pccl,
        "np": np,
        "x": np.arange(100_000.0, dtype=np.float32),
        "gradients": weights.copy(),
        "weights": weights,
        "w": weights.copy(),
        "b": weights.copy(),
        "arrays": [weights.copy() for _ in range(3)],
        "step": np.zeros(1, np.int64),
        "path": home / f"state-{number}",
        "saved": home / f"diloco-{number}",
    }
    if any(re.search(r"\b(torch|model)\b", block.text) for block in programs):
        torch = pytest.importorskip("torch")
        model = torch.nn.Linear(4, 1)
        model(torch.randn(8, 4)).sum().backward()
        names |= {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "batch": torch.randn(8, 4),
            "loss_of": lambda batch: model(batch).pow(2).sum(),
            "DiLoCo": __import__("pccl.diloco").diloco.DiLoCo,
        }
    return names


class Reader:
    """One of the peers that read a page together, and run what it shows from top to bottom."""

    def __init__(self, names: dict[str, Any], own: str, common: str, end: Barrier) -> None:
        """`own` is the master of what the page connects, `common` that of what it assumes."""
        self._names, self._own, self._end = names, own, end
        self._comm = pccl.Communicator(common)

    def run(self, programs: list[Block]) -> None:
        try:
            with self._comm as comm:
                while comm.world_size < self._end.parties:
                    if comm.are_peers_pending():
                        comm.update_topology()
                for block in programs:
                    self._read(block, comm)
                self._end.wait(PATIENCE_S)  # nobody leaves whom others may wait for
        except BaseException:
            self._end.abort()
            raise

    def _read(self, block: Block, comm: pccl.Communicator) -> None:
        self._names["address"] = self._own
        if "Communicator(" not in block.text:
            self._names["comm"] = comm
        code = "\n" * (block.line - 1) + MASTER.sub(repr(self._own), block.text)  # its own lines
        exec(compile(code, block.page, "exec"), self._names)


@pytest.mark.parametrize("page", READABLE, ids=lambda page: page.name)
def test_the_programs_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    """Two peers, or as many as the page says, each in a thread of its own."""
    programs = [
        block
        for block in blocks(page, made=False)
        if block.language == "python" and not block.elsewhere
    ]
    peers = PEERS.get(page.name, 2)
    names = [assumed(programs, number, tmp_path) for number in range(peers)]
    end = Barrier(peers)
    with ThreadPoolExecutor(peers) as pool:
        with pccl.MasterNode("127.0.0.1:0") as own, pccl.MasterNode("127.0.0.1:0") as common:
            readers = [Reader(one, own.address, common.address, end) for one in names]
            reading = [pool.submit(reader.run, programs) for reader in readers]
            done, waiting = wait(reading, PATIENCE_S, FIRST_EXCEPTION)
            errors = list(filter(None, (one.exception() for one in done)))
            for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
                raise error  # what made the others wait in vain
            assert not waiting, f"{len(waiting)} of {peers} peers did not come to the end"
