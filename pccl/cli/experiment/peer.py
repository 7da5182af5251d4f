"""One training process of an experiment.

It loads text and model, waits for the line "go" on stdin, joins the run and trains. When stdin
ends, what has started it is gone, and so this process goes too.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch
import xxhash

import pccl
from pccl.cli.demo.model import GPT, Shape
from pccl.cli.experiment.reports import (
    Averaged,
    Finished,
    Loaded,
    Point,
    Report,
    Task,
    encode,
    task,
)
from pccl.cli.experiment.text import Text
from pccl.diloco import DiLoCo, MuonAndAdamW

POINTS = 10  # of a curve
WARM_UP = 0.05  # of the steps
FLOOR = 0.05  # of the learning rate, at the end
CLIP = 1.0


def main() -> int:
    """Trains as the task says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--task", type=task, required=True)
    args = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for what has started it
    go = threading.Event()
    threading.Thread(target=_obey, args=(go,), daemon=True).start()
    torch.set_num_threads(1)
    trainer = Trainer(args.task, args.number)
    _report(Loaded(parameters=sum(p.numel() for p in trainer.parameters)))
    go.wait()
    with pccl.Communicator(args.task.master) as comm:
        if args.task.variant.options is None:
            trainer.data_parallel(comm)
        else:
            trainer.diloco(comm, args.task.variant.options)
    return 0


class Trainer:
    """A model, its optimizer, its samples, and the two ways to train it with others."""

    def __init__(self, task: Task, number: int) -> None:
        settings = self._settings = task.settings
        self._variant = task.variant
        self._number = number
        self._rounds = task.variant.rounds or settings.rounds
        torch.manual_seed(settings.seed)
        self._model = GPT(Shape(settings.width, settings.layers, settings.heads, settings.context))
        self.parameters = list(self._model.parameters())
        self._optimizer = _optimizer(self._model, settings.lr, task.variant.muon)
        self._text = Text(
            settings.text,
            context=settings.context,
            samples=settings.steps * settings.batch,
            seed=settings.seed,
        )
        self._held_out = self._text.validation()
        self._trained_s = time.monotonic()

    # ---- the two ways ----

    def data_parallel(self, comm: pccl.Communicator) -> None:
        """The mean of the gradients of all peers, in each step."""
        variant, settings = self._variant, self._settings
        comm.wait_for_peers(variant.peers)
        tx_bytes = 0
        for step in range(settings.steps):
            self._forward(step, step / settings.steps)
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            tx_bytes += comm.all_reduce(gradients).tx_bytes
            self._clip()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._is_due(step + 1):
                self._show(self._tokens(step + 1, variant.peers), tx_bytes)
        digest = xxhash.xxh3_128()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().data)
        _report(Finished(tx_bytes, self._validate(), digest.hexdigest()))

    def diloco(self, comm: pccl.Communicator, options: dict[str, object]) -> None:
        """An exchange in each outer round."""
        settings = self._settings
        diloco = DiLoCo(
            comm,
            self._model,
            self._optimizer,
            inner_steps=settings.inner_steps,
            min_peers=self._variant.peers,
            alone="step",
            **options,  # type: ignore[arg-type]
        )
        began_s, tokens = time.monotonic(), 0
        for step in self._own_steps(diloco):
            self._forward(step, step / (self._rounds * settings.inner_steps))
            self._clip()
            done = diloco.step()
            if done is None:
                continue
            tokens += self._tokens(settings.inner_steps, done.contributors)
            seconds = time.monotonic() - began_s
            _report(Averaged(done.outer_step, done.contributors, diloco.tx_bytes, seconds))
            if self._is_due(step + 1):
                self._show(tokens, diloco.tx_bytes)
        diloco.finish()
        _report(Finished(diloco.tx_bytes, self._validate(), diloco.state_digest()))

    def _own_steps(self, diloco: DiLoCo) -> Iterator[int]:
        """Numbers of the steps of the run: a newcomer's begin where the others are."""
        step = diloco.outer_step * self._settings.inner_steps
        while step < self._rounds * self._settings.inner_steps:
            yield step
            step += 1

    # ---- a step ----

    def _forward(self, step: int, progress: float) -> None:
        settings = self._settings
        rate = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * rate * min(1, (progress + 1e-3) / WARM_UP)
        own = settings.batch // self._variant.peers
        first = step * settings.batch + self._slot * own
        loss = self._model(self._text.samples(range(first, first + own)))
        loss.backward()
        self._keep_pace()

    @property
    def _slot(self) -> int:
        """Which part of each batch is this peer's."""
        return self._number % self._variant.peers

    def _keep_pace(self) -> None:
        left_s = self._trained_s + self._variant.pace_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        self._trained_s = time.monotonic()

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)

    # ---- what is reported ----

    def _tokens(self, steps: int, peers: int) -> int:
        own = self._settings.batch // self._variant.peers
        return steps * peers * own * self._settings.context

    def _is_due(self, step: int) -> bool:
        """Whether peer 0 shows a point of the curve after this step."""
        every = max(1, self._rounds // POINTS) * self._settings.inner_steps
        return self._number == 0 and step % every == 0

    def _show(self, tokens: int, tx_bytes: int) -> None:
        _report(Point(tokens, tx_bytes, self._validate(stride=4)))

    @torch.no_grad()
    def _validate(self, stride: int = 1) -> float:
        """The loss on what is held out, or on every `stride`-th sample of it."""
        return float(self._model(self._held_out[::stride]))


def _optimizer(model: GPT, lr: float, muon: bool) -> torch.optim.Optimizer:
    if muon:
        return MuonAndAdamW(model, lr, adamw=["position"])
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)


def _obey(go: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            go.set()
    os._exit(1)


def _report(report: Report) -> None:
    print(encode(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
