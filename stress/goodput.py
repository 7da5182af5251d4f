"""Measures goodput: the share of the undisturbed training that remains while peers fail.

    python stress/goodput.py --out goodput.json              # the whole table: more than an hour
    python stress/goodput.py --arms decoupled --cases fail:15,fail:5 --seconds 60

Learners are processes, whose inner step is a sleep, so that the processor limits nothing. A place
is one of the machines of a run, and has a learner. The cases:

    none        nothing fails; the others are measured against this one
    fail:S      every S seconds one learner is killed, and another process takes its place at once
    stall:S     every 3 S seconds one learner is stopped for S seconds
    slow        the steps of one learner take twice as long: 1 - 1/2P is the best of P places
    stop:S      one learner is stopped for S seconds, and only the others are measured, against
                the same learners before

A replacement process has already loaded all modules, like a scheduler's spare. The arms are the
modes of DiLoCo; "elastic", data parallel training with pccl, which repeats a step without a lost
peer; and "gloo", data parallel training with torch.distributed, which replaces all processes if one
is lost, and continues from the last checkpoint, written every --inner-steps.

A learner's tokens count when they are in a mean or a checkpoint, so they cannot be lost with it.
With --out, results in the file are not measured again, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pccl
from pccl.support import Closing

BATCH = 8  # tokens of a step
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "deadlines": {"deadline_peers": 2, "weight": "samples"},
    "delayed": {"mode": "delayed"},
    "streaming": {"mode": "streaming", "fragments": 4, "overlap": 2},
    "decoupled": {"mode": "decoupled", "fragments": 4},
}
ARMS = ("gloo", "elastic", *MODES)
CASES = "none,fail:60,fail:15,fail:5,stall:10,slow,stop:60"


# ---- a learner ----


def learn(arm: str, inner_steps: int, to_run: Connection) -> None:
    """Runs a learner, which begins when it receives its orders, and reports each step."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    to_run.send(None)  # it is ready
    orders = to_run.recv()

    def step() -> list[Any]:
        time.sleep(orders["step"])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        return [parameter.grad for parameter in model.parameters()]

    def report(counts: bool) -> None:
        """Reports a step: whether its tokens, and those before it, count."""
        to_run.send((BATCH, counts))

    if arm == "gloo":
        learn_by_gloo(model, step, report, orders, inner_steps)
        return
    while True:
        with suppress(pccl.KickedError), pccl.Communicator(orders["address"]) as comm:
            if arm == "elastic":
                learn_elastic(comm, model, step, report, orders["peers"])
            else:
                learn_by_diloco(
                    comm, arm, model, optimizer, step, report, orders["peers"], inner_steps
                )
        orders["peers"] = 1  # it was stopped for too long, and receives the state of the others


def learn_by_diloco(
    comm: pccl.Communicator,
    arm: str,
    model: Any,
    optimizer: Any,
    step: Callable[[], list[Any]],
    report: Callable[[bool], None],
    peers: int,
    inner_steps: int,
) -> None:
    import pccl.diloco

    diloco = pccl.diloco.DiLoCo(
        comm,
        model,
        optimizer,
        inner_steps=inner_steps,
        min_peers=peers,
        **MODES[arm],
    )
    while True:
        step()
        outer = diloco.step(samples=BATCH)
        report(outer is not None and not outer.rejoined)


def learn_elastic(
    comm: Any,
    model: Any,
    step: Callable[[], list[Any]],
    report: Callable[[bool], None],
    peers: int,
) -> None:
    import torch

    shared = pccl.SharedState.from_module(model)
    comm.sync_shared_state(shared, min_peers=peers)
    while True:
        gradients = step()
        while True:
            try:
                comm.all_reduce(gradients)
                break
            except pccl.PeerLostError:
                pass  # again, without the lost peer
            except pccl.TooFewPeersError:
                break
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 1e-3 * gradient
        shared.push_revision()
        comm.admit(shared)
        report(True)


def learn_by_gloo(
    model: Any,
    step: Callable[[], list[Any]],
    report: Callable[[bool], None],
    orders: dict[str, Any],
    every: int,
) -> None:
    import torch
    import torch.distributed as dist

    where, rank = f"tcp://127.0.0.1:{orders['port']}", orders["place"]
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=orders["places"])
    saved = Path(orders["saved"])
    if saved.exists():
        model.load_state_dict(torch.load(saved, weights_only=True))
    for number in range(1, sys.maxsize):
        for gradient in step():
            dist.all_reduce(gradient)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad / orders["places"]
        if number % every == 0 and rank == 0:
            torch.save(model.state_dict(), saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
        report(number % every == 0)


# ---- all of them ----


PROCESSES = multiprocessing.get_context("forkserver")


class Learner:
    """A learner's process. It has loaded all modules: it is forked from a process that has."""

    def __init__(self, arm: str, inner_steps: int) -> None:
        self.reports, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=learn, args=(arm, inner_steps, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.reports.recv()
        self.tokens = 0  # those that may be lost with it
        self.counted = 0  # those that may not

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.reports.close()


class Run(Closing):
    """Learners and their master, with spares for the next failure."""

    def __init__(self, arm: str, options: argparse.Namespace, slow: bool = False) -> None:
        self._master = pccl.MasterNode("127.0.0.1:0")
        self._master.run()
        self._arm, self._options, self._slow = arm, options, slow
        self._directory = tempfile.TemporaryDirectory()
        self._of_lost = 0  # tokens that count, of learners that were lost
        self.learners = self._start(options.peers)  # by place
        self._spares = self._start(options.peers if arm == "gloo" else 1)
        self._enter(range(options.peers), options.peers)
        while not all(learner.counted for learner in self.learners):
            self._hear()

    def close(self) -> None:
        for learner in self.learners:
            learner.process.kill()
        for learner in self.learners + self._spares:
            learner.close()
        self._master.interrupt()
        self._directory.cleanup()

    def fail(self, place: int) -> None:
        """Kills a learner, and puts a spare in its place; or all, if the others cannot continue."""
        places = range(len(self.learners)) if self._arm == "gloo" else [place]
        lost = [self.learners[each] for each in places]
        for learner in lost:
            learner.process.kill()
        for each in places:
            self.learners[each] = self._spares.pop()
        for learner in lost:
            learner.close()
            self._of_lost += learner.counted
        self._enter(places, 1)
        self._spares = self._start(len(places))

    def signal(self, place: int, number: int) -> None:
        pid = self.learners[place].process.pid
        assert pid is not None
        os.kill(pid, number)

    def trained(self, *places: int) -> int:
        """Tokens on which learners have trained, including those that may be lost."""
        learners = [self.learners[place] for place in places]
        return sum(learner.counted + learner.tokens for learner in learners)

    def counted(self) -> int:
        """Tokens of all learners that cannot be lost with them."""
        return self._of_lost + sum(learner.counted for learner in self.learners)

    def hear(self, until_s: float) -> None:
        """Takes in what learners report until then."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._hear(left_s)

    def _start(self, count: int) -> list[Learner]:
        return [Learner(self._arm, self._options.inner_steps) for _ in range(count)]

    def _enter(self, places: Sequence[int], peers: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for place in places:
            orders = {
                "address": self._master.address,
                "step": self._options.step * (2 if self._slow and place == 0 else 1),
                "peers": peers,
                "place": place,
                "places": len(self.learners),
                "port": port,
                "saved": f"{self._directory.name}/model.pt",
            }
            self.learners[place].reports.send(orders)

    def _hear(self, timeout_s: float | None = None) -> None:
        ready = wait([learner.reports for learner in self.learners], timeout_s)
        for learner in self.learners:
            if learner.reports not in ready:
                continue
            try:
                tokens, counts = learner.reports.recv()
            except EOFError:
                learner.process.join()
                raise SystemExit(f"a learner ended with {learner.process.exitcode}") from None
            learner.tokens += tokens
            if counts:
                learner.counted, learner.tokens = learner.counted + learner.tokens, 0


def rate(run: Run, seconds: float, every: float, act: Callable[[int], object]) -> float:
    """Tokens a second that count, while `act` is called every so many seconds; 0: never."""
    begin_s, before = time.monotonic(), run.counted()
    end_s = begin_s + seconds
    due_s, number = begin_s + every if every else end_s, 0
    while due_s < end_s:
        run.hear(due_s)
        act(number)
        due_s, number = due_s + every, number + 1
    run.hear(end_s)
    return (run.counted() - before) / (time.monotonic() - begin_s)


def others(run: Run, seconds: float) -> float:
    """Tokens per second of all learners except the first."""
    rest = range(1, len(run.learners))
    begin_s, before = time.monotonic(), run.trained(*rest)
    run.hear(begin_s + seconds)
    return (run.trained(*rest) - before) / (time.monotonic() - begin_s)


def measure(arm: str, case: str, options: argparse.Namespace) -> float:
    """Tokens per second in a case; for "stop", the remaining share."""
    kind, _, number = case.partition(":")
    given_s = float(number or 0)
    draw = random.Random(options.seed)
    with Run(arm, options, slow=kind == "slow") as run:

        def act(number: int) -> None:
            place = draw.randrange(options.peers)
            if kind == "fail":
                run.fail(place)
                return
            run.signal(place, signal.SIGSTOP)
            run.hear(time.monotonic() + given_s)
            run.signal(place, signal.SIGCONT)

        if kind == "stop":
            usual = others(run, min(given_s, options.seconds))
            run.signal(0, signal.SIGSTOP)
            remains = others(run, given_s) / usual
            run.signal(0, signal.SIGCONT)
            return remains
        every_s = {"fail": given_s, "stall": 3 * given_s}.get(kind, 0.0)
        return rate(run, options.seconds, every_s, act)


def table(results: dict[str, dict[str, float]], cases: Sequence[str]) -> str:
    """The goodput of each arm, as a table in Markdown."""
    names = {"none": "nothing fails", "slow": "one of half speed"}
    names |= {"fail": "a failure each {} s", "stall": "stalls of {} s", "stop": "the others of one"}
    heads = []
    for case in cases:
        kind, _, number = case.partition(":")
        heads.append(names[kind].format(number))
    lines = [f"| arm | {' | '.join(heads)} |", "| --- |" + " --- |" * len(cases)]
    for arm, found in results.items():
        whole = found.get("none", 0.0)
        cells = []
        for case in cases:
            value = found.get(case)
            if value is None:
                cells.append("")
            elif case == "none" or not (whole or case.startswith("stop")):
                cells.append(f"{value:.0f} tokens a second")
            else:
                cells.append(f"{value if case.startswith('stop') else value / whole:.1%}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    parser.add_argument("--cases", default=CASES, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each measurement")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=24)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an inner step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    arms, cases = options.arms.split(","), options.cases.split(",")
    for arm in arms:
        if arm not in ARMS:
            parser.error(f"no arm is {arm!r}: it may be one of {', '.join(ARMS)}")
    for case in cases:
        kind, _, number = case.partition(":")
        if (kind in ("fail", "stall", "stop")) != number.replace(".", "", 1).isdigit():
            parser.error(f"no case is {case!r}: it may be one of {CASES}, with other numbers")
        if kind not in ("none", "fail", "stall", "slow", "stop"):
            parser.error(f"no case is {case!r}: it may be one of {CASES}, with other numbers")
    settings = {k: getattr(options, k) for k in ("seconds", "peers", "inner_steps", "step", "seed")}
    results: dict[str, dict[str, float]] = {}
    if options.out and options.out.exists():
        saved = json.loads(options.out.read_text(encoding="utf-8"))
        if saved["settings"] != settings:
            parser.error(f"{options.out} has results of other settings: {saved['settings']}")
        results = saved["results"]
    PROCESSES.set_forkserver_preload(["torch._dynamo", "pccl.diloco"])  # torch.optim loads dynamo
    wanted = [(arm, case) for arm in arms for case in cases if case not in results.get(arm, {})]
    began = time.monotonic()
    for done, (arm, case) in enumerate(wanted):
        value = measure(arm, case, options)
        results.setdefault(arm, {})[case] = round(value, 4)
        left_s = (time.monotonic() - began) / (done + 1) * (len(wanted) - done - 1)
        print(
            f"{arm:>10} {case:>8}: {value:.3f}   ({done + 1} of {len(wanted)}, "
            f"{left_s / 60:.0f} min left)",
            file=sys.stderr,
            flush=True,
        )
        if options.out:
            text = json.dumps({"settings": settings, "results": results}, indent=1)
            temporary = options.out.with_suffix(".new")
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, options.out)
    print(table({arm: results[arm] for arm in arms if arm in results}, cases))


if __name__ == "__main__":
    main()
