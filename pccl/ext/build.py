"""Builds pccl.ext._core from c/ with cffi in API mode, from the declarations in c/pccl_core.h.

PCCL_BUILD=debug or asan in the environment gives an unoptimized or a sanitizer build.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "zmq", "net", "engine")  # in c/; c/test is not part of the extension

# C calls these through the function table if libzmq's own symbols are hidden (pccl.ext.tables).
CALLBACKS = """
void *memcpy(void *, const void *, size_t);
typedef int... pccl_fd;
struct pccl_pollitem { void *socket; pccl_fd fd; short events; short revents; ...; };

extern "Python" {
    void *pccl_py_ctx_new(void);
    int pccl_py_ctx_set(void *, int, int);
    int pccl_py_ctx_term(void *);
    void *pccl_py_socket(void *, int);
    int pccl_py_close(void *);
    int pccl_py_setsockopt(void *, int, const void *, size_t);
    int pccl_py_getsockopt(void *, int, void *, size_t *);
    int pccl_py_bind(void *, const char *);
    int pccl_py_connect(void *, const char *);
    int pccl_py_socket_monitor(void *, const char *, int);
    int pccl_py_poll(pccl_pollitem *, int, long);
    int pccl_py_msg_send(pccl_msg *, void *, int);
    int pccl_py_msg_recv(pccl_msg *, void *, int);
    void pccl_py_release(void *, void *);
    int pccl_py_errno_(void);
}
"""

# No fused multiply-add: results must have the same bits everywhere.
GCC_ALWAYS = ["-std=c99", "-ffp-contract=off", "-fvisibility=hidden", "-UNDEBUG"]  # asserts stay on
GCC_SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
GCC_FLAGS = {
    "": ["-O3", "-g0"],
    "debug": ["-O0", "-g"],
    "asan": ["-O1", "-g", *GCC_SANITIZE],
}
MSVC_ALWAYS = ["/fp:precise"]
MSVC_FLAGS = {
    "": ["/O2"],
    "debug": ["/Od", "/Zi"],
    "asan": ["/O1", "/Zi", "/fsanitize=address"],
}


def declarations() -> str:
    """The part of c/pccl_core.h that cffi can read."""
    text = (ROOT / "c" / "pccl_core.h").read_text(encoding="utf-8")
    return text.split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]


def flags() -> tuple[list[str], list[str]]:
    """Compiler and linker arguments for this platform's compiler and the requested PCCL_BUILD."""
    mode = os.environ.get("PCCL_BUILD", "")
    if mode not in GCC_FLAGS:
        raise SystemExit(f"PCCL_BUILD is {mode!r}: it must be unset, debug or asan")
    if sysconfig.get_platform().startswith("win"):
        return MSVC_ALWAYS + MSVC_FLAGS[mode], []
    linking = {"": ["-Wl,-s"] if sys.platform == "linux" else [], "debug": [], "asan": GCC_SANITIZE}
    return GCC_ALWAYS + GCC_FLAGS[mode], linking[mode]


def names(suffix: str) -> list[str]:
    """The files of FOLDERS with that suffix, as setuptools wants them: relative, with slashes."""
    found = [path for folder in FOLDERS for path in (ROOT / "c" / folder).glob(f"*{suffix}")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def builder() -> FFI:
    """The cffi builder of pccl.ext._core, which setup.py names."""
    compile_args, link_args = flags()
    made = FFI()
    made.cdef(declarations() + CALLBACKS)
    made.set_source(
        "pccl.ext._core",
        '#include <string.h>\n#include "pccl_core.h"',
        sources=names(".c"),
        depends=["c/pccl_core.h", *names(".h"), *names(".inc")],
        include_dirs=["c"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        libraries=["ws2_32"] if sysconfig.get_platform().startswith("win") else [],
    )
    return made


ffi = builder()
