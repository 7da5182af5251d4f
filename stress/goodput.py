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
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

    import pccl
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
        print("in", flush=True)
        while True:
            time.sleep(step_s)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            outer = diloco.step(samples=BATCH)
            print(json.dumps([BATCH, outer is not None and not outer.rejoined]), flush=True)


class Learner:
    """A process that trains, and what it has reported.

    Attributes:
        tokens: it has trained on, and no mean has them yet.
        counted: those that a mean has.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--learner", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tokens = self.counted = 0
        self.ready, self.entered = threading.Event(), threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                self.ready.set()
            elif line == "in\n":
                self.entered.set()
            else:
                tokens, met = json.loads(line)
                self.tokens += tokens
                if met:
                    self.tokens, self.counted = 0, self.counted + self.tokens

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Fleet:
    """Learners, their master, and a spare for the next failure."""

    def __init__(self, arm: str, options: argparse.Namespace) -> None:
        import pccl

        self._master = pccl.MasterNode("127.0.0.1:0")
        self._master.run()
        self._arguments = [self._master.address, arm, str(options.inner_steps), str(options.step)]
        self.options = options
        self.gone: list[Learner] = []
        self.learners = [self._new(options.peers) for _ in range(options.peers)]
        self._spare = self._new(1)
        for learner in self.learners:
            self._start(learner)
        for learner in self.learners:
            learner.entered.wait()

    def _new(self, peers: int) -> Learner:
        return Learner([*self._arguments, str(peers)])

    def _start(self, learner: Learner) -> None:
        learner.ready.wait()
        learner.go()

    def fail(self, draw: random.Random) -> None:
        """One learner dies, and the spare takes its place."""
        place = draw.randrange(len(self.learners))
        lost = self.learners[place]
        lost.end()
        self.gone.append(lost)
        self.learners[place] = self._spare
        self._start(self._spare)
        self._spare = self._new(1)

    def counted(self) -> int:
        return sum(learner.counted for learner in [*self.learners, *self.gone])

    def close(self) -> None:
        for learner in [*self.learners, self._spare]:
            learner.end()
        self._master.interrupt()


def settle(fleet: Fleet) -> None:
    """Waits until all learners are in a mean."""
    while not all(learner.counted for learner in fleet.learners):
        time.sleep(0.1)


def rate(fleet: Fleet, seconds: float, every: float, draw: random.Random) -> float:
    """Tokens a second that means have, with a failure each `every` seconds."""
    settle(fleet)
    begin, before = time.monotonic(), fleet.counted()
    due = begin + every if every else float("inf")
    while time.monotonic() < begin + seconds:
        time.sleep(0.05)
        if time.monotonic() >= due:
            due += every
            fleet.fail(draw)
    return (fleet.counted() - before) / (time.monotonic() - begin)


def others(fleet: Fleet, seconds: float) -> float:
    """Tokens a second of all learners but the first."""
    rest = fleet.learners[1:]
    begin, before = time.monotonic(), sum(each.counted + each.tokens for each in rest)
    time.sleep(seconds)
    return (sum(each.counted + each.tokens for each in rest) - before) / (time.monotonic() - begin)


def measure(arm: str, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Goodput of an arm, by the seconds between two failures, or with one learner stopped."""
    draw = random.Random(options.seed)
    whole = 0.0
    for every in [0.0, *options.every]:
        fleet = Fleet(arm, options)
        try:
            found = rate(fleet, options.seconds, every, draw)
            if every:
                yield f"a failure each {every:g} s", found / whole
            else:
                whole = found
                yield "tokens a second", found
            if options.stop and not every:
                usual = others(fleet, options.stop)
                fleet.learners[0].send(signal.SIGSTOP)
                while_stopped = others(fleet, options.stop)
                fleet.learners[0].send(signal.SIGCONT)
                yield f"one stopped for {options.stop:g} s", while_stopped / usual
        finally:
            fleet.close()


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
