"""What pccl asks of torch.cuda: on which streams, after what. Tensors of the CPU stand for those of
a GPU, and what is queued is only noted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pccl import cuda  # noqa: E402
from pccl.runtime.client.memory import Stretch  # noqa: E402
from pccl.tensors import Buffer  # noqa: E402


class Stream:
    """A stream that notes what it is given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def record_event(self) -> str:
        self._log.append(f"{self.name} is at e")
        return "e"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")


class Driver:
    """A torch with one CUDA device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.using = "none"
        self.made = 0
        self.cuda = SimpleNamespace(
            current_stream=lambda device: Stream("the caller's", self.log),
            Stream=self.stream,
            stream=self.within,
            Event=self.event,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def stream(self, device: object) -> Stream:
        self.made += 1
        return Stream(f"stream {self.made}", self.log)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.using = self.using, stream.name
        yield
        self.using = before

    def event(self, blocking: bool) -> Any:
        assert blocking  # whoever waits leaves the processor to others
        return SimpleNamespace(record=lambda stream: self.log.append(f"{stream.name} has done it"))

    def empty(self, *args: Any, **how: Any) -> Any:
        self.log.append(f"{self.using} gets memory")
        return torch.empty(*args, **how)


class Piped:
    """A pipe of two tensors, the contribution and the result, of 1000 elements."""

    def __init__(self) -> None:
        self.send, self.recv = torch.arange(1000.0), torch.zeros(1000)
        self.buffers = [Buffer.of(self.send), Buffer.of(self.recv)]
        self.driver = Driver()
        memory = {
            (buffer.address, buffer.nbytes): tensor.view(torch.uint8)
            for buffer, tensor in zip(self.buffers, (self.send, self.recv), strict=True)
        }
        self.pipe = cuda.Pipe(self.driver, memory)


@pytest.fixture
def piped() -> Piped:
    return Piped()


def test_copies_begin_after_the_queued_work_of_the_caller(piped: Piped) -> None:
    """And on streams of their own, one for each direction."""
    waits = ["the caller's is at e", "stream 1 waits for e", "stream 2 waits for e"]
    assert piped.driver.log == waits
    send, recv = piped.buffers
    host = torch.zeros(4000, dtype=torch.uint8)
    piped.pipe.read(Stretch(send, host, 400, 800))
    assert host[400:800].view(torch.float32).tolist() == [*range(100, 200)]
    assert not host[:400].any() and not host[800:].any()
    piped.pipe.write(Stretch(recv, host, 0, 800))
    assert piped.recv.tolist() == [0] * 100 + [*range(100, 200)] + [0] * 800
    assert piped.driver.log[3:] == ["stream 1 has done it", "stream 2 has done it"]


def test_a_drained_pipe_also_comes_after_what_other_threads_have_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared state is read after all work on the device, on whatever stream."""
    driver = Driver()
    driver.cuda.synchronize = lambda device: driver.log.append(f"all work on {device} is done")
    monkeypatch.setitem(sys.modules, "torch", driver)
    device, buffer = cuda.Cuda(), Buffer.of(torch.arange(8.0))
    device.pipe([buffer])
    assert driver.log[0] == "the caller's is at e"
    driver.log.clear()
    device.pipe([buffer], drained=True)
    assert driver.log[:2] == ["all work on cpu is done", "the caller's is at e"]


def test_tensors_are_copied_in_their_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in C's order would be written to in place of the tensor."""
    tensor = torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    monkeypatch.setitem(sys.modules, "torch", Driver())
    buffer, host = Buffer.of(tensor), torch.zeros(4 * 96, dtype=torch.uint8)
    pipe = cuda.Cuda().pipe([buffer])
    pipe.read(Stretch(buffer, host, 0, 4 * 96))
    in_memory = tensor.permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(host.view(torch.float32), in_memory)
    host.view(torch.float32).neg_()
    pipe.write(Stretch(buffer, host, 0, 4 * 96))
    assert torch.equal(tensor, -torch.arange(96.0).view(2, 3, 4, 4))
