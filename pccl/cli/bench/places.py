"""Where the arrays of a measured collective lie: in host memory, or on a GPU as torch's tensors."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

import numpy as np

from pccl.cli.bench import data
from pccl.tensors.arrays import Array
from pccl.types import DataType

DEVICES = ("cpu", "cuda")


class Place(Protocol):
    """Where arrays lie, and what the clock must wait for there."""

    def put(self, bits: data.Bits, dtype: DataType) -> Array:
        """An array of these elements."""

    def bits(self, array: Array) -> data.Bits:
        """Its elements, as numpy knows them."""

    def fill(self, array: Array, bits: data.Bits) -> None:
        """Gives it these elements."""

    def finish(self) -> None:
        """Returns when the device has done what this process has queued there."""


class Host:
    """Arrays of numpy, or, of bfloat16, torch's on the CPU."""

    def put(self, bits: data.Bits, dtype: DataType) -> Array:
        """A copy as an array."""
        return data.as_array(bits.copy(), dtype)

    def bits(self, array: Any) -> data.Bits:
        """The same memory."""
        return array if isinstance(array, np.ndarray) else _words(array)

    def fill(self, array: Array, bits: data.Bits) -> None:
        """Copies them there."""
        self.bits(array)[:] = bits

    def finish(self) -> None:
        """Nothing is queued."""


class Device:
    """Tensors of torch on a device, that of this process.

    Args:
        name: of the device, as torch has it.
    """

    def __init__(self, name: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = self._torch.device(name)
        if self._device.type == "cuda":
            self._torch.cuda.set_device(self._device)

    def put(self, bits: data.Bits, dtype: DataType) -> Array:
        """A copy as a tensor there."""
        tensor: Array = self._on_host(bits, dtype).to(self._device, copy=True)
        return tensor

    def bits(self, array: Any) -> data.Bits:
        """A copy."""
        tensor = array.cpu()
        if tensor.dtype is self._torch.bfloat16:
            return _words(tensor)
        found: data.Bits = tensor.numpy()
        return found

    def fill(self, array: Any, bits: data.Bits) -> None:
        """Copies them there."""
        array.copy_(self._on_host(bits, DataType.from_torch_dtype(array.dtype)))

    def finish(self) -> None:
        """Waits for all streams of the device."""
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    def _on_host(self, bits: data.Bits, dtype: DataType) -> Any:
        return self._torch.as_tensor(data.as_array(bits, dtype))


def of_process(device: str, number: int) -> Place:
    """The place of process `number` of this machine: its own GPU, or a shared one if there are
    fewer than processes."""
    if device == "cpu":
        return Host()
    gpus = importlib.import_module("torch").cuda.device_count()
    return Device(f"{device}:{number % gpus}")


def missing(device: str) -> str:
    """Why this machine cannot measure on that device, and what to do; or nothing."""
    if device == "cpu":
        return ""
    if importlib.util.find_spec("torch") is None:
        return "--device cuda needs torch, built with CUDA: pip install torch"
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        return f"--device cuda needs torch built with CUDA: torch {torch.__version__} is not"
    if not torch.cuda.is_available():
        return (
            f"--device cuda needs a GPU: torch {torch.__version__} is built with CUDA "
            f"{torch.version.cuda}, but finds none. See whether nvidia-smi lists one, and whether "
            "CUDA_VISIBLE_DEVICES hides it"
        )
    return ""


def described(device: str) -> str:
    """The device, for the head of a table."""
    if device == "cpu":
        return ""
    torch = importlib.import_module("torch")
    return f", on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _words(tensor: Any) -> data.Bits:
    """The elements of a tensor of bfloat16 on the host."""
    words: data.Bits = tensor.view(importlib.import_module("torch").int16).numpy().view(np.uint16)
    return words
