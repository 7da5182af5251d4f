"""Measures goodput: which part of the undisturbed training remains while peers fail.

    python stress/goodput.py --arms decoupled,deadlines,sync --every 15,5 --seconds 60
    python stress/goodput.py --arms decoupled --every 0 --stop 60

Learners are processes, whose inner step is a sleep, so that the processor limits nothing. Every so
many seconds one of them is killed, and another process takes its place at once. It has loaded all
modules before, as that of a scheduler with spares. With --stop one learner is stopped for so long
instead, and the others are measured meanwhile.

The tokens of a learner count when a mean has them: what it had trained since then is lost with it.
Goodput is that of all places together, against the same command without failures (--every 0), or
with --stop against the same learners before.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pccl
from pccl.cli.processes import Fleet
from pccl.support.closing import Closing

BATCH = 8  # tokens of a step
ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "deadlines": {"deadline_peers": 2, "weight": "samples"},
    "delayed": {"mode": "delayed"},
    "streaming": {"mode": "streaming", "fragments": 4, "overlap": 2},
    "decoupled": {"mode": "decoupled", "fragments": 4},
}


# ---- a learner ----


def learn(address: str, arm: str, inner_steps: int, step_s: float, peers: int) -> None:
    import torch

    from pccl.diloco import DiLoCo

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    print("ready", flush=True)
    if not sys.stdin.readline():  # the spare is not needed
        return
    with pccl.Communicator(address) as comm:
        diloco = DiLoCo(
            comm, model, optimizer, inner_steps=inner_steps, min_peers=peers, **ARMS[arm]
        )
        while True:
            time.sleep(step_s)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            outer = diloco.step(samples=BATCH)
            print(json.dumps([BATCH, outer is not None and not outer.rejoined]), flush=True)


class Run(Closing):
    """Learners and their master, with a spare for the next failure."""

    def __init__(self, arm: str, options: argparse.Namespace) -> None:
        self._master = pccl.MasterNode("127.0.0.1:0")
        self._master.run()
        self._words = [self._master.address, arm, str(options.inner_steps), str(options.step)]
        self._fleet = Fleet("goodput", str(Path(__file__).parent))
        self._started = 0
        self._ready: set[int] = set()
        self._tokens: Counter[int] = Counter()  # of each learner, that no mean has yet
        self._counted: Counter[int] = Counter()  # those that a mean has
        self.learners = [self._start(options.peers) for _ in range(options.peers)]  # by place
        self._spare = self._start(1)
        for learner in self.learners:
            self._enter(learner)
        while not all(self._counted[learner] for learner in self.learners):
            self._hear()

    def close(self) -> None:
        self._fleet.close()
        self._master.interrupt()

    def fail(self, place: int) -> None:
        """One learner dies, and the spare takes its place."""
        self._fleet.kill(self.learners[place])
        self.learners[place] = self._spare
        self._enter(self._spare)
        self._spare = self._start(1)

    def signal(self, place: int, number: int) -> None:
        self._fleet.signal(self.learners[place], number)

    def trained(self, *places: int) -> int:
        """Tokens on which learners have trained, in a mean or not."""
        return sum(
            self._counted[learner] + self._tokens[learner]
            for learner in (self.learners[place] for place in places)
        )

    def counted(self) -> int:
        """Tokens of all learners that a mean has."""
        return self._counted.total()

    def hear(self, until_s: float) -> None:
        """Takes in what learners report until then."""
        while (left_s := until_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._hear(left_s)

    def _start(self, peers: int) -> int:
        self._started += 1
        self._fleet.start(self._started, "--learner", *self._words, str(peers))
        return self._started

    def _enter(self, learner: int) -> None:
        while learner not in self._ready:
            self._hear()
        self._fleet.say(learner, "go")

    def _hear(self, timeout_s: float | None = None) -> None:
        learner, news = self._fleet.heard.get(timeout=timeout_s)
        if isinstance(news, int):
            if learner in self.learners:
                raise SystemExit(f"a learner ended with {news}:\n{self._fleet.errors(learner)}")
        elif news == "ready\n":
            self._ready.add(learner)
        else:
            tokens, met = json.loads(news)
            self._tokens[learner] += tokens
            if met:
                self._counted[learner] += self._tokens.pop(learner)


def rate(run: Run, seconds: float, every: float, draw: random.Random) -> float:
    """Tokens a second that means have, with a failure each `every` seconds."""
    begin_s, before = time.monotonic(), run.counted()
    end_s = begin_s + seconds
    due_s = begin_s + every if every else end_s
    while due_s < end_s:
        run.hear(due_s)
        run.fail(draw.randrange(len(run.learners)))
        due_s += every
    run.hear(end_s)
    return (run.counted() - before) / (time.monotonic() - begin_s)


def others(run: Run, seconds: float) -> float:
    """Tokens a second of all learners but the first."""
    rest = range(1, len(run.learners))
    begin_s, before = time.monotonic(), run.trained(*rest)
    run.hear(begin_s + seconds)
    return (run.trained(*rest) - before) / (time.monotonic() - begin_s)


def measure(arm: str, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Goodput of an arm, by the seconds between two failures, or with one learner stopped."""
    draw = random.Random(options.seed)
    whole = 0.0
    for every in [0.0, *options.every]:
        with Run(arm, options) as run:
            found = rate(run, options.seconds, every, draw)
            if every:
                yield f"a failure each {every:g} s", found / whole
            else:
                whole = found
                yield "tokens a second", found
            if options.stop and not every:
                usual = others(run, options.stop)
                run.signal(0, signal.SIGSTOP)
                while_stopped = others(run, options.stop)
                run.signal(0, signal.SIGCONT)
                yield f"one stopped for {options.stop:g} s", while_stopped / usual


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learner", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--every", default="60,15,5", help="seconds between failures; 0: none")
    parser.add_argument("--stop", type=float, default=0.0, help="seconds; 0: stop no learner")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=24)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an inner step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    if options.learner:
        address, arm, inner_steps, step, peers = options.learner
        learn(address, arm, int(inner_steps), float(step), int(peers))
        return
    options.every = [float(part) for part in options.every.split(",") if float(part)]
    results: dict[str, dict[str, float]] = {}
    for arm in options.arms.split(","):
        if arm not in ARMS:
            parser.error(f"no arm is {arm!r}: it may be one of {', '.join(ARMS)}")
        results[arm] = {}
        for what, value in measure(arm, options):
            results[arm][what] = round(value, 4)
            print(f"{arm:>10}  {what}: {value:.3f}", flush=True)
            if options.out:
                settings = {k: v for k, v in vars(options).items() if k not in ("out", "learner")}
                text = json.dumps({"settings": settings, "results": results}, indent=1)
                options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
