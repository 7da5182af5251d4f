"""The DiLoCo of a framework's trainer, and the command line that the examples share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pccl
from pccl.diloco import DiLoCo


class DiLoCoTraining:
    """Averages the models of all peers every `inner_steps` steps of the trainer's optimizer.

    A framework's callback calls `begin` before the first step, and `end` after the last one.
    """

    diloco: DiLoCo

    def __init__(self, comm: pccl.Communicator, **settings: Any) -> None:
        self.comm, self.settings = comm, settings

    def begin(self, model: torch.nn.Module, optimizer: Any, state: Any = None) -> None:
        """From here on, each step of the optimizer is an inner step."""
        self.diloco = DiLoCo(self.comm, model, optimizer, state=state, **self.settings)
        self.diloco.__enter__()

    def end(self) -> None:
        self.diloco.__exit__(None, None, None)


def main(
    words: list[str],
    callback: type[DiLoCoTraining],
    train: Callable[[DiLoCoTraining, str, int], object],
) -> None:
    """Trains as `words` say: a folder, the master's address, and the number of steps."""
    folder, address, *steps = words
    with pccl.Communicator(address) as comm:
        training = callback(comm, inner_steps=10, mode="sync", wire="int8", min_peers=2)
        train(training, folder, int(steps[0]) if steps else 40)
        diloco = training.diloco
        print(f"outer steps {diloco.outer_step}: {diloco.state_digest()}", flush=True)
