"""Arrays of numpy and torch as plain memory: an address, a count and an element type.

Neither library is imported here. An array of one that the program has not imported cannot exist, so
both are looked up among the modules that are loaded.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from pccl.errors import UnsupportedError
from pccl.types import DataType, DeviceType, Result

if TYPE_CHECKING:
    import numpy as np
    import torch

# the names of dtypes take longer than all else that is asked of a small array
_numpy_dtype = functools.lru_cache(DataType.from_numpy_dtype)
_torch_dtype = functools.lru_cache(DataType.from_torch_dtype)

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous stretch of elements.

    Attributes:
        address: of the first element; of any alignment.
        count: elements.
        dtype: of an element.
        owner: keeps the memory alive.
        device_type: where it is.
    """

    address: int
    count: int
    dtype: DataType
    owner: object = field(repr=False, compare=False)
    device_type: DeviceType = DeviceType.CPU

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.itemsize

    def overlaps(self, other: Buffer) -> bool:
        """Whether both have a byte in common."""
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
    ) -> Buffer:
        """Memory that the caller vouches for.

        Raises:
            ValueError: the count is negative, or there are elements at address 0.
        """
        if count < 0:
            raise ValueError(f"count is {count}: it must not be negative")
        if address <= 0 and count > 0:
            raise ValueError(f"{count} elements at address {address}")
        return cls(address, count, dtype, owner, device_type)

    @classmethod
    def of(cls, array: Array, *, writable: bool = False) -> Buffer:
        """The memory of an array.

        Args:
            array: of any shape, contiguous in C order.
            writable: whether it is going to be written.

        Raises:
            ValueError: not a numpy array or torch tensor with memory of its own, of an element type
                that is not supported, or read-only although it is to be written.
            AssertionError: it is not contiguous.
            UnsupportedError: it is neither in host memory nor on a CUDA device.
        """
        if is_torch(array):
            return cls._of_torch(array)
        if is_numpy(array):
            return cls._of_numpy(array, writable)
        raise ValueError(f"{type(array).__name__} is neither a numpy.ndarray nor a torch.Tensor")

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
                f"tensors on {tensor.device} are not supported yet: pass tensor.cpu()",
            )
        dtype = _torch_dtype(tensor.dtype)
        if not tensor.is_contiguous() or tensor.is_neg():
            raise AssertionError("the tensor is not contiguous: pass tensor.contiguous()")
        return cls(tensor.data_ptr(), tensor.numel(), dtype, tensor, device_type)

    @classmethod
    def _of_numpy(cls, array: np.ndarray[Any, Any], writable: bool) -> Buffer:
        dtype = _numpy_dtype(array.dtype)
        if not array.flags.c_contiguous:
            raise AssertionError("the array is not contiguous: pass numpy.ascontiguousarray(array)")
        if writable and not array.flags.writeable:
            raise ValueError("the array is read-only, and would be written to")
        return cls(array.ctypes.data, array.size, dtype, array)


def is_torch(array: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a torch tensor (a Parameter is one)."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(array, torch_module.Tensor)


def is_numpy(array: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether it is a numpy array."""
    numpy_module = sys.modules.get("numpy")
    return numpy_module is not None and isinstance(array, numpy_module.ndarray)


def new(shape: tuple[int, ...], like: Array) -> Array:
    """An array of the same kind and dtype, with any content."""
    if is_torch(like):
        return like.new_empty(shape)
    numpy_module = sys.modules["numpy"]
    made: np.ndarray[Any, Any] = numpy_module.empty(shape, like.dtype)
    return made


def same_kind(send: Array, recv: Array) -> None:
    """Raises ValueError unless both are of torch, or both are not."""
    if is_torch(send) != is_torch(recv):
        raise ValueError(
            "send and recv must be both torch tensors or both numpy arrays, not "
            f"{type(send).__name__} and {type(recv).__name__}"
        )


def pair(send: Array, recv: Array) -> tuple[Buffer, Buffer]:
    """The memory of a collective's two arrays; `recv` may be `send`.

    Raises:
        ValueError: one is of torch and one of numpy, or neither; an element type is not supported;
            `recv` is read-only; or they overlap without being the same memory.
        AssertionError: one is not contiguous, or dtypes or element counts differ.
        UnsupportedError: one is neither in host memory nor on a CUDA device.
    """
    same_kind(send, recv)
    source = Buffer.of(send)
    target = Buffer.of(recv, writable=True)
    if source.dtype is not target.dtype:
        raise AssertionError(f"send is {source.dtype.name}, recv is {target.dtype.name}")
    if source.count != target.count:
        raise AssertionError(f"send has {source.count} elements, recv has {target.count}")
    if source.overlaps(target) and source.address != target.address:
        raise ValueError("send and recv overlap in part: pass the same array, or separate ones")
    return source, target
