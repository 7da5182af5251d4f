"""Measures torch's DistributedDataParallel: a small GPT over pccl and over gloo, alternately.

Each iteration runs one step of each way; every second iteration runs them in reverse order. So
other load on the machine affects all ways alike. Before each step, an untimed all-reduce of one
element over the same group lets all peers begin together.

The ways differ only in their process group. A timed step is a whole training step: forward,
backward with the all-reduce of the gradients, optimizer. Its time is the slowest peer's. The table
has medians and minima over the steps, and steps per second relative to gloo. Afterwards all peers
must have the same weights, to the bit.

Between machines: start `pccl master` on one, and this command with the same arguments and
`--master HOST` once for each of the `--peers`, anywhere. All of them print the table. gloo
chooses its network by GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple, get_args

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench import options, trials
from pccl.cli.processes import collect, workers
from pccl.cli.terminal import Refused
from pccl.kernels import Format

GLOO, PCCL = "gloo", "pccl"


class Measured(NamedTuple):
    """One peer's measurement of one backend."""

    times_s: list[float]  # seconds of each timed step
    loss: float  # the loss of the last step
    weights: str  # a digest of the weights after it
    parameters: int  # the number of the model's parameters


class Trainee:
    """A model, its replicas on all peers, and its training text: the same for each way."""

    def __init__(self, job: argparse.Namespace, group: Any, wire: str | None = None) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from pccl.cli.demo.model import GPT, Shape
        from pccl.torch import hooks

        torch.manual_seed(0)
        heads = next(n for n in (8, 4, 2, 1) if job.width % n == 0)
        model = GPT(Shape(job.width, job.layers, heads, job.length))
        self._ddp = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=job.bucket_mib
        )
        if wire is not None:
            state = hooks.Quantized(wire, group)  # type: ignore[arg-type]
            self._ddp.register_comm_hook(state, hooks.quantized)
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        self._group, self._one = group, torch.zeros(1)
        self._shape = job.batch, job.length + 1
        self._generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def prepare(self) -> None:
        """Draws the next tokens. Returns when all peers have entered it."""
        import torch
        import torch.distributed as dist

        from pccl.cli.demo.model import VOCABULARY

        drawn = torch.randint(VOCABULARY, self._shape, generator=self._generator)
        self._tokens = drawn.sort(1).values
        dist.all_reduce(self._one, group=self._group)

    def step(self) -> None:
        loss = self._ddp(self._tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss: float = loss.item()

    def measured(self, times_s: list[float]) -> Measured:
        digest, parameters = hashlib.sha256(), list(self._ddp.parameters())
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
        count = sum(parameter.numel() for parameter in parameters)
        return Measured(times_s, self._loss, digest.hexdigest(), count)


def train(job: argparse.Namespace, address: str) -> list[dict[str, Measured]]:
    """Takes part in the run of the master at `address`. Returns all peers' measurements, by way."""
    import torch
    import torch.distributed as dist

    import pccl.torch  # noqa: F401 - registers the backend

    torch.set_num_threads(job.threads)
    dist.init_process_group(PCCL, init_method=f"pccl://{address}", world_size=job.peers)
    try:
        gloo, own = dist.new_group(backend=GLOO), dist.group.WORLD
        ways = {GLOO: Trainee(job, gloo), PCCL: Trainee(job, own)}
        ways |= {f"{PCCL} {wire}": Trainee(job, own, wire) for wire in job.wire or ()}
        turns = {name: (way.prepare, way.step) for name, way in ways.items()}
        times_s = trials.in_turns(turns, job.iters, job.warmup_iters, alternate=True)
        found: list[Any] = [None] * job.peers
        dist.all_gather_object(
            found, {name: way.measured(times_s[name]) for name, way in ways.items()}
        )
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def serve(number: int, job: argparse.Namespace, address: str) -> Iterator[object]:
    yield train(job, address)


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
    text = "also measure pccl with gradients in these formats"
    option(parser, "--wire", text, choices=get_args(Format), nargs="+")
    for name, default, meaning in _NUMBERS:
        option(parser, f"{name} N", meaning, default, whole_number(1))
    text = "torch's threads in each process (default: the cores divided among the processes)"
    option(parser, "--threads N", text, kind=whole_number(1))
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if weights differ."""
    if importlib.util.find_spec("torch") is None:
        raise Refused("torch not found; pip install torch brings it")
    args.threads = args.threads or max(
        1, (os.cpu_count() or 1) // (1 if args.master else args.peers)
    )
    if args.master:
        rows = _rows(train(args, args.master))
    else:
        with (
            pccl.MasterNode("127.0.0.1:0") as node,
            workers(args.peers, serve, args, node.address) as results,
        ):
            rows = _rows(collect(results)[0])
    title = options.title("ddp", f"{args.peers} processes", args.master)
    print(
        f"{title}\n# a GPT of {rows[0]['parameters'] / 1e6:.1f} million parameters "
        f"({args.layers} layers, width {args.width}), {args.batch} x {args.length} tokens, "
        f"buckets of {args.bucket_mib} MiB\n"
        f"# medians (minima) of {args.iters} steps after {args.warmup_iters} warm-ups, in turns\n"
        f"#{'over':>12} {'ms a step':>20} {'steps/s':>9} {'of gloo':>8} {'loss':>8}  weights"
    )
    for row in rows:
        times = f"{row['step_s'] * 1e3:.1f} ({row['step_min_s'] * 1e3:.1f})"
        print(
            f"{row['way']:>13} {times:>20} {row['steps_per_s']:9.2f} {row['of_gloo']:8.2f} "
            f"{row['loss']:8.4f}  {'equal' if row['equal'] else 'DIFFER'}"
        )
    options.write_json(args, {"peers": args.peers, "results": rows})
    return 0 if all(row["equal"] for row in rows) else 1


def _rows(peers: list[dict[str, Measured]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for way, first in peers[0].items():
        each = zip(*(measured[way].times_s for measured in peers), strict=True)
        slowest = [max(times) for times in each]
        time_s = median(slowest)
        rows.append(
            {
                "way": way,
                "parameters": first.parameters,
                "step_s": time_s,
                "step_min_s": min(slowest),
                "steps_per_s": 1 / time_s,
                "of_gloo": (rows[0]["step_s"] if rows else time_s) / time_s,
                "loss": first.loss,
                "equal": len({measured[way].weights for measured in peers}) == 1,
            }
        )
    return rows
