"""Copies between device memory and host memory, which is all that hashing and the engine can use.

Device memory is copied to the host before use, and changed content is copied back afterwards. This
needs host memory of the same size, pinned so that the device can read and write it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from pccl import cuda
from pccl.runtime.client.memory import Operand, Operands
from pccl.tensors.arrays import Buffer
from pccl.types import DeviceType


class HostMemory(Protocol):
    """Host memory that a device copies from and to; freed with this object."""

    def data_ptr(self) -> int:
        """Its address."""


class Device(Protocol):
    """Copies between host memory and one kind of device; copies are complete after `wait`."""

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


def on_host(work: Operands) -> tuple[Operands, Callable[[], None] | None]:
    """The same collective over host memory, and a function that copies the result to its device.

    The function is None if all arrays are in host memory already.

    Raises:
        UnsupportedError: an array is on a device that does not exist.
    """
    buffers = [buffer for operand in work.each for buffer in (operand.send, operand.recv)]
    if all(buffer.device_type is DeviceType.CPU for buffer in buffers):
        return work, None
    seen: list[Buffer] = []
    results: list[int] = []
    pairs: list[tuple[int, int]] = []  # of an operand: indices into `seen`
    for operand in work.each:
        first = len(seen)
        if operand.send.address == operand.recv.address or operand.send.overlaps(operand.recv):
            seen.append(max(operand.send, operand.recv, key=lambda buffer: buffer.nbytes))
        else:
            seen += [operand.send, operand.recv]
        pairs.append((first, len(seen) - 1))
        results.append(len(seen) - 1)
    apart = {recv for send, recv in pairs if send != recv}
    view = HostView(seen, apart)

    def moved(buffer: Buffer, index: int) -> Buffer:
        address = view.address(index) + buffer.address - seen[index].address
        owner = view, buffer.owner
        return replace(buffer, address=address, owner=owner, device_type=DeviceType.CPU)

    each = tuple(
        Operand(moved(operand.send, send), moved(operand.recv, recv), operand.count)
        for operand, (send, recv) in zip(work.each, pairs, strict=True)
    )
    return replace(work, each=each), lambda: view.write_back(results)
