"""Measures the time to a loss over emulated long links. Needs Linux, root and torch.

    python stress/wan/loss.py [--mbits 100 1000] [--rtt-ms 50] [--scale 50] [--output DIR]

Four hosts train the byte-level GPT of 60k parameters of examples/experiment, in the ways of WAYS.
DiLoCo has the learning rates that its sweep has chosen, DDP the best one for 300 steps. Every run
adds a line to the file of results, and what is there is not measured again. The result is the time
until the loss is that of DDP over gloo at its end.

Time passes as on machines that compute faster than this one, but over the same links:

- Gradients of a step take `--step-ms`, as on an accelerator: what is left of that is slept. So the
  links decide, not the processors that the hosts share here. The table has the time by which
  gradients were late all the same.
- `--scale 50` divides the rate and the buffers of the links by 50. A model of 60k parameters takes
  as long over them as one of 3 million over the links as named.
- Weights are kept when they are to be validated, and that is done after the end.
- The gradients of DDP are one bucket, whose exchange begins when all are computed.

DiLoCo has three times as many steps as DDP, five times if decoupled, because it needs more for the
same loss, and a schedule of learning rates as long as that. Its rounds have 30 steps. In the way
with a kill, a process dies after a third of the run; ten seconds later another one, which has been
loaded before, takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from network import Link, Network, kind, network, reports, run_script

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import experiment
from experiment.runs import ARMS, BASELINE, INNER_STEPS, SIZES, Rates, Results, Run
from experiment.tables import table

HOSTS = ("a", "b", "c", "d")
SIZE = SIZES["60k"]
BATCH = 16  # samples of a step, of all hosts together
SEED = 1
POINTS = 30  # validations of DDP, evenly over its steps
KILL_AT = 1 / 3  # of a run
DDP_RATES = Rates(4e-3)  # the best of 2, 4, 8 and 12e-3 for 300 steps; the sweep is for 4800
AWAY_S = 10.0  # until another process takes the place of a killed one
FOLDER = Path(__file__).parent


class Way(NamedTuple):
    """One way to train."""

    label: str
    arm: str  # of examples/experiment, whose settings and rates it has
    backend: str = ""  # of DDP
    longer: int = 1  # its steps, as a multiple of those of DDP
    killed: bool = False  # the last host's process, of which another takes the place


WAYS = {
    "ddp-gloo": Way("DDP over gloo", BASELINE, backend="gloo"),
    "ddp-pccl-int8": Way("DDP over pccl, int8", BASELINE, backend="pccl"),
    "sync": Way("sync, int4", "sync-4-int4", longer=3),
    "streaming": Way("streaming, int4", "streaming-4-int4", longer=3),
    "decoupled": Way("decoupled, int4", "decoupled-4-int4", longer=5),
    "decoupled-kill": Way("the same, with a kill", "decoupled-4-int4", longer=5, killed=True),
}


class Job(msgspec.Struct, frozen=True):
    """A run; its result holds for exactly these settings."""

    way: str
    mbit: int
    rtt_ms: int
    scale: int
    step_ms: int
    steps: int  # of each host
    rates: Rates


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a run.

    Attributes:
        points: seconds from the first step of the first host, and its loss, in nats per byte.
        sent_mb: MB that a host has sent, with all headers.
        late: the part of the time by which gradients took longer than `step_ms`, of all hosts.
        kill: seconds at which a process was killed, and at which another had taken its place.
    """

    job: Job
    points: list[tuple[float, float]]
    sent_mb: float
    late: float
    kill: list[float] = []

    def reaches(self, loss: float) -> float | None:
        """Seconds to the first validation with that loss; None: there is none."""
        return next((at_s for at_s, found in self.points if found <= loss), None)


# ---- a host's process ----


class Pace:
    """Gives the gradients of each step a fixed time."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due_s = 0.0
        self.late_s = 0.0

    def begin(self) -> None:
        """Begins a step."""
        self._due_s = time.monotonic() + self._step_s

    def end(self) -> None:
        """Waits until the time of the gradients is over."""
        left_s = self._due_s - time.monotonic()
        self.late_s += max(0.0, -left_s)
        time.sleep(max(0.0, left_s))


class Trainee:
    """The training of a host's process, and the weights to validate at the end."""

    def __init__(self, job: Job, place: int) -> None:
        import torch
        from experiment.text import Text
        from experiment.training import Replicas

        torch.set_num_threads(1)
        self.job, self._place = job, place
        self.run = Run(SIZE, ARMS[WAYS[job.way].arm], job.rates, SEED)
        self.replicas = Replicas(self.run, 1)
        self.model, self.optimizer = self.replicas.models[0], self.replicas.optimizers[0]
        self._text = Text([], context=SIZE.context, samples=job.steps * BATCH, seed=SEED)
        self.pace = Pace(job.step_ms / 1e3)
        self.began_s = self.ended_s = 0.0
        self._kept: list[tuple[float, Any]] = []

    def begin(self) -> None:
        """Begins the training, when all others are present."""
        self.began_s = time.monotonic()

    def batch(self, step: int) -> Any:
        """This host's samples of a step."""
        own = BATCH // len(HOSTS)
        begin = step % self.job.steps * BATCH + self._place * own
        return self._text.samples(range(begin, begin + own))

    def keep(self) -> None:
        """Keeps the current weights, on the first host."""
        from torch.nn.utils import parameters_to_vector

        self.ended_s = time.monotonic()
        if self._place == 0:
            vector = parameters_to_vector(self.model.parameters()).detach().clone()
            self._kept.append((self.ended_s - self.began_s, vector))

    def report(self, digest: str) -> dict[str, Any]:
        """The losses of the kept weights, and other measurements."""
        from torch.nn.utils import vector_to_parameters

        validation, points = self._text.validation(), []
        for at_s, weights in self._kept:
            vector_to_parameters(weights, self.model.parameters())
            points.append((round(at_s, 2), round(self.replicas.validate(validation), 4)))
        late = self.pace.late_s / (self.ended_s - self.began_s)
        return {
            "began_s": self.began_s, "points": points, "late": late, "bytes": sent(),
            "digest": digest,
        }  # fmt: skip


def sent() -> int:
    """Bytes that this host has sent."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("wan0:")).split()[9])


def train_ddp(trainee: Trainee, backend: str, address: str) -> str:
    """Trains; returns a digest of the weights."""
    import torch
    import torch.distributed as dist
    import xxhash
    from experiment.training import CLIP
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_, parameters_to_vector

    from pccl.torch import hooks

    job, model, pace = trainee.job, trainee.model, trainee.pace
    dist.init_process_group("pccl", init_method=f"pccl://{address}", world_size=len(HOSTS))
    group = dist.new_group(backend="gloo") if backend == "gloo" else dist.group.WORLD
    ddp = DistributedDataParallel(model, process_group=group)
    state = group if backend == "gloo" else hooks.Quantized("int8", group)
    exchange: Callable[..., Any] = allreduce_hook if backend == "gloo" else hooks.quantized

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        pace.end()
        return exchange(state, bucket)

    ddp.register_comm_hook(state, hook)
    dist.all_reduce(torch.zeros(1), group=group)
    trainee.begin()
    for step in range(job.steps):
        pace.begin()
        trainee.replicas.set_rates(step / job.steps)
        ddp(trainee.batch(step)).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
        if (step + 1) % max(1, job.steps // POINTS) == 0:
            trainee.keep()
    dist.all_reduce(torch.zeros(1), group=group)
    dist.destroy_process_group()
    weights = parameters_to_vector(model.parameters()).detach().numpy()
    return xxhash.xxh3_128_hexdigest(weights.tobytes())


def train_diloco(trainee: Trainee, address: str, dies: bool) -> str:
    """Trains; returns the digest of the shared state."""
    from experiment.training import diloco

    import pccl

    job, pace = trainee.job, trainee.pace
    rounds = job.steps // INNER_STEPS
    with pccl.Communicator(address, connect_timeout=60) as comm:
        trainer = diloco(trainee.run, comm, trainee.replicas, 0)
        trainee.begin()
        step = round(trainer.progress(rounds) * job.steps)  # not 0 for a process that comes back
        due = step + INNER_STEPS
        while (progress := trainer.progress(rounds)) < 1:
            pace.begin()
            trainee.replicas.backward(trainee.batch(step)[None], progress)
            pace.end()
            step += 1
            if trainer.step() is not None and step >= due:
                trainee.keep()
                due = step + INNER_STEPS
            if dies and progress >= KILL_AT:
                print(json.dumps(time.monotonic()), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.finish()
        trainee.keep()
        return trainer.state_digest()


def peer(words: dict[str, Any]) -> None:
    """One host's process; prints a JSON object, or when it was killed if it is to die."""
    job = msgspec.convert(words["job"], Job)
    trainee, way = Trainee(job, words["place"]), WAYS[job.way]
    sys.stdin.readline()
    if way.backend:
        digest = train_ddp(trainee, way.backend, words["master"])
    else:
        digest = train_diloco(trainee, words["master"], words["dies"])
    print(json.dumps(trainee.report(digest)), flush=True)


# ---- all of them ----


@contextmanager
def hosts(job: Job) -> Iterator[tuple[Network, str]]:
    """The network of a run, and the address of its master."""
    link = Link(job.mbit, job.rtt_ms).scaled(job.scale)
    with (
        network(link, ["master", *HOSTS]) as net,
        net.master(stdout=subprocess.DEVNULL) as address,
    ):
        yield net, address


def go(process: subprocess.Popen[str]) -> None:
    """Lets a host's process begin as soon as it has loaded its modules."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def told(process: subprocess.Popen[str], timeout_s: float) -> float:
    """When a process was killed, as it has said.

    Raises SystemExit: it has failed before.
    """
    printed = process.communicate(timeout=timeout_s)[0]
    if process.returncode != -signal.SIGKILL:
        raise SystemExit("the process that was to be killed has ended before")
    return float(json.loads(printed))


def measure(job: Job, timeout_s: float) -> Result:
    """Executes a run.

    Raises:
        NetworkError: this machine cannot emulate a network.
        SystemExit: a host's process has failed, or weights differ in the end.
    """
    killed, killed_s = WAYS[job.way].killed, None
    with hosts(job) as (net, address):

        def start(place: int, dies: bool) -> subprocess.Popen[str]:
            words = {"job": msgspec.to_builtins(job), "master": address, "place": place}
            command = [sys.executable, str(Path(__file__).resolve()), "--peer"]
            command.append(json.dumps({**words, "dies": dies}))
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wan0"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return net.popen(HOSTS[place], command, env=environment, **pipes)

        last = len(HOSTS) - 1
        started = {host: start(place, killed and place == last) for place, host in enumerate(HOSTS)}
        spare = start(last, False) if killed else None
        for process in started.values():
            go(process)
        if spare is not None:
            killed_s = told(started[HOSTS[last]], timeout_s)
            time.sleep(AWAY_S)
            go(spare)
            started[HOSTS[last]] = spare
        found = reports(started, timeout_s)
    if len({one["digest"] for one in found}) != 1:
        raise SystemExit(f"{job.way}: the hosts do not have the same bits at the end")
    began_s = found[0]["began_s"]
    return Result(
        job,
        found[0]["points"],
        sent_mb=round(sum(one["bytes"] for one in found) / len(HOSTS) / 1e6, 2),
        late=round(sum(one["late"] for one in found) / len(HOSTS), 4),
        kill=[round(at_s - began_s, 2) for at_s in (killed_s, found[-1]["began_s"])]
        if killed_s is not None
        else [],
    )


def show(results: Sequence[Result]) -> str:
    """The table: the time to the loss of the first result of each link at its end."""
    lines = []
    for result in results:
        job = result.job
        base = next(one for one in results if one.job.mbit == job.mbit)
        own_s, base_s = (one.reaches(base.points[-1][1]) for one in (result, base))
        lines.append(
            [
                f"{job.mbit} Mbit/s",
                WAYS[job.way].label,
                "not reached" if own_s is None else f"{own_s:.0f} s",
                "" if own_s is None or base_s is None else f"{own_s / base_s:.2f}",
                f"{result.points[-1][1]:.3f} after {result.points[-1][0]:.0f} s",
                str(job.steps),
                f"{result.sent_mb:.1f}",
                f"{result.late:.1%}",
            ]
        )
    head = ["link", "way", "time to gloo's last loss", "of gloo's time", "its own last loss"]
    return table([*head, "steps", "MB sent by each", "late"], lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """The figure: loss against time, for each link."""
    from experiment import figures

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        title = f"{result.job.mbit} Mbit/s, {result.job.rtt_ms} ms"
        panels.setdefault(title, {})[WAYS[result.job.way].label] = result.points
    figures.waits(panels, path)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--mbits", type=int, nargs="+", default=[100, 1000], help="of the links")
    made.add_argument("--rtt-ms", type=int, default=50, help="of any two hosts (%(default)s)")
    made.add_argument("--scale", type=int, default=50, help="divides the rate of the links")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY")
    made.add_argument("--steps", type=int, default=300, help="of DDP (%(default)s)")
    made.add_argument("--step-ms", type=int, default=100, help="time of gradients (%(default)s)")
    made.add_argument("--timeout-s", type=float, default=1800, help="of a run")
    made.add_argument("--draw", action="store_true", help="make no runs: use the results so far")
    made.add_argument("--results", type=Path, default=FOLDER / "loss.jsonl", metavar="FILE")
    made.add_argument("--output", type=Path, metavar="DIR", help="where to draw the figure")
    made.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    return made


def jobs(args: argparse.Namespace) -> list[Job]:
    """All runs; the first one of each link is the baseline."""
    swept = Results(Path(experiment.__file__).parent / "results.jsonl")
    made = []
    for mbit in args.mbits:
        for name in dict.fromkeys([next(iter(WAYS)), *args.ways]):
            way = WAYS[name]
            rates = DDP_RATES if way.backend else swept.rates(ARMS[way.arm], SIZE)
            assert rates is not None  # the committed sweep is complete
            steps = args.steps * way.longer
            made.append(Job(name, mbit, args.rtt_ms, args.scale, args.step_ms, steps, rates))
    return made


def main() -> int:
    args = parser().parse_args()
    if args.peer:
        peer(args.peer)
        return 0
    lines = args.results.read_bytes().splitlines() if args.results.exists() else []
    found = {one.job: one for one in (msgspec.json.decode(line, type=Result) for line in lines)}
    wanted = jobs(args)
    left = [] if args.draw else [job for job in wanted if job not in found]
    for number, job in enumerate(left, 1):
        began_s = time.monotonic()
        found[job] = result = measure(job, args.timeout_s)
        with args.results.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        print(
            f"[{number}/{len(left)}] {job.way} at {job.mbit} Mbit/s, by {kind()}: loss "
            f"{result.points[-1][1]} after {result.points[-1][0]:.0f} s, late {result.late:.1%}; "
            f"took {time.monotonic() - began_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    results = [found[job] for job in wanted if job in found]
    print(show(results))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        draw(results, args.output / "loss.svg")
    return 0


if __name__ == "__main__":
    run_script(main)
