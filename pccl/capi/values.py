"""Values of C programs: converts structs, enumerations and handles to objects, and checks them."""

from __future__ import annotations

import itertools
import threading
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Generic, TypeVar

from pccl.capi.libpccl import ffi
from pccl.descriptors import ReduceDescriptor, ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.shared_state import SharedState, TensorInfo
from pccl.support import address_text
from pccl.types import (
    DataType,
    DeviceType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
)

IPV4, IPV6 = 0, 1

E = TypeVar("E", bound=Enum)
T = TypeVar("T")


def given(pointer: Any, name: str) -> Any:
    """Returns a pointer that is not NULL. Raises ValueError: it is NULL."""
    if pointer == ffi.NULL:
        raise ValueError(f"{name} is NULL")
    return pointer


def member(kind: type[E], value: int, name: str) -> E:
    """The member of an enumeration. Raises ValueError: it has no such member."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{each.value} ({each.name})" for each in kind)
        raise ValueError(f"{name} is {value}: it may be {known}") from None


def address(socket: Any) -> str:
    """A ccoip_socket_address_t as "host:port". Raises ValueError: its protocol is unknown."""
    inet = socket.inet
    if inet.protocol == IPV4:
        host = str(IPv4Address(bytes(inet.ipv4.data)))
    elif inet.protocol == IPV6:
        host = str(IPv6Address(bytes(inet.ipv6.data)))
    else:
        raise ValueError(f"inet.protocol is {inet.protocol}: it may be 0 (IPv4), 1 (IPv6)")
    return address_text(host, socket.port)


def all_reduce(send: Any, recv: Any, work: Any) -> ReduceOpDescriptor:
    """The all-reduce that a pcclReduceDescriptor_t describes, with its memory.

    Raises ValueError: a value is not in its enumeration, a buffer is NULL, or the buffers overlap
    in part.
    """
    source = work.src_descriptor
    dtype = member(DataType, source.datatype, "src_descriptor.datatype")
    hint = member(DistributionHint, source.distribution_hint, "src_descriptor.distribution_hint")
    options = None
    how = work.quantization_options
    algorithm = member(QuantizationAlgorithm, how.algorithm, "quantization_options.algorithm")
    if algorithm is not QuantizationAlgorithm.NONE:
        name = "quantization_options.quantized_datatype"
        options = QuantizationOptions(member(DataType, how.quantized_datatype, name), algorithm)
    operand = ReduceOperandDescriptor(dtype, hint)
    op = member(ReduceOp, work.op, "op")
    descriptor = ReduceDescriptor(work.count, op, work.tag, operand, options)
    if work.count:
        given(send, "sendbuf")
        given(recv, "recvbuf")
    source, target = _place(send), _place(recv)
    if 0 < abs(source - target) < work.count * dtype.itemsize:
        raise ValueError("sendbuf and recvbuf overlap in part: they must be the same or separate")
    return ReduceOpDescriptor(source, target, descriptor)


def _place(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def fill(info: Any, found: ReduceInfo) -> None:
    """Fills a pcclReduceInfo_t, unless it is NULL."""
    if info != ffi.NULL:
        info.local_world_size = found.local_world_size
        info.tx_bytes, info.rx_bytes = found.tx_bytes, found.rx_bytes


class State:
    """The shared state of a C program, which passes its entries with each call.

    Calls with the same entries use the same SharedState, which remembers between calls whether the
    state is torn. If the state is torn and the program passes another revision, the program has
    replaced the content, and a new SharedState begins.
    """

    def __init__(self) -> None:
        self._entries: tuple[object, ...] = ()
        self._state: SharedState | None = None

    def of(self, state: Any) -> SharedState:
        """The shared state of a pcclSharedState_t.

        Raises ValueError: an entry is not valid, or there are no entries.
        """
        if state.count:
            given(state.infos, "infos")
        entries = tuple(_entry(state.infos[i], i) for i in range(state.count))
        known = self._state
        mended = known is not None and known.torn and known.revision != state.revision
        if known is None or mended or entries != self._entries:
            known = SharedState([TensorInfo(name, place, **rest) for name, place, rest in entries])
        known.revision = state.revision
        self._entries, self._state = entries, known
        return known


def _entry(info: Any, index: int) -> tuple[str, int, dict[str, Any]]:
    name = ffi.string(given(info.name, f"infos[{index}].name")).decode()
    return (
        name,
        _place(info.data),
        {
            "numel": info.count,
            "dtype": member(DataType, info.datatype, f"infos[{index}].datatype"),
            "device_type": member(DeviceType, info.device_type, f"infos[{index}].device_type"),
            "allow_content_inequality": info.allow_content_inequality,
        },
    )


# ---- handles ----

_numbers = itertools.count(0x1000, 0x10)  # shared by all kinds, so that no two handles are equal


class Handles(Generic[T]):
    """A C program's objects of one kind. Their handles are unique numbers in the form of pointers.

    So an invalid or destroyed handle is recognized, and never dereferenced.

    Args:
        kind: the C type of a handle.
        what: the name of the kind in messages, with its article.
    """

    def __init__(self, kind: str, what: str) -> None:
        self._kind, self._what = kind, what
        self._objects: dict[int, T] = {}
        self._lock = threading.Lock()

    def add(self, made: T) -> Any:
        number = next(_numbers)
        with self._lock:
            self._objects[number] = made
        return ffi.cast(self._kind, number)

    def __getitem__(self, handle: Any) -> T:
        """The object of a handle. Raises ValueError: there is none."""
        number = int(ffi.cast("uintptr_t", handle))
        with self._lock:
            if number in self._objects:
                return self._objects[number]
        if not number:
            raise ValueError(f"{self._what} is NULL")
        raise ValueError(f"{number:#x} is not {self._what}, or it was destroyed")

    def remove(self, handle: Any) -> T:
        """Removes and returns an object. Its handle becomes invalid.

        Raises ValueError: there is none.
        """
        found = self[handle]
        with self._lock:
            if self._objects.pop(int(ffi.cast("uintptr_t", handle)), None) is None:
                raise ValueError(f"{self._what} was destroyed by another thread")
        return found
