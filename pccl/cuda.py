"""Memory of NVIDIA GPUs, through torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pccl.errors import UnsupportedError
from pccl.tensors import Buffer, is_torch
from pccl.types import Result

if TYPE_CHECKING:
    import torch


def is_available() -> bool:
    """True if torch is installed and finds a GPU, so arrays may be in GPU memory.

    Imports torch.
    """
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def device() -> Cuda:
    """Copies to and from the GPUs of this machine.

    Raises:
        UnsupportedError: INVALID_ARGUMENT: there is no GPU, or no torch that can use it.
    """
    if not is_available():
        why = "memory on CUDA needs torch with CUDA, and a GPU, but one of them is missing"
        raise UnsupportedError(Result.INVALID_ARGUMENT, "cuda", why)
    return Cuda()


class Cuda:
    """A `runtime.client.memory.Device`, over pinned memory.

    Pinning memory is slow, so torch keeps freed pinned memory for the next use.
    """

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")

    def pipe(self, buffers: Sequence[Buffer], drained: bool = False) -> Pipe:
        """A pipe with its own streams, which start after all work on this thread's current ones.

        `drained`: after all work on the devices, whose streams other threads may use.
        """
        memory = {(each.address, each.nbytes): self._bytes(each) for each in buffers}
        for device in {each.device for each in memory.values()} if drained else ():
            self._torch.cuda.synchronize(device)
        return Pipe(self._torch, memory)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, uninitialized."""
        made: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return made

    def _bytes(self, buffer: Buffer) -> torch.Tensor:
        """The memory of a buffer as a tensor of bytes."""
        owner = buffer.owner
        if is_torch(owner) and owner.data_ptr() == buffer.address:
            elements = owner.detach().as_strided((buffer.count,), (1,))  # in the order of memory
            return elements.view(self._torch.uint8)
        made: torch.Tensor = self._torch.as_tensor(_Stretch(buffer), device="cuda")
        if made.data_ptr() != buffer.address:  # torch has copied it from there
            why = f"the memory at {buffer.address:#x} is not on the current CUDA device"
            raise UnsupportedError(Result.INVALID_ARGUMENT, "cuda", why)
        return made


class Pipe:
    """A `runtime.client.memory.Pipe`: on each device, a stream for each direction.

    `memory`: the bytes of each buffer, by its address and size.
    """

    def __init__(self, torch: Any, memory: dict[tuple[int, int], torch.Tensor]) -> None:
        self._torch, self._memory = torch, memory
        self._streams: dict[object, tuple[Any, Any]] = {}
        for device in {each.device for each in memory.values()}:
            queued = torch.cuda.current_stream(device).record_event()
            self._streams[device] = pair = torch.cuda.Stream(device), torch.cuda.Stream(device)
            for stream in pair:
                stream.wait_event(queued)

    def read(self, stretch: Any) -> Any:
        """Begins to copy a stretch from its device. Returns the event of its end."""
        return self._copy(stretch, writes=False)

    def write(self, stretch: Any) -> Any:
        """Begins to copy a stretch to its device. Returns the event of its end."""
        return self._copy(stretch, writes=True)

    def _copy(self, stretch: Any, writes: bool) -> Any:
        part, buffer = slice(stretch.begin, stretch.end), stretch.buffer
        on_device = self._memory[buffer.address, buffer.nbytes][part]
        on_host = stretch.host[part]
        stream = self._streams[on_device.device][writes]
        done = self._torch.cuda.Event(blocking=True)
        with self._torch.cuda.stream(stream):
            target, source = (on_device, on_host) if writes else (on_host, on_device)
            target.copy_(source, non_blocking=True)
            done.record(stream)
        return done


class _Stretch:
    """Bytes on a GPU, by https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, buffer: Buffer) -> None:
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 2,
        }
