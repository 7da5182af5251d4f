"""The kernels give the same bits however they are built: levels, compilers, processors."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from peers.waiting import PATIENCE_S

from pccl.ext import ffi, lib

C_DIR = Path(__file__).resolve().parents[2] / "c"
SOURCES = [str(path) for path in sorted((C_DIR / "kernels").glob("*.c"))]
FLAGS = ["-std=c99", "-ffp-contract=off", "-DPCCL_ONE_ISA", f"-I{C_DIR}"]  # one level, not a choice
ORDER_MARK_BYTES = 4  # at the end: in the byte order of memory

LEVELS = {  # compiler arguments, and the processor flags that they need
    "O0": (["-O0"], set()),
    "O1": (["-O1"], set()),
    "O2": (["-O2"], set()),
    "O3": (["-O3"], set()),
    "avx2": (["-O3", "-mavx2"], {"avx2"}),
    "avx2-fma": (["-O3", "-mavx2", "-mfma"], {"avx2", "fma"}),
    "x86-64-v4": (
        ["-O3", "-march=x86-64-v4"],
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
    ),
}

TARGETS = {  # clang's target, arguments, the processor flags that they need, what emulates it
    "x86_64": ("x86_64-linux-musl", [], set(), "qemu-x86_64"),
    "x86_64-v3": ("x86_64-linux-musl", ["-mcpu=x86_64_v3"], {"avx2", "fma"}, "qemu-x86_64"),
    "aarch64": ("aarch64-linux-musl", [], set(), "qemu-aarch64"),
    "s390x": ("s390x-linux-musl", [], set(), "qemu-s390x"),
}


def self_test() -> bytes:
    size = lib.pccl_self_test(ffi.NULL, 0)
    out = ffi.new("unsigned char[]", size)
    assert lib.pccl_self_test(out, size) == size
    return bytes(ffi.buffer(out))


def processor_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


# by default those that are built quickly: the installed library has all vectors of this processor
@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=[] if level in ("O0", "O1") else pytest.mark.slow)
        for level in LEVELS
    ],
)
def test_every_level_gives_the_same_bits(level: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no cc here")
    arguments, needed = LEVELS[level]
    if needed and platform.machine() != "x86_64":
        pytest.skip(f"{platform.machine()} is not x86_64")
    if not needed <= processor_flags():
        pytest.skip(f"this processor lacks {needed - processor_flags()}")
    library = tmp_path / "kernels.so"
    build = [compiler, *FLAGS, "-fPIC", "-shared", *arguments, *SOURCES, "-o", str(library)]
    subprocess.run(build, check=True, timeout=PATIENCE_S)
    function = ctypes.CDLL(str(library)).pccl_self_test
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_size_t
    wanted = self_test()
    out = ctypes.create_string_buffer(len(wanted))
    assert function(out, len(wanted)) == len(wanted)
    assert out.raw == wanted


def runner(machine: str, emulator: str, needed: set[str]) -> list[str] | None:
    """The emulator for programs of that machine, if it is installed."""
    if platform.machine() == machine and needed <= processor_flags():
        return []
    for name in (emulator, f"{emulator}-static"):
        if not needed and (found := shutil.which(name)):
            return [found]
    return None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TARGETS)
def test_every_processor_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Built by clang; a processor of the other byte order differs in how it orders bytes alone."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no cross-compiler here: pip install ziglang")
    target, arguments, needed, emulator = TARGETS[name]
    program = tmp_path / "self_test"
    build = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS, "-O3", "-static"]
    sources = [*SOURCES, str(C_DIR / "test" / "print_self_test.c")]
    subprocess.run([*build, *arguments, *sources, "-o", str(program)], check=True, timeout=1000)
    run = runner(target.partition("-")[0], emulator, needed)
    if run is None:
        pytest.skip(f"it compiles, but nothing here runs it (Debian: qemu-user-static, {emulator})")
    ended = subprocess.run([*run, str(program)], check=True, timeout=600, capture_output=True)
    wanted = self_test()
    mark = wanted[-ORDER_MARK_BYTES:]
    if name == "s390x":
        mark = mark[::-1]
    assert ended.stdout == wanted[:-ORDER_MARK_BYTES] + mark
