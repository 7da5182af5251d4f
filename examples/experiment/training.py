"""Trains the peers of a run, all in this process, and exchanges over real sockets.

The peers of a small model would spend most of their time in Python. So one pass computes the
gradients of all of them: their models are the rows of one tensor. Everything else is theirs alone:
optimizer, communicator and `DiLoCo`, each in a thread of its own.

Data parallel is one peer with the whole batch: the mean of the gradients of M equal parts is the
gradient of the batch. Nothing is sent, and the bytes are those of an fp32 ring all-reduce.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch.nn.utils import parameters_to_vector

import pccl
from experiment.runs import Result, Run, Size
from experiment.stacked import losses
from experiment.text import Text
from pccl.cli.demo.model import GPT, Shape
from pccl.diloco import DiLoCo, MuonAndAdamW

WARM_UP = 0.05  # of the steps
FLOOR = 0.05  # of the learning rate, at the end
CLIP = 1.0
SHOWN = 10  # reports of a run


class Replicas:
    """The models of some peers, with one optimizer each; all have the same initial weights."""

    def __init__(self, run: Run, count: int) -> None:
        size = run.size
        torch.manual_seed(run.seed)
        model = GPT(Shape(size.width, size.layers, size.heads, size.context))
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._rows = parameters_to_vector(model.parameters()).detach().repeat(count, 1)
        self.models = [copy.deepcopy(model) for _ in range(count)]
        for row, each in zip(self._rows, self.models, strict=True):
            for parameter, piece in zip(each.parameters(), row.split(self._sizes), strict=True):
                parameter.data = piece.view(parameter.shape)
        self._heads = size.heads
        self._lr = run.rates.lr
        self.optimizers = [_optimizer(each, self._lr, run.arm.muon) for each in self.models]

    def backward(self, text: torch.Tensor, progress: float) -> None:
        """Computes the clipped gradients, and sets the learning rates.

        Args:
            text: (peers, samples, time + 1) int64 bytes.
            progress: of the run, from 0 to 1.
        """
        rows = self._rows.requires_grad_()
        pieces = rows.split(self._sizes, dim=1)
        weights = {
            name: piece.view(len(rows), *shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
        (gradients,) = torch.autograd.grad(losses(weights, text, self._heads), rows)
        self._rows.requires_grad_(False)
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients.mul_((CLIP / (norms + 1e-6)).clamp_(max=1.0))
        for each, row in zip(self.models, gradients, strict=True):
            for parameter, piece in zip(each.parameters(), row.split(self._sizes), strict=True):
                parameter.grad = piece.view(parameter.shape)
        self.set_rates(progress)

    def set_rates(self, progress: float) -> None:
        """Sets the learning rates of all optimizers by the progress of the run."""
        rate = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        rate *= self._lr * min(1.0, (progress + 1e-3) / WARM_UP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    @torch.no_grad()
    def validate(self, text: torch.Tensor) -> float:
        """The loss of the first model, in nats per byte."""
        parts = text.split(256)
        return sum(float(self.models[0](part)) * len(part) for part in parts) / len(text)


def _optimizer(model: GPT, lr: float, muon: bool) -> torch.optim.Optimizer:
    if muon:
        return MuonAndAdamW(model, lr, adamw=["position"])
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )


def text_of(size: Size, seed: int) -> Text:
    """The samples of a run."""
    return Text([], context=size.context, samples=size.steps * size.batch, seed=seed)


def diloco(
    run: Run, comm: pccl.Communicator, replicas: Replicas, peer: int, **options: object
) -> DiLoCo:
    """The `DiLoCo` of one peer."""
    return DiLoCo(
        comm,
        replicas.models[peer],
        replicas.optimizers[peer],
        inner_steps=run.arm.inner_steps,
        outer_lr=run.rates.outer_lr,
        outer_momentum=run.rates.outer_momentum,
        min_peers=run.arm.peers,
        alone="step",
        **{**(run.arm.options or {}), **options},  # type: ignore[arg-type]
    )


def train(run: Run) -> Result:
    """Makes one run without kills.

    Raises:
        PCCLError: the peers could not exchange.
        RuntimeError: the peers do not hold the same bits at the end.
    """
    torch.set_num_threads(1)
    began_s = time.monotonic()
    size, peers = run.size, run.arm.peers
    text = text_of(size, run.seed)
    replicas = Replicas(run, peers)
    if run.arm.options is None:
        _steps(run, replicas, text, replicas.optimizers, map)
        tx_bytes = 0.0
    else:
        with ThreadPoolExecutor(peers) as threads, ExitStack() as stack:
            master = stack.enter_context(pccl.MasterNode("127.0.0.1:0"))

            def join(peer: int) -> DiLoCo:
                comm = stack.enter_context(pccl.Communicator(master.address))
                return diloco(run, comm, replicas, peer)

            trainers = list(threads.map(join, range(peers)))
            _steps(run, replicas, text, trainers, threads.map)
            list(threads.map(DiLoCo.finish, trainers))
            if len({each.state_digest() for each in trainers}) != 1:
                raise RuntimeError(f"{run.label}: the peers do not hold the same bits at the end")
            tx_bytes = sum(each.tx_bytes for each in trainers) / peers
    return Result(
        size=size,
        arm=run.arm,
        rates=run.rates,
        seed=run.seed,
        loss=replicas.validate(text.validation()),
        tx_bytes=tx_bytes,
        seconds=round(time.monotonic() - began_s, 1),
    )


def _steps(
    run: Run,
    replicas: Replicas,
    text: Text,
    trainers: Sequence[DiLoCo] | Sequence[torch.optim.Optimizer],
    at_once: Callable[..., Iterable[object]],
) -> None:
    """All inner steps; `at_once` calls a function for all peers, each in its thread."""
    size, shape = run.size, (run.arm.peers, run.size.batch // run.arm.peers, -1)
    options = run.arm.options or {}
    every, fragments = run.arm.inner_steps, options.get("fragments", 1)
    # a step in which no mean is made or applied waits for no peer
    late = (0, options.get("overlap", 0))
    meetings = {
        (p * every // fragments + steps) % every for p in range(fragments) for steps in late
    }
    for step in range(size.steps):
        samples = text.samples(range(step * size.batch, (step + 1) * size.batch))
        replicas.backward(samples.view(shape), step / size.steps)
        for_all = at_once if (step + 1) % every in meetings else map
        list(for_all(lambda trainer: trainer.step(), trainers))
        if (step + 1) % (size.steps // SHOWN) == 0:
            show(run, (step + 1) / size.steps)


def show(run: Run, progress: float) -> None:
    """Says how far a run has come."""
    print(f"{run.label}: {progress:.0%}", file=sys.stderr, flush=True)
