"""DiLoCo on a small model: peers that are threads, and that leave where a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers.cluster import in_threads
from peers.waiting import PATIENCE_S

import pccl
from pccl import extension
from pccl.diloco import DiLoCo
from pccl.protocol.master.membership import Deadlines

N = 1000


class Model(torch.nn.Module):
    """Two parameters of N elements in all; their gradients are what a test says they are."""

    def __init__(self, value: float = 0.0, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((N // 4, 3), value, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.full((N - N // 4 * 3,), value, dtype=dtype))

    def move(self, by: Any) -> None:
        """Sets gradients with which SGD of learning rate 1 moves the parameters by -`by`."""
        flat = torch.as_tensor(by, dtype=torch.float32).expand(N)
        self.weight.grad = flat[: self.weight.numel()].view(self.weight.shape).to(self.weight.dtype)
        self.bias.grad = flat[self.weight.numel() :].to(self.bias.dtype)

    def flat(self) -> Any:
        return torch.cat([self.weight.detach().flatten(), self.bias.detach()]).clone()


class Places(torch.nn.Module):
    """A model in which each step of each peer has an effect at a place of its own, in one of two
    parts by turns."""

    def __init__(self, peers: int, steps: int, by: float = 1.0) -> None:
        super().__init__()
        self.shape, self.by = (peers, steps // 2), by
        self.parts = torch.nn.ParameterList(torch.zeros(self.shape) for _ in range(2))

    def move(self, peer: int, step: int) -> None:
        """Moves that place by -`by` with SGD of learning rate 1."""
        for index, part in enumerate(self.parts):
            part.grad = torch.zeros(self.shape)
            if step % 2 == index:
                part.grad[peer, step // 2] = self.by

    def flat(self) -> Any:
        return torch.cat([part.detach().flatten() for part in self.parts])

    def steps(self, flat: Any) -> Any:
        """The values at the places of each step of each peer."""
        peers, half = self.shape
        return flat.view(2, peers, half).permute(1, 2, 0).reshape(peers, 2 * half)


def random(seed: int) -> Any:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def make(comm: pccl.Communicator, model: Model, **options: Any) -> DiLoCo:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    usual = {"inner_steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9}
    return DiLoCo(comm, model, optimizer, **{**usual, **options})


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """Runs each body in a thread. Returns their results, or raises the first error of any."""
    return in_threads(list(bodies), PATIENCE_S)


def compute() -> None:
    """Computes for a moment without the global lock, as an inner step does: other threads run."""
    matrix = torch.ones(200, 200)
    torch.mm(matrix, matrix)


def refuse(
    address: str, why: str, run: dict[str, Any], own: dict[str, Any], errors: Any = ValueError
) -> None:
    """A run with some options refuses a peer with others, and that peer alone."""
    ready, refused = threading.Event(), threading.Event()

    def incumbent() -> None:
        model = Model()
        with pccl.Communicator(address) as comm:
            diloco = make(comm, model, **run)
            ready.set()
            while not refused.is_set():
                model.move(0.0)
                diloco.step()

    def misfit() -> None:
        assert ready.wait(PATIENCE_S)
        try:
            with pccl.Communicator(address) as comm, pytest.raises(errors, match=why):
                make(comm, Model(), **own)
        finally:
            refused.set()

    together(incumbent, misfit)


class Clock:
    """Seconds of each thread, which pass only when a test says so."""

    def __init__(self) -> None:
        self._of = threading.local()

    def monotonic(self) -> float:
        return getattr(self._of, "now_s", 0.0)

    def work(self, seconds: float) -> None:
        self._of.now_s = self.monotonic() + seconds

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """The same, as what DiLoCo measures the training by."""
        for module in ("pace", "stats"):
            monkeypatch.setattr(f"pccl.diloco.{module}.time", self)
        return self


class Hand:
    """Of the clock that graces are measured by: it moves only when a test says so.

    Attributes:
        clock: that of the training, which does not move by itself either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock().installed(monkeypatch)
        self._now_s = 0.0
        real = Deadlines.late
        monkeypatch.setattr(
            Deadlines, "late", lambda its, _, round_: real(its, self._now_s, round_)
        )

    def pass_until(self, free: threading.Event, diloco: DiLoCo) -> None:
        """The peer stops, and time passes, after its pending work has ended."""
        diloco.state_dict()  # waits for a mean in progress
        while not free.wait(0.02):
            self._now_s += 0.1


class Left(Exception):
    """A peer is gone, as a test wanted it."""


class Deserter:
    """A communicator that, once armed, leaves the run instead of its `nth` call of `name`."""

    def __init__(
        self, comm: pccl.Communicator, name: str, nth: int, after: threading.Event | None = None
    ) -> None:
        self._comm, self._name, self._left = comm, name, nth
        self._after = after  # it waits for this one before
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        if self.armed and name == self._name:
            self._left -= 1
            if self._left == 0:
                assert self._after is None or self._after.wait(PATIENCE_S)
                raise Left
        return getattr(self._comm, name)


def desert(
    address: str,
    name: str,
    nth: int = 1,
    *,
    by: Any = 1.0,
    model: Model | None = None,
    joined: threading.Event | None = None,
    left: threading.Event | None = None,
    after: threading.Event | None = None,
    **options: Any,
) -> None:
    """A peer that joins, trains, and leaves the run instead of its `nth` call of `name`.

    Args:
        address: of the master.
        name: of the call.
        nth: after the constructor of DiLoCo.
        by: what it moves by in each step.
        model: that it trains.
        joined: set when it has joined.
        left: set when it is gone.
        after: it does not leave before this is set.
        options: of DiLoCo.
    """
    model = model or Model()
    with pytest.raises(Left), pccl.Communicator(address) as comm:
        leaving: Any = Deserter(comm, name, nth, after)
        diloco = make(leaving, model, **options)
        leaving.armed = True
        if joined is not None:
            joined.set()
        while True:
            model.move(by)
            diloco.step()
    if left is not None:
        left.set()


def come_and_go(train: Callable[[int, threading.Event], Any]) -> tuple[Any, Any, Any]:
    """Peers 0 and 1 train to the end, 2 leaves by `Left`, and 3 joins when the event is set.

    Returns the results of 0, 1 and 3.
    """
    ready = threading.Event()

    def leave() -> None:
        with pytest.raises(Left):
            train(2, ready)

    def join() -> Any:
        assert ready.wait(PATIENCE_S)
        return train(3, ready)

    ours, theirs, _, new = together(lambda: train(0, ready), lambda: train(1, ready), leave, join)
    return ours, theirs, new


class Watched:
    """A communicator that says what is called, and when."""

    def __init__(self, comm: pccl.Communicator, **before: Callable[[], object]) -> None:
        self._comm, self._before = comm, before

    def __getattr__(self, name: str) -> Any:
        if name in self._before:
            self._before[name]()
        return getattr(self._comm, name)


class Lost:
    """The handle of a collective in which a peer was lost."""

    result: Any = None
    error = pccl.PeerLostError(pccl.Result.RANK_CONNECTION_LOST, "all_reduce_async", "of the test")

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[bool, int, pccl.ReduceInfo]:
        return False, self.error.result.value, pccl.ReduceInfo(0, 0, 0)


class Cut:
    """A communicator that is dropped from the run instead of its `nth` call of `name`.

    Args:
        comm: that one.
        name: of the call.
        nth: of them, once it is armed.
        fails: whether the last all_reduce_async before that has failed, for another lost peer.

    Attributes:
        armed: whether it counts.
    """

    def __init__(
        self, comm: pccl.Communicator, name: str, nth: int, *, fails: bool = False
    ) -> None:
        self._comm, self._name, self._left, self._fails = comm, name, nth, fails
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        if self._fails and self.armed and self._left == 1 and name == "all_reduce_async":
            return lambda *_, **__: Lost()
        if self.armed and name == self._name:
            self._left -= 1
            if self._left == 0:
                self._comm.close()
                why = pccl.Result.RANK_CONNECTION_FAILED
                raise pccl.KickedError(why, name, "as the test has it")
        return getattr(self._comm, name)


class StoppedSyncer:
    """Stops a syncer of mode="decoupled" before a meeting, as a stopped process would.

    Attributes:
        comms: the communicators to stop; the first that comes is stopped.
        away: set when it has stopped.
        back: set it to let it continue.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.comms: list[pccl.Communicator] = []
        self.away, self.back = threading.Event(), threading.Event()
        self._ask = extension.are_peers_pending
        monkeypatch.setattr(extension, "are_peers_pending", self._wait_and_ask)

    def _wait_and_ask(self, comm: pccl.Communicator, grace: Any) -> bool:
        if comm in self.comms and not self.away.is_set():
            self.away.set()
            assert self.back.wait(PATIENCE_S)
        return self._ask(comm, grace)
