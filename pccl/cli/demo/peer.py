"""One training process of the demo: an ordinary DiLoCo script that also prints reports.

It loads its text and model, waits for the line "go" on stdin, joins the run and trains to the last
outer step. When stdin ends, the orchestrator has ended, so this process ends too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import pccl
from pccl.cli.demo.director import Averaged, Finished, Joined, Loaded, Report, Trained, encode
from pccl.cli.demo.model import CONTEXT, GPT, Corpus
from pccl.diloco import DiLoCo

BATCH = 16
VALIDATION_BATCH = 64
LEARNING_RATE = 2e-3
OUTER_MOMENTUM = 0.5  # the usual 0.9 pays off in runs of hundreds of outer steps, not of sixteen
REPORTS_PER_ROUND = 5
_FRAGMENTS, _OVERLAP = 3, 2  # with mode="streaming"


def main() -> int:
    """Trains until the run has taken `steps` outer steps; its arguments are JSON."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the orchestrator handles Ctrl-C
    go = threading.Event()
    threading.Thread(target=_follow_commands, args=(go,), daemon=True).start()
    torch.set_num_threads(1)
    # Different weights on every peer, on purpose: the first synchronization makes them equal.
    torch.manual_seed(args.seed + args.number)
    model = GPT()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1
    )
    corpus = Corpus(shard=args.number, shards=args.shards, seed=args.seed + args.number)
    _report(Loaded())
    go.wait()
    _train(args, model, optimizer, corpus)
    return 0


def _train(
    args: argparse.Namespace, model: GPT, optimizer: torch.optim.Optimizer, corpus: Corpus
) -> None:
    held_out = corpus.validation(VALIDATION_BATCH, CONTEXT + 1)
    with pccl.Communicator(args.master) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            outer_momentum=OUTER_MOMENTUM,
            min_peers=args.min_peers,
            alone="step",  # so that it ends, even if all others are lost
            mode=args.mode,
            wire=args.wire,
            **(_streaming(args.inner_steps) if args.mode == "streaming" else {}),
        )
        _report(Joined(diloco.outer_step, _evaluate(model, held_out)))
        reported = diloco.outer_step
        meter = _Meter(every=max(1, args.inner_steps // REPORTS_PER_ROUND))
        while diloco.outer_step < args.steps:
            loss = model(corpus.batch(BATCH, CONTEXT + 1))
            loss.backward()
            trained = meter.count(loss.item(), diloco.outer_step)
            if trained:
                _report(trained)
            done = diloco.step()
            if done and done.outer_step > reported:
                reported = done.outer_step
                _report(
                    Averaged(
                        outer_step=done.outer_step,
                        contributors=done.contributors,
                        retries=done.retries,
                        reduce_s=done.reduce_s,
                        reduce_bytes=diloco.parameter_bytes,
                        tx_bytes=diloco.tx_bytes,
                        validation_loss=_evaluate(model, held_out),
                    )
                )
                meter.restart()
        diloco.finish()
        _report(Finished(diloco.outer_step, diloco.state_digest()))


def _streaming(inner_steps: int) -> dict[str, Any]:
    """Fragments, as far as there are inner steps for them."""
    fragments = min(_FRAGMENTS, inner_steps)
    overlap = min(_OVERLAP, inner_steps // fragments - 1)
    return {"fragments": fragments, "overlap": overlap}


class _Meter:
    """Means over `every` inner steps; the time of an outer round does not count."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.restart()

    def restart(self) -> None:
        self._losses: list[float] = []
        self._since_s = time.monotonic()

    def count(self, loss: float, outer_step: int) -> Trained | None:
        self._losses.append(loss)
        if len(self._losses) < self._every:
            return None
        mean = sum(self._losses) / self._every
        tokens = self._every * BATCH * CONTEXT
        speed = tokens / (time.monotonic() - self._since_s)
        self.restart()
        return Trained(outer_step, mean, speed)


@torch.no_grad()
def _evaluate(model: GPT, held_out: torch.Tensor) -> float:
    return float(model(held_out))


def _follow_commands(go: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            go.set()
    os._exit(1)


def _report(report: Report) -> None:
    print(encode(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
