"""Arrays as plain memory: an address, a count, an element type, and the order of the elements.

This module does not import numpy or torch. An array of a library that the program has not imported
cannot exist, so it looks up both among the loaded modules. Other libraries (JAX, CuPy, MLX, ...)
share their memory through the buffer protocol, which says whether it is writable, or through DLPack
(https://dmlc.github.io/dlpack), and create arrays through the array API
(https://data-apis.org/array-api).

Collectives and shared state move memory and ignore shapes. So they transfer an array in its own
order, which must be the same on all peers.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

from pccl.errors import ArgumentError, UnsupportedError
from pccl.types import DataType, DeviceType, Result

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor

# cached: computing a dtype's name takes longer than reading all other attributes of an array
_numpy_dtype = functools.lru_cache(DataType.from_numpy_dtype)
_torch_dtype = functools.lru_cache(DataType.from_torch_dtype)

# the remedy with a copy c, in collectives and in shared state
_TORCH = "pass c instead, with c.copy_(tensor) before each call and tensor.copy_(c) after it"
_NUMPY = "pass c instead, with c[...] = array before each call and array[...] = c after it"

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"

_MEMORY_MAX = 1 << 57  # bytes that a process can address


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a dense array, such as a transposed one, or one in torch.channels_last.

    Dense means that its elements fill one stretch of memory, and no two share a place.
    """

    shape: tuple[int, ...]  # the array's shape, without dimensions of one element
    strides: tuple[int, ...]  # in elements, not bytes

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[float]) -> Layout | None:
        """The layout of an array that is not in C's order, and not empty; None: it is not dense."""
        dimensions = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
        place = 1
        for n, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
            if stride != place:
                return None
            place *= n
        return cls(tuple(n for n, _ in dimensions), tuple(int(stride) for _, stride in dimensions))

    def part(self, parts: int) -> Layout | None:
        """The layout of each of `parts` equal parts of the first dimension; None if they mix."""
        n, rest = self.shape[0], Layout(self.shape[1:], self.strides[1:])
        if n % parts or self.strides[0] < max(self.strides):
            return None
        if n == parts:
            return rest
        return Layout((n // parts, *rest.shape), self.strides)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}/{','.join(map(str, self.strides))}"


def shares_places(shape: Sequence[int], strides: Sequence[float]) -> bool:
    """True if elements may share memory, like those of an expanded tensor."""
    reach = 0.0  # the reach of the dimensions with smaller strides
    for n, stride in sorted(zip(shape, map(abs, strides), strict=True), key=lambda each: each[1]):
        if n > 1 and stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def described(layout: str) -> str:
    """A layout as errors quote it; "" for C order."""
    shape, _, strides = layout.partition("/")
    return f"{shape} with strides {strides}" if layout else "as in C"


@dataclass(slots=True)  # not frozen: that takes four times as long, for each array of a list
class Buffer:
    """A stretch of elements without gaps."""

    address: int  # the address of the first element, at any alignment
    count: int  # elements
    dtype: DataType  # the element type
    owner: object = field(repr=False, compare=False)  # keeps the memory alive
    device_type: DeviceType = DeviceType.CPU  # where it is
    layout: Layout | None = None  # the order of the elements; None: C's

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def check(self, name: str, array: object) -> None:
        """Raises ArgumentError if an array, whose memory this was, has other memory now."""
        now: tuple[int, int] | None = None
        if is_torch(array):
            now = array.data_ptr(), array.nbytes
        elif is_numpy(array):
            now = array.ctypes.data, array.nbytes
        if now not in (None, (self.address, self.nbytes)):
            raise ArgumentError(
                f"{name!r} has other memory than before, as after module.half(), module.to(), "
                "load_state_dict(assign=True), array.resize() or tensor.data = ...: make this "
                "object after such changes, or copy into the tensor or array"
            )

    @property
    def order(self) -> str:
        return described("" if self.layout is None else str(self.layout))

    def overlaps(self, other: Buffer) -> bool:
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )

    @classmethod
    def at(
        cls,
        address: int,
        count: int,
        dtype: DataType,
        owner: object,
        device_type: DeviceType = DeviceType.CPU,
        layout: Layout | None = None,
    ) -> Buffer:
        """Memory at an address for which the caller is responsible.

        Raises ValueError: the count is negative, or no memory can have so many elements; or there
        are elements at address 0.
        """
        if count < 0:
            raise ValueError(f"count is {count}: it must not be negative")
        nbytes = count * dtype.itemsize
        if nbytes >= _MEMORY_MAX or address + nbytes > sys.maxsize:
            raise ValueError(f"count is {count}: no memory has so many elements")
        if address <= 0 and count > 0:
            raise ValueError(f"{count} elements at address {address}")
        return cls(address, count, dtype, owner, device_type, layout)

    @classmethod
    def of(cls, array: Array, *, writable: bool = False) -> Buffer:
        """The memory of an array.

        Args:
            array: of any shape; dense, in any order of its dimensions.
            writable: whether it is going to be written.

        Raises:
            ValueError: not a numpy array or torch tensor with memory of its own, of an element type
                that is not supported, or read-only although it is to be written; or it is not
                dense.
            UnsupportedError: it is neither in host memory nor on a CUDA device.
        """
        if is_torch(array):
            return cls._of_torch(array)
        if is_numpy(array):
            return cls._of_numpy(array, writable)
        raise ArgumentError(f"{type(array).__name__} is neither a numpy.ndarray nor a torch.Tensor")

    @classmethod
    def _of_torch(cls, tensor: torch.Tensor) -> Buffer:
        if hasattr(tensor, "to_local"):
            raise ValueError("a DTensor lies on several machines: pass tensor.to_local()")
        if str(tensor.layout) != "torch.strided":
            raise ValueError(f"a {tensor.layout} tensor is not a dense array")
        device_type = DeviceType.from_torch_device_type(tensor.device.type)
        if device_type is None:
            raise UnsupportedError(
                Result.INVALID_ARGUMENT,
                "arrays",
                f"tensors on {tensor.device} are not supported, c = tensor.cpu() is: {_TORCH}",
            )
        dtype = _torch_dtype(tensor.dtype)
        layout = None
        if tensor.is_neg():
            what = "the tensor is stored with its sign reversed, c = tensor.resolve_neg() is not"
            raise ArgumentError(f"{what}: {_TORCH}")
        if not tensor.is_contiguous():
            layout = Layout.of(tensor.shape, tensor.stride())
            if layout is None:
                how = "c = tensor.contiguous()", _TORCH
                raise _not_dense("the tensor", tensor.shape, tensor.stride(), *how)
        return cls(tensor.data_ptr(), tensor.numel(), dtype, tensor, device_type, layout)

    @classmethod
    def _of_numpy(cls, array: np.ndarray[Any, Any], writable: bool) -> Buffer:
        dtype = _numpy_dtype(array.dtype)
        layout = None
        if not array.flags.c_contiguous:
            strides = _strides(array)
            layout = Layout.of(array.shape, strides)
            if layout is None:
                raise _not_dense("the array", array.shape, strides, "c = array.copy()", _NUMPY)
        if writable and not array.flags.writeable:
            raise ValueError("the array is read-only, and would be written to")
        return cls(array.ctypes.data, array.size, dtype, array, layout=layout)


def _strides(array: np.ndarray[Any, Any]) -> list[float]:
    """Strides in elements; fields of structured arrays take fractions of one."""
    each = (divmod(stride, array.itemsize) for stride in array.strides)
    return [whole + more / array.itemsize if more else whole for whole, more in each]


def _not_dense(
    what: str, shape: Sequence[int], strides: Sequence[float], copy: str, instead: str
) -> ArgumentError:
    what += f" ({'x'.join(map(str, shape))} with strides {','.join(map(str, strides))})"
    if shares_places(shape, strides):
        instead = "pass c instead, where the result is"
        why = f"elements of {what} share memory; those of {copy} do not"
    else:
        why = f"elements of {what} are not contiguous in memory; those of {copy} are"
    return ArgumentError(f"{why}: {instead}")


def is_torch(array: object) -> TypeGuard[torch.Tensor]:
    """True for a torch tensor, Parameters included."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(array, torch_module.Tensor)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor; False without importing its module, which loads slowly."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_finite(array: Array) -> bool:
    if is_torch(array):
        return bool(array.isfinite().all())
    return bool(sys.modules["numpy"].isfinite(array).all())


def is_numpy(array: object) -> TypeGuard[np.ndarray[Any, Any]]:
    numpy_module = sys.modules.get("numpy")
    return numpy_module is not None and isinstance(array, numpy_module.ndarray)


def new(shape: tuple[int, ...], like: Array, order: Sequence[int] | None = None) -> Array:
    """A new array of the same kind and dtype, with arbitrary content.

    `order`: its dimensions, from the outermost in memory to the innermost; None: C's order.
    """
    lying = shape if order is None else tuple(shape[i] for i in order)
    made: Any
    if is_torch(like):
        made = like.new_empty(lying)
    else:
        made = sys.modules["numpy"].empty(lying, like.dtype)
    if order is not None:
        back = sorted(range(len(order)), key=order.__getitem__)
        made = made.permute(back) if is_torch(like) else made.transpose(back)
    array: Array = made
    return array


def order_of(array: Array) -> list[int]:
    """The dimensions of a dense array, from the outermost in memory to the innermost."""
    given: Any = array
    strides = given.stride() if is_torch(array) else given.strides
    return sorted(range(len(strides)), key=lambda i: strides[i], reverse=True)


def in_c_order(buffer: Buffer) -> Buffer:
    """A buffer with the same elements in C's order; a copy if the order differs."""
    if buffer.layout is None:
        return buffer
    array: Any = buffer.owner  # nothing else has a layout
    return Buffer.of(array.detach().contiguous() if is_torch(array) else array.copy())


def put_back(buffer: Buffer, ordered: Buffer) -> None:
    """Copies the content of a copy in C order back to its buffer, if it is a copy."""
    if buffer.layout is None:
        return
    array: Any = buffer.owner
    copy: Any = ordered.owner
    if is_torch(array):
        array.detach().copy_(copy)
    else:
        array[...] = copy


def same_kind(send: Array, recv: Array) -> None:
    """Raises ValueError unless both or neither are torch tensors."""
    if is_torch(send) != is_torch(recv):
        raise ValueError(
            "send and recv must be both torch tensors or both numpy arrays, not "
            f"{type(send).__name__} and {type(recv).__name__}"
        )


def pair(send: Array, recv: Array) -> tuple[Buffer, Buffer]:
    """The memory of a collective's two arrays; `recv` may be `send`.

    Raises:
        ValueError: one is of torch and one of numpy, or neither; an element type is not supported;
            `recv` is read-only; or they overlap without being the same memory; or one is not dense;
            or dtypes, element counts or orders in memory differ.
        UnsupportedError: one is neither in host memory nor on a CUDA device.
    """
    target = Buffer.of(recv, writable=True)
    if send is recv:
        return target, target
    same_kind(send, recv)
    source = Buffer.of(send)
    if source.dtype is not target.dtype:
        raise ArgumentError(f"send is {source.dtype.name}, recv is {target.dtype.name}")
    if source.count != target.count:
        raise ArgumentError(f"send has {source.count} elements, recv has {target.count}")
    if source.layout != target.layout:
        raise ArgumentError(
            f"send and recv lie in different orders in memory, {source.order} and {target.order}: "
            f"they must lie alike, as do send and {'torch' if is_torch(send) else 'numpy'}"
            ".empty_like(send)"
        )
    if source.address != target.address and source.overlaps(target):
        raise ValueError("send and recv overlap in part: pass the same array, or separate ones")
    return source, target


# ---- arrays of other libraries ----

_ON_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class Exporter(Protocol):
    """An array that shares its memory by DLPack."""

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def native(array: Any, *, written: bool = False) -> tuple[Array, bool]:
    """A numpy array or torch tensor in the memory of `array`, or with a copy of its content.

    Args:
        array: of any library.
        written: whether the caller writes to the result; if so, a read-only `array` is copied.

    Returns:
        The array, and whether it is a copy; `like` turns a copy into an array of the library.

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
    """Converts a numpy array or torch tensor to the library and the device of `given`."""
    if is_torch(given) or is_numpy(given) or not hasattr(given, "__array_namespace__"):
        return result
    library = given.__array_namespace__()
    if is_torch(result):
        return library.from_dlpack(result)
    if hasattr(given, "sharding") and given.shape == result.shape:  # a JAX array
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
