"""`pccl demo`: DiLoCo with real processes, one of which is killed and one of which joins later.

Three peers train a small language model on the source code of Python's standard library for about a
minute on this machine. The resulting chart shows that the training was not disturbed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import queue
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pccl
from pccl.cli.arguments import option, output
from pccl.cli.demo.director import STEPS_MIN, Director, State, decode
from pccl.cli.processes import Fleet
from pccl.cli.terminal import complain, shown
from pccl.kernels import Wire

if TYPE_CHECKING:
    from pccl.cli.demo.display import Display

_REQUIRED = ("torch", "matplotlib")
MODES = ("sync", "delayed", "eager", "streaming", "decoupled")  # of pccl.diloco, which needs torch
WIRES = get_args(Wire)

PASSED_ON = ("steps", "inner_steps", "mode", "wire", "seed")  # options that the peers get, too
_PEERS = 3
_PEERS_PER_CORE = 4
_PEER_BYTES = 512 << 20  # memory that a peer needs, with a margin
_REFRESH_S = 0.25
_SILENCE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--peers", "PEERS", int, "training processes at the start", _PEERS)
    option(parser, "--steps", "STEPS", int, "outer steps", 16)
    option(parser, "--inner-steps", "INNER_STEPS", int, "inner steps in an outer step", 30)
    for name, choices, text in (
        ("--mode", MODES, "when a mean is applied"),
        ("--wire", WIRES, "how progress is sent"),
    ):
        text = f"{text} (default: {choices[0]})"
        parser.add_argument(name, choices=choices, default=choices[0], help=text)
    parser.add_argument(
        "--no-chaos", action="store_true", help="kill no peer, and let none join half-way"
    )
    option(parser, "--seed", "SEED", int, "seed of the weights and of the order of the text", 0)
    option(parser, "--output", "OUTPUT", Path, "where to write the chart", Path("pccl-demo.png"))


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 if every survivor took the last outer step with the same bits and the loss
    fell, if there was time for that; 1 if not; 2 if it could not start; 130 if it was interrupted.
    """
    problem = _problem(args)
    if problem:
        complain("demo", problem)
        return 2
    try:
        return _perform(args)
    except KeyboardInterrupt:
        complain("demo", "interrupted")
        return 130


def _problem(args: argparse.Namespace) -> str | None:
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"{' and '.join(missing)} not found: in the clone of pccl, "
            """pip install -e ".[demo]" brings what is needed"""
        )
    if args.peers < 2 or args.steps < 1 or args.inner_steps < 1:
        return "it takes at least 2 peers, 1 outer step and 1 inner step"
    if args.steps < STEPS_MIN and not args.no_chaos:
        return f"a kill and a join take {STEPS_MIN} outer steps; or say --no-chaos"
    most = _peers_max()
    if args.peers > most:
        return f"{args.peers} peers are too many for this machine, which has room for {most}"
    return _output_problem(args.output)


def _peers_max() -> int:
    """The number of torch processes for which this machine has enough memory and cores."""
    most = _PEERS_PER_CORE * (os.cpu_count() or 1)
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = min(most, memory // _PEER_BYTES)
    return max(most, _PEERS)


def _output_problem(path: Path) -> str | None:
    """Why there can be no chart, found out before the training."""
    try:
        output(str(path))
    except argparse.ArgumentTypeError as error:
        return str(error)
    if path.suffix not in ("", ".png"):
        from matplotlib.backend_bases import FigureCanvasBase

        known = sorted(FigureCanvasBase.get_supported_filetypes())
        if path.suffix[1:].lower() not in known:
            return f"{path}: a chart can be {', '.join(known)}, not {path.suffix[1:]}"
    return None


def _perform(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    with pccl.MasterNode("127.0.0.1:0") as master, Fleet("pccl.cli.demo.peer") as fleet:
        if "PCCL_LOG_LEVEL" not in os.environ:  # the display says who is lost and who joins
            logging.getLogger("pccl").setLevel(logging.ERROR)
        director = Director(
            peers=args.peers,
            steps=args.steps,
            inner_steps=args.inner_steps,
            chaos=not args.no_chaos,
            say=lambda text: display.say(text, time.monotonic() - began_s),
            kill=fleet.kill,
            go=lambda number: fleet.say(number, "go"),
        )
        options = {
            "master": master.address,
            "shards": len(director.peers),
            "min_peers": args.peers,
            **{name: getattr(args, name) for name in PASSED_ON},
        }
        for peer in director.peers:
            fleet.start(peer.number, json.dumps({"number": peer.number, **options}))
        from pccl.cli.demo.display import Display  # while they load torch

        with Display(director) as display:
            loading = f"master at {master.address}; {len(director.peers)} processes are loading"
            display.say(loading, 0.0)
            _follow(fleet, director, display, began_s)
        failed = [peer.number for peer in director.peers if peer.state is State.FAILED]
        complaints = "".join(f"{fleet.errors(number)}\n" for number in failed)
    return _conclude(args, director, complaints)


def _follow(fleet: Fleet, director: Director, display: Display, began_s: float) -> None:
    last_s = time.monotonic()
    while not director.over:
        try:
            number, news = fleet.heard.get(timeout=_REFRESH_S)
        except queue.Empty:
            if time.monotonic() - last_s > _SILENCE_S:
                director.silent(_SILENCE_S)
            display.refresh()
            continue
        last_s = time.monotonic()
        if isinstance(news, int):
            director.exited(number, news)
        else:
            director.heard(number, decode(news), last_s - began_s)
        display.refresh()


def _conclude(args: argparse.Namespace, director: Director, complaints: str) -> int:
    from pccl.cli.demo import display
    from pccl.cli.demo.display import closing_table, size_text

    verdict = director.verdict()
    if verdict:
        print(complaints, end="", file=sys.stderr)
        complain("demo", f"FAILED: {verdict}")
        return 1
    display.save(director, args.output)
    first, last = director.validation_losses()
    sent = sum(peer.tx_bytes for peer in director.peers)
    otherwise = sum(peer.data_parallel_bytes for peer in director.peers)
    print(*map(shown, closing_table(director)), sep="\n")
    print(f"Validation loss {first:.3f} -> {last:.3f} nats per byte.")
    print(f"All survivors hold the same bits: {director.digest()}")
    print(f"All peers together sent {size_text(sent)} of parameters and shared state.")
    print(
        f"Data-parallel training would have sent {size_text(otherwise)}: "
        "a ring all-reduce in each inner step,\n"
        f"2 (n-1)/n x {size_text(director.reduce_bytes)} for each of n peers."
    )
    print(f"Chart: {args.output}")
    return 0
