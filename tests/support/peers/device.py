"""A stand-in for a device. A test may delay its copies, or let them fail."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pccl.runtime.client.memory import Stretch
from pccl.tensors import Buffer
from peers.waiting import PATIENCE_S


class Host:
    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, 0xEE, np.uint8)

    def data_ptr(self) -> int:
        return self.bytes.ctypes.data


class Copy:
    """A copy of a pipe, made when the copies before it are made and `Gpu.may` allows it."""

    def __init__(
        self,
        kind: str,
        stretch: Stretch,
        work: Callable[[], object],
        number: int,
        fails: Callable[[Copy], bool],
    ) -> None:
        self.kind, self.stretch, self.work, self.fails = kind, stretch, work, fails
        self.number = number  # how many reads of that buffer came before and with it
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(PATIENCE_S), (
            f"the {self.kind} of byte {self.stretch.begin} is not made"
        )
        if self.fails(self):
            raise RuntimeError("the device is lost")


class Gpu:
    """A device whose addresses no host can touch.

    Threads make the copies of a pipe, in the order of each of its two streams, when `may` allows
    it.

    Attributes:
        made: the copies of pipes, in the order in which they were made.
        may: whether a copy may be made now, given the copies that were made.
        fails: whether a copy fails.
    """

    def __init__(self) -> None:
        self._memory: dict[int, np.ndarray] = {}
        self._numbers = itertools.count()  # threads of several peers ask for memory
        self.read_addresses: list[int] = []
        self.written_addresses: list[int] = []
        self.may: Callable[[Copy], bool] = lambda copy: True
        self.fails: Callable[[Copy], bool] = lambda copy: False
        self.made: list[Copy] = []
        self.changed = threading.Condition()

    def pipe(self, buffers: Sequence[Buffer], drained: bool = False) -> GpuPipe:
        return GpuPipe(self)

    def hold(self, content: np.ndarray) -> int:
        """The address of a copy of the content: where a buffer begins that is read or written."""
        address = (1 << 60) + (next(self._numbers) << 40)
        self._memory[address] = content.copy().view(np.uint8)
        return address

    def memory(self, buffer: Buffer) -> np.ndarray:
        return self._memory[buffer.address]

    def content(self, address: int) -> np.ndarray:
        return self._memory[address]

    def allocate(self, nbytes: int) -> Host:
        return Host(nbytes)


class GpuPipe:
    """Two streams; each makes its copies in order."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copies = {kind: queue.SimpleQueue[Copy]() for kind in ("read", "write")}
        self.turns = {kind: threading.Lock() for kind in self.copies}

    def read(self, stretch: Stretch) -> Copy:
        host, part = stretch.host, slice(stretch.begin, stretch.end)
        assert isinstance(host, Host)
        source = self.gpu.memory(stretch.buffer)
        self.gpu.read_addresses.append(stretch.buffer.address)
        return self.begin("read", stretch, lambda: np.copyto(host.bytes[part], source[part]))

    def write(self, stretch: Stretch) -> Copy:
        host, part = stretch.host, slice(stretch.begin, stretch.end)
        assert isinstance(host, Host)
        target = self.gpu.memory(stretch.buffer)
        self.gpu.written_addresses.append(stretch.buffer.address)
        return self.begin("write", stretch, lambda: np.copyto(target[part], host.bytes[part]))

    def begin(self, kind: str, stretch: Stretch, work: Callable[[], object]) -> Copy:
        stream = "read" if kind == "read" else "write"
        number = self.gpu.read_addresses.count(stretch.buffer.address)
        copy = Copy(kind, stretch, work, number, self.gpu.fails)
        self.copies[stream].put(copy)
        threading.Thread(target=self.make_next, args=(stream,), daemon=True).start()
        return copy

    def make_next(self, kind: str) -> None:
        gpu = self.gpu
        with self.turns[kind], gpu.changed:
            copy = self.copies[kind].get()
            gpu.changed.wait_for(lambda: gpu.may(copy), 30)
            copy.work()
            gpu.made.append(copy)
            copy.done.set()
            gpu.changed.notify_all()
