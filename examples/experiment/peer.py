"""A training process of an experiment, for one run after the other.

Each line of stdin is a task, for which it loads text and model, or "go", after which it joins the
run and trains. It ends when stdin does, that is, with the process that has started it.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import xxhash

import pccl
from experiment.runs import (
    Averaged,
    Finished,
    Loaded,
    Point,
    Report,
    Task,
    encode,
    task,
)
from experiment.text import Text
from pccl.cli.demo.model import GPT, Shape
from pccl.data import Ledger
from pccl.diloco import DiLoCo, MuonAndAdamW, OuterRound

POINTS = 10  # of a curve
WARM_UP = 0.05  # of the steps
FLOOR = 0.05  # of the learning rate, at the end
CLIP = 1.0


def main() -> int:
    """Trains as the tasks say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for what has started it
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    torch.set_num_threads(1)
    while True:
        given = task(lines.get())
        trainer = Trainer(given)
        _report(Loaded(parameters=sum(p.numel() for p in trainer.parameters)))
        assert lines.get() == "go"
        with pccl.Communicator(given.master) as comm:
            trainer.train(comm)
        _report(trainer.finished())


class Trainer:
    """A model, its optimizer, its samples, and the two ways to train it with others."""

    def __init__(self, task: Task) -> None:
        settings = self._settings = task.settings
        self._variant = task.variant
        self._number = task.number
        self._own = settings.batch // task.variant.peers  # samples of a step
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
        self._trained_s = self._began_s = time.monotonic()
        self._noted: OuterRound | None = None
        self._tokens = 0  # of all peers, if none is missing
        self._shown = 0  # the outer step of the last point of the curve
        self._tx_bytes = 0
        self._digest = ""

    def train(self, comm: pccl.Communicator) -> None:
        """Trains in the way of this variant."""
        if self._variant.options is None:
            self._data_parallel(comm)
        else:
            self._diloco(comm, self._variant.options)

    def finished(self) -> Finished:
        """The report at the end."""
        return Finished(self._tx_bytes, self._validate(), self._digest)

    # ---- the two ways ----

    def _data_parallel(self, comm: pccl.Communicator) -> None:
        """Averages the gradients of all peers in each step."""
        comm.wait_for_peers(self._variant.peers)
        for step in range(self._settings.steps):
            self._forward(self._part(step), step / self._settings.steps)
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self._tx_bytes += comm.all_reduce(gradients).tx_bytes
            self._clip()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if (step + 1) % self._settings.inner_steps == 0:
                self._show((step + 1) // self._settings.inner_steps)
        digest = xxhash.xxh3_128()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().data)
        self._digest = digest.hexdigest()

    def _diloco(self, comm: pccl.Communicator, options: dict[str, object]) -> None:
        """Trains with DiLoCo: an exchange in each outer round."""
        settings = self._settings
        ledger = None
        if self._variant.is_accounted:
            share = self._own * settings.inner_steps
            ledger = Ledger(settings.steps * settings.batch, share=share)
        diloco = DiLoCo(
            comm,
            self._model,
            self._optimizer,
            inner_steps=settings.inner_steps,
            min_peers=self._variant.peers,
            alone="step",
            ledger=ledger,
            **options,  # type: ignore[arg-type]
        )
        self._began_s = time.monotonic()
        work = self._planned(diloco) if ledger is None else self._claimed(diloco, ledger)
        for numbers, progress in work:
            self._forward(numbers, progress)
            self._clip()
            diloco.step()
            self._note(diloco)
        self._note(diloco)
        diloco.finish()
        self._tx_bytes, self._digest = diloco.tx_bytes, diloco.state_digest()

    def _note(self, diloco: DiLoCo) -> None:
        """Reports the last round, if it has not been reported."""
        done = diloco.last_round
        if done is None or done is self._noted:
            return
        self._noted, self._tx_bytes = done, diloco.tx_bytes
        seconds = time.monotonic() - self._began_s
        _report(Averaged(done.outer_step, done.contributors, self._tx_bytes, seconds))
        self._show(done.outer_step)

    def _planned(self, diloco: DiLoCo) -> Iterator[tuple[Sequence[int], float]]:
        """This peer's samples of each step, and the progress, from the others' step on."""
        steps = self._rounds * self._settings.inner_steps
        for step in range(diloco.outer_step * self._settings.inner_steps, steps):
            yield self._part(step), step / steps

    def _claimed(self, diloco: DiLoCo, ledger: Ledger) -> Iterator[tuple[Sequence[int], float]]:
        """The same, with the samples that a ledger gives it."""
        while not ledger.finished:
            consumed = ledger.consumed
            for numbers in diloco.round_of(_batches(ledger.share, self._own)):
                under_way = diloco.inner_step * self._settings.batch
                yield numbers, min(1.0, (consumed + under_way) / ledger.samples)

    def _part(self, step: int) -> range:
        """This peer's part of a batch."""
        slot = self._number % self._variant.peers
        first = step * self._settings.batch + slot * self._own
        return range(first, first + self._own)

    # ---- a step ----

    def _forward(self, numbers: Sequence[int], progress: float) -> None:
        rate = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * rate * min(1, (progress + 1e-3) / WARM_UP)
        loss = self._model(self._text.samples(numbers))
        loss.backward()
        self._tokens += self._settings.batch * self._settings.context
        self._keep_pace()

    def _keep_pace(self) -> None:
        left_s = self._trained_s + self._variant.pace_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        self._trained_s = time.monotonic()

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)

    # ---- what is reported ----

    def _show(self, outer_step: int) -> None:
        """Peer 0 shows a point of the curve now and then, after a round."""
        is_due = outer_step > self._shown and outer_step % max(1, self._rounds // POINTS) == 0
        if self._number == 0 and is_due:
            self._shown = outer_step
            _report(Point(self._tokens, self._tx_bytes, self._validate(stride=4)))

    @torch.no_grad()
    def _validate(self, stride: int = 1) -> float:
        """The loss on what is held out, or on every `stride`-th sample of it."""
        return float(self._model(self._held_out[::stride]))


def _optimizer(model: GPT, lr: float, muon: bool) -> torch.optim.Optimizer:
    if muon:
        return MuonAndAdamW(model, lr, adamw=["position"])
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)


def _batches(share: tuple[range, ...], size: int) -> Iterator[list[int]]:
    numbers = [number for part in share for number in part]
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


def _read(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(1)


def _report(report: Report) -> None:
    print(encode(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
