"""Arrays of other libraries (JAX, CuPy, MLX, ...), as numpy or torch sees their memory.

None of these libraries is imported here. They share memory by the buffer protocol, which says
whether it may be written, or by DLPack (https://dmlc.github.io/dlpack), and make arrays by the
array API (https://data-apis.org/array-api).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from pccl.errors import ArgumentError
from pccl.tensors.arrays import Array, is_numpy, is_torch

_ON_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class Exporter(Protocol):
    """An array that shares its memory by DLPack."""

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def native(array: Any, *, written: bool = False) -> tuple[Array, bool]:
    """An array of numpy or torch in the memory of `array`, or with a copy of its content.

    Args:
        array: of any library.
        written: whether the result is going to be written; a read-only `array` is copied then.

    Returns:
        The array, and whether it is such a copy; `like` turns a copy into an array of the library.

    Raises:
        ValueError: the memory cannot be read; or it is read-only, and its library cannot make an
            array of the result.
    """
    if is_torch(array) or is_numpy(array):
        return array, False
    seen = _view(array)
    if not written or is_torch(seen) or seen.flags.writeable:
        return seen, False
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__array_namespace__")):
        kind = type(array).__name__
        raise ArgumentError(f"{kind} is read-only: pass c = numpy.array(x), where the result is")
    return seen.copy(), True


def like(given: Any, result: Any) -> Any:
    """An array of numpy or torch as one of the library of `given`, where that is."""
    if is_torch(given) or is_numpy(given) or not hasattr(given, "__array_namespace__"):
        return result
    library = given.__array_namespace__()
    if is_torch(result):
        return library.from_dlpack(result)
    if hasattr(given, "sharding") and given.shape == result.shape:  # of JAX
        return library.asarray(result, device=given.sharding)
    return library.asarray(result)


def _view(array: Any) -> Any:
    numpy = importlib.import_module("numpy")
    try:
        return numpy.asarray(memoryview(array))
    except (TypeError, ValueError, BufferError):  # no buffer, or none with elements of this type
        pass
    kind = type(array).__name__
    if not hasattr(array, "__dlpack__"):
        raise ArgumentError(
            f"{kind} is neither a numpy.ndarray nor a torch.Tensor, nor a list or dict of them, "
            "nor does it share its memory by DLPack or the buffer protocol: pass numpy.array(x)"
        )
    try:
        if hasattr(array, "__array__"):  # from a device, a copy
            found = numpy.asarray(array).view()
            found.flags.writeable = False
            return found
        if array.__dlpack_device__()[0] in _ON_CUDA:
            return importlib.import_module("torch").from_dlpack(array)
        return numpy.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError, ImportError) as error:
        raise ArgumentError(
            f"the memory of this {kind} cannot be read: pass a copy, by numpy or torch, of an "
            f"element type that these have, and not within a function that is traced. {error}"
        ) from error
