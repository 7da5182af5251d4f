"""Builds pccl.capi.libpccl, which is both the library for C programs and an extension module.

Its C functions are in c/api/library.c. They call those of c/api/library.h, which Python implements
in pccl.capi.calls.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = "pccl/capi/include"


def _flags() -> tuple[list[str], list[str]]:
    """Flags of the C core. Its builder is loaded by path, because pccl is not installed yet."""
    path = ROOT / "pccl" / "ext" / "build.py"
    spec = importlib.util.spec_from_file_location("pccl_ext_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compile_args, link_args = module.flags()
    return compile_args, link_args


def _between(path: str, begin: str, end: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.split(begin, 1)[1].split(end, 1)[0]


def builder() -> FFI:
    """The cffi builder of pccl.capi.libpccl, which setup.py names."""
    compile_args, link_args = _flags()
    functions = _between("c/api/library.h", "/* cdef begin */", "/* cdef end */")
    made = FFI()
    made.cdef(_between(f"{INCLUDE}/pccl.h", "/* types begin */", "/* types end */"))
    made.cdef(f'extern "Python+C" {{ {functions} }}\nvoid pccl_capi_implement(void);')
    if sysconfig.get_platform().startswith("linux"):
        link_args = [*link_args, "-ldl"]
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the stable ABI since 3.11
    made.set_source(
        "pccl.capi.libpccl",
        '#include "library.h"',
        sources=["c/api/library.c"],
        depends=["c/api/library.h", f"{INCLUDE}/pccl.h"],
        include_dirs=[INCLUDE, "c/api"],
        define_macros=[("Py_LIMITED_API", "0x030b0000")] if limited else [],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    return made


ffi = builder()
