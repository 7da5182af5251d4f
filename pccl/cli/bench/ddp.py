"""Measures torch's DistributedDataParallel: a small GPT over pccl, and over gloo, in turns.

Each iteration has one step of each way; every second iteration has them in reverse order. So other
load on the machine affects all ways alike. Before each step, an untimed all-reduce of one element
over the same group lets all peers begin together.

The ways differ only in their process group. A step is timed as a whole:
forward, backward with the all-reduce of the gradients, optimizer. Times are those of the slowest
peer in each step; the table has medians over the steps (and minima), and steps a second as a ratio
to gloo's. Afterwards all peers must have the same weights, to the bit.

Between machines: start `pccl master` on one, and this command with the same arguments and
`--master HOST` once for each of the `--peers`, anywhere. All of them print the table. gloo
chooses its network by GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench import options
from pccl.cli.processes import WorkerError, collect, workers
from pccl.cli.terminal import complain
from pccl.kernels import Format

if TYPE_CHECKING:
    import torch

GLOO, PCCL = "gloo", "pccl"


class Job(NamedTuple):
    """The options of all processes, by name."""

    peers: int
    wire: list[str]
    layers: int
    width: int
    length: int
    batch: int
    bucket_mib: int
    iters: int
    warmup_iters: int
    threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one peer, by way."""

    times_s: dict[str, list[float]]  # seconds of each timed step
    losses: dict[str, float]  # of the last step
    weights: dict[str, str]  # a digest of the weights after it
    parameters: int  # how many the model has


class Trainee:
    def __init__(self, job: Job, group: Any, wire: str | None) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from pccl.cli.demo.model import GPT, Shape
        from pccl.torch import hooks

        torch.manual_seed(0)
        heads = next(n for n in (8, 4, 2, 1) if job.width % n == 0)
        model = GPT(Shape(job.width, job.layers, heads, job.length))
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
        """Returns when all peers have entered it."""
        import torch.distributed as dist

        dist.all_reduce(self._one, group=self._group)

    def step(self, tokens: torch.Tensor) -> None:
        loss = self._ddp(tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()

    def weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._ddp.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def serve(number: int, job: Job, address: str) -> Iterator[list[Measured]]:
    yield train(job, address)


def train(job: Job, address: str) -> list[Measured]:
    """Takes part in the run of the master at `address`; what all peers have measured."""
    import torch
    import torch.distributed as dist

    import pccl.torch  # noqa: F401 - registers the backend

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
    import torch
    import torch.distributed as dist

    from pccl.cli.demo.model import VOCABULARY

    ways = {GLOO: Trainee(job, gloo, None), PCCL: Trainee(job, dist.group.WORLD, None)}
    for wire in job.wire:
        ways[f"{PCCL} {wire}"] = Trainee(job, dist.group.WORLD, wire)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for iteration in range(job.warmup_iters + job.iters):
        size = job.batch, job.length + 1
        tokens = torch.randint(VOCABULARY, size, generator=generator).sort(1).values
        back = iteration % 2 == 1  # so that no way always runs after the same other one
        for name, way in sorted(ways.items(), reverse=back):
            way.meet()
            began = time.perf_counter()
            way.step(tokens)
            elapsed = time.perf_counter() - began
            if iteration >= job.warmup_iters:
                times_s[name].append(elapsed)
    return Measured(
        times_s,
        {name: way.loss for name, way in ways.items()},
        {name: way.weights() for name, way in ways.items()},
        ways[GLOO].parameters,
    )


_WIRES = get_args(Format)
_NUMBERS = (  # name, default, meaning
    ("--layers", 4, "layers of the model"),
    ("--width", 256, "width of the model"),
    ("--length", 64, "tokens of a sequence"),
    ("--batch", 4, "sequences of each process in each step"),
    ("--bucket-mib", 25, "most MiB of gradients that are reduced together"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_iterations(parser, 20, 3)
    options.add_run(parser)
    parser.add_argument(
        "--wire",
        nargs="+",
        choices=_WIRES,
        default=[],
        help="also measure pccl with gradients in these formats",
    )
    for name, default, meaning in _NUMBERS:
        option(parser, name, "N", whole_number(1), meaning, default)
    option(
        parser,
        "--threads",
        "N",
        whole_number(1),
        "torch's threads in each process (default: the cores divided among the processes)",
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if weights differ or a process failed, 2 if it cannot start."""
    if importlib.util.find_spec("torch") is None:
        complain("bench", "torch not found; pip install torch brings it")
        return 2
    here = 1 if args.master else args.peers
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // here)
    job = Job(**{name: getattr(args, name) for name in Job._fields})
    try:
        rows = _rows(_measured(job, args.master))
    except (WorkerError, pccl.PCCLError) as error:
        complain("bench", error)
        return 1
    print(_title(job, args.master, rows), flush=True)
    for row in rows:
        print(_text(row))
    options.write_json(args, {"peers": job.peers, "results": rows})
    return 0 if all(row["equal"] for row in rows) else 1


def _measured(job: Job, address: str | None) -> list[Measured]:
    if address is not None:
        return train(job, address)
    with (
        pccl.MasterNode("127.0.0.1:0") as node,
        workers(job.peers, serve, job, node.address) as results,
    ):
        found: list[Measured] = collect(results)[0]
        return found


def _rows(measured: list[Measured]) -> list[dict[str, Any]]:
    first = measured[0]
    rows: list[dict[str, Any]] = []
    for way in first.times_s:
        slowest = [max(times) for times in zip(*(m.times_s[way] for m in measured), strict=True)]
        time_s = median(slowest)
        rows.append(
            {
                "way": way,
                "parameters": first.parameters,
                "step_s": time_s,
                "step_min_s": min(slowest),
                "steps_per_s": 1 / time_s,
                "of_gloo": (rows[0]["step_s"] if rows else time_s) / time_s,
                "loss": first.losses[way],
                "equal": len({m.weights[way] for m in measured}) == 1,
            }
        )
    return rows


def _title(job: Job, address: str | None, rows: list[dict[str, Any]]) -> str:
    where = f"by the master {address}" if address else f"on {os.cpu_count()} cores"
    millions = rows[0]["parameters"] / 1e6
    return (
        f"# pccl {pccl.__version__} bench ddp: {job.peers} processes {where}, transport "
        f"{os.environ.get('PCCL_TRANSPORT', 'auto')}\n# a GPT of {millions:.1f} million parameters "
        f"({job.layers} layers, width {job.width}), {job.batch} x {job.length} tokens, "
        f"buckets of {job.bucket_mib} MiB\n"
        f"# medians (minima) of {job.iters} steps after {job.warmup_iters} warm-ups, in turns\n"
        f"#{'over':>12} {'ms a step':>20} {'steps/s':>9} {'of gloo':>8} {'loss':>8}  weights"
    )


def _text(row: dict[str, Any]) -> str:
    times = f"{row['step_s'] * 1e3:.1f} ({row['step_min_s'] * 1e3:.1f})"
    equal = "equal" if row["equal"] else "DIFFER"
    return (
        f"{row['way']:>13} {times:>20} {row['steps_per_s']:9.2f} {row['of_gloo']:8.2f} "
        f"{row['loss']:8.4f}  {equal}"
    )
