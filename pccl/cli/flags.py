"""`pccl cflags` and `pccl libs`: the flags to compile and link programs in C."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import sysconfig
from pathlib import Path

from pccl.errors import UnsupportedError
from pccl.types import Result

PACKAGE = Path(__file__).resolve().parents[1] / "capi"
LINKED = "libpccl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog}"
    parser.epilog = "cc $(pccl cflags) program.c $(pccl libs) -o program"


def run(args: argparse.Namespace) -> int:
    made = cflags() if args.command == "cflags" else libs()
    print(" ".join(map(shlex.quote, made)))
    return 0


def cflags() -> list[str]:
    """The flag that finds <pccl.h>."""
    return [f"-I{PACKAGE / 'include'}"]


def libs() -> list[str]:
    """The linker flags for the library and its Python, with the paths where programs find both."""
    if sys.platform == "win32":
        why = "C programs link with pccl on Linux and macOS only; WSL is a Linux"
        raise UnsupportedError(Result.INVALID_USAGE, "pccl libs", why)
    spec = importlib.util.find_spec(f"pccl.capi.{LINKED}")
    if spec is None or spec.origin is None:
        why = "the library is not built: run `pip install -e .` in the checkout"
        raise UnsupportedError(Result.INVALID_USAGE, "pccl libs", why)
    library, python = Path(spec.origin), _python()
    flags = [str(library)]
    if sys.platform != "darwin":  # its linker finds no .so with -l
        flags = [f"-L{library.parent}", f"-l{library.stem.removeprefix('lib')}"]
    flags += [f"-L{python.parent}", f"-l{python.name.removeprefix('lib').rpartition('.')[0]}"]
    return flags + [f"-Wl,-rpath,{home}" for home in (library.parent, python.parent)]


def _python() -> Path:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    name = f"libpython{sysconfig.get_config_var('LDVERSION')}{suffix}"
    for home in (sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL")):
        if home and (Path(home) / name).exists():
            return Path(home) / name
    why = (
        f"{sys.executable} has no {name}, which C programs need: take a Python that was built with "
        "--enable-shared, or on Debian install libpython3-dev"
    )
    raise UnsupportedError(Result.INVALID_USAGE, "pccl libs", why)
