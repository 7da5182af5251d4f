"""The C core for Python: `ffi` and `lib` of the extension that pccl/ext/build.py builds."""

from __future__ import annotations

from typing import Any

try:
    from pccl.ext._core import ffi, lib
except ModuleNotFoundError as error:
    if error.name != "pccl.ext._core":
        raise
    raise ImportError(
        "the C core of pccl is not built here: run `pip install -e .` in the checkout "
        "(it needs a C compiler), or import pccl from elsewhere if it is installed",
        name=error.name,
    ) from error

__all__ = ["address_of", "ffi", "lib"]


def address_of(pointer: Any) -> int:
    """The address in a pointer, or of an array."""
    return int(ffi.cast("uintptr_t", pointer))
