"""One process of `pccl bench ddp`: trains the same model over several backends, in turns.

The step of one way follows that of another one, in an order that is reversed in every second
iteration, each after an untimed all-reduce of one element over the same group: so all peers begin
together, and other load on the machine affects all alike.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pccl
from pccl.cli.bench.gpt import GPT, VOCABULARY
from pccl.cli.bench.processes import follow_parent
from pccl.torch import hooks

GLOO, PCCL = "gloo", "pccl"


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes do.

    Attributes:
        peers: how many they are.
        wires: how gradients are quantized, beside those that are not.
        layers: of the model, whose width and length of context follow.
        batch: sequences of each peer in each step.
        bucket_mib: most MiB of gradients that are reduced together.
        iterations: steps that are timed, of each way; before them, `warmups` that are not.
        threads: of torch, in each process.
    """

    peers: int
    wires: tuple[str, ...]
    layers: int
    width: int
    length: int
    batch: int
    bucket_mib: int
    iterations: int
    warmups: int
    threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one peer has measured, by way.

    Attributes:
        times_s: seconds of each timed step.
        losses: of the last step.
        weights: a digest of the weights after it.
        parameters: how many the model has.
    """

    times_s: dict[str, list[float]]
    losses: dict[str, float]
    weights: dict[str, str]
    parameters: int


class Trainee:
    """A model of its own, trained over one group."""

    def __init__(self, job: Job, group: Any, wire: str | None) -> None:
        torch.manual_seed(0)
        model = GPT(job.layers, job.width, job.length)
        self.parameters = sum(p.numel() for p in model.parameters())
        self._ddp = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=job.bucket_mib
        )
        if wire is not None:
            state = hooks.Quantized(wire, group)  # type: ignore[arg-type]
            self._ddp.register_comm_hook(state, hooks.quantized)
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        self._group, self._one = group, torch.zeros(1)
        self.loss = 0.0

    def meet(self) -> None:
        """Returns when all peers are here."""
        dist.all_reduce(self._one, group=self._group)

    def step(self, tokens: torch.Tensor) -> None:
        """What is timed."""
        loss = self._ddp(tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()

    def weights(self) -> str:
        """A digest of their bits."""
        digest = hashlib.sha256()
        for parameter in self._ddp.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def serve(number: int, job: Job, address: str, results: Connection) -> None:
    """The life of a process of this machine, which sends what all have measured."""
    follow_parent()
    try:
        results.send(train(job, address))
    except pccl.PCCLError as error:
        results.send(str(error))


def train(job: Job, address: str) -> list[Measured]:
    """Takes part in the run of the master at `address`; what all peers have measured."""
    torch.set_num_threads(job.threads)
    dist.init_process_group(PCCL, init_method=f"pccl://{address}", world_size=job.peers)
    try:
        own = _measure(job, dist.new_group(backend=GLOO))
        found: list[Any] = [None] * job.peers
        dist.all_gather_object(found, own)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def _measure(job: Job, gloo: Any) -> Measured:
    ways = {GLOO: Trainee(job, gloo, None), PCCL: Trainee(job, dist.group.WORLD, None)}
    for wire in job.wires:
        ways[f"{PCCL} {wire}"] = Trainee(job, dist.group.WORLD, wire)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for iteration in range(job.warmups + job.iterations):
        size = job.batch, job.length + 1
        tokens = torch.randint(VOCABULARY, size, generator=generator).sort(1).values
        back = iteration % 2 == 1  # no way always follows the same one, and what that leaves
        for name, way in sorted(ways.items(), reverse=back):
            way.meet()
            began = time.perf_counter()
            way.step(tokens)
            elapsed = time.perf_counter() - began
            if iteration >= job.warmups:
                times_s[name].append(elapsed)
    return Measured(
        times_s,
        {name: way.loss for name, way in ways.items()},
        {name: way.weights() for name, way in ways.items()},
        ways[GLOO].parameters,
    )
