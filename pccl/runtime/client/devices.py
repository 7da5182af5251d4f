"""Devices, and their memory as host memory, which is all that hashing and the engine can use.

Device memory is copied to the host before use, and changed content is copied back afterwards. This
needs host memory of the same size, pinned so that the device can read and write it directly. Shared
state is copied as a whole here; copies.py has the arrays of collectives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from pccl import cuda
from pccl.tensors.arrays import Buffer
from pccl.types import DeviceType


class HostMemory(Protocol):
    """Host memory that a device copies from and to; freed with this object."""

    def data_ptr(self) -> int:
        """Its address."""


class Mark(Protocol):
    """A copy that has begun."""

    def synchronize(self) -> None:
        """Returns when it is complete."""


class Piece(Protocol):
    """The bytes begin <= i < end of a buffer on a device, and of its copy on the host."""

    @property
    def buffer(self) -> Buffer:
        """The buffer."""

    @property
    def host(self) -> HostMemory:
        """Its copy."""

    @property
    def begin(self) -> int:
        """The first byte."""

    @property
    def end(self) -> int:
        """The byte after the last one."""


class Pipe(Protocol):
    """Copies in both directions at once, in each one after the other."""

    def read(self, piece: Piece) -> Mark:
        """Begins to copy from the device."""

    def write(self, piece: Piece) -> Mark:
        """Begins to copy to the device."""


class Device(Protocol):
    """Copies between host memory and one kind of device; copies are complete after `wait`."""

    def pipe(self, buffers: Sequence[Buffer]) -> Pipe:
        """Copies of these buffers, after all work that this thread has queued for the device now,
        and independent of what it queues later."""

    def allocate(self, nbytes: int) -> HostMemory:
        """Host memory."""

    def read(self, host: HostMemory, buffer: Buffer) -> None:
        """Begins to copy from the device, after all work that the program has queued there."""

    def write(self, buffer: Buffer, host: HostMemory) -> None:
        """Begins to copy to the device."""

    def wait(self) -> None:
        """Returns when all copies are complete."""


class HostView:
    """Buffers as host memory: those on a device as copies, the others as they are.

    Args:
        buffers: the buffers.
        unread: indices of buffers whose content is not needed on the host.

    Raises:
        UnsupportedError: a buffer is on a device that does not exist.
    """

    def __init__(self, buffers: Sequence[Buffer], unread: Container[int] = ()) -> None:
        self._buffers = buffers
        self._copies: dict[int, HostMemory] = {}
        self._device: Device | None = None
        for index, buffer in enumerate(buffers):
            if buffer.device_type is DeviceType.CPU or buffer.nbytes == 0:
                continue
            if self._device is None:
                self._device = cuda.device()
            self._copies[index] = host = self._device.allocate(buffer.nbytes)
            if index not in unread:
                self._device.read(host, buffer)
        if self._device is not None:
            self._device.wait()

    def address(self, index: int) -> int:
        """The host address of the buffer with this index."""
        if index in self._copies:
            return self._copies[index].data_ptr()
        return self._buffers[index].address

    def copied(self, index: int) -> bool:
        """Whether the host address of that buffer is that of a copy."""
        return index in self._copies

    def write_back(self, changed: Iterable[int]) -> None:
        """Copies the buffers with these indices back to their devices."""
        if self._device is None:
            return
        for index in changed:
            if index in self._copies:
                self._device.write(self._buffers[index], self._copies[index])
        self._device.wait()
