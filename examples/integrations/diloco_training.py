"""DiLoCo for a framework's trainer, and the command line that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

import torch

import pccl
from pccl.diloco import DiLoCo, Wire


class DiLoCoTraining:
    """Averages the models of all peers every `inner_steps` steps of the trainer's optimizer.

    A framework's callback calls `begin` before the first step, and `end` after the last one.
    """

    diloco: DiLoCo

    def __init__(self, comm: pccl.Communicator, **settings: Any) -> None:
        """`settings` are those of DiLoCo, such as mode, wire and inner_steps."""
        self.comm, self.settings = comm, settings

    def begin(self, model: torch.nn.Module, optimizer: Any, **more: Any) -> None:
        """From here on, each step of the optimizer is an inner step."""
        self.diloco = DiLoCo(self.comm, model, optimizer, **self.settings, **more)
        self.diloco.__enter__()

    def end(self) -> None:
        self.diloco.__exit__(None, None, None)


def main(
    words: list[str],
    callback: type[DiLoCoTraining],
    train: Callable[[Any, str, int], object],
) -> None:
    """Trains with the settings of the command line."""
    parser = argparse.ArgumentParser(description="DiLoCo in the trainer of a framework.")
    parser.add_argument("folder", help="of the checkpoints, and of the log; of this peer alone")
    parser.add_argument("master", metavar="HOST:PORT")
    parser.add_argument("--steps", type=int, default=40, help="of the trainer's optimizer")
    parser.add_argument("--inner-steps", type=int, default=10, help="between two outer steps")
    parser.add_argument("--mode", default="sync", help="sync, delayed or eager")
    parser.add_argument("--wire", default="int8", choices=get_args(Wire), help="what is sent")
    args = parser.parse_args(words)
    settings = {"inner_steps": args.inner_steps, "mode": args.mode, "wire": args.wire}
    with pccl.Communicator(args.master) as comm:
        training = callback(comm, min_peers=2, **settings)
        train(training, args.folder, args.steps)
        diloco = training.diloco
        print(f"outer steps {diloco.outer_step}: {diloco.state_digest()}", flush=True)
