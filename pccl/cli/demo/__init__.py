"""`pccl demo`: DiLoCo with real processes. One is killed, and one joins later.

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
from typing import get_args

import pccl
from pccl.cli.arguments import option, output
from pccl.cli.demo import display
from pccl.cli.demo.director import STEPS_MIN, Director, State, decode
from pccl.cli.processes import Fleet
from pccl.cli.terminal import Progress, Refused, complain, scaled, shown
from pccl.kernels import Wire
from pccl.types import Mode

_REQUIRED = ("torch", "matplotlib")
PASSED_ON = ("steps", "inner_steps", "mode", "wire", "seed")  # options that the peers get, too
_PEERS = 3
_PEERS_PER_CORE = 4
_PEER_BYTES = 512 << 20  # memory that a peer needs, with a margin
_LINES_SHOWN = 12  # below the table
_REFRESH_S = 0.25
_SILENCE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--peers PEERS", "training processes at the start", _PEERS, int)
    option(parser, "--steps STEPS", "outer steps", 16, int)
    option(parser, "--inner-steps INNER_STEPS", "inner steps in an outer step", 30, int)
    modes, wires = get_args(Mode), get_args(Wire)
    option(parser, "--mode", "when a mean is applied", modes[0], choices=modes)
    option(parser, "--wire", "how progress is sent", wires[0], choices=wires)
    option(parser, "--no-chaos", "kill no peer, and let none join half-way")
    option(parser, "--seed SEED", "seed of the weights and of the order of the text", 0, int)
    option(parser, "--output OUTPUT", "where to write the chart", Path("pccl-demo.png"), Path)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0 on success, 1 on failure, 130 if interrupted.

    Success means that every survivor took the last outer step with the same bits and, if there were
    enough steps, that the loss fell.
    """
    _check(args)
    try:
        return _perform(args)
    except KeyboardInterrupt:
        complain("demo", "interrupted")
        return 130


def _check(args: argparse.Namespace) -> None:
    """Raises Refused: a run or its chart is impossible."""
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(
            f"{' and '.join(missing)} not found: in the clone of pccl, "
            """pip install -e ".[demo]" brings what is needed"""
        )
    if args.peers < 2 or args.steps < 1 or args.inner_steps < 1:
        raise Refused("it takes at least 2 peers, 1 outer step and 1 inner step")
    if args.steps < STEPS_MIN and not args.no_chaos:
        raise Refused(f"a kill and a join take {STEPS_MIN} outer steps; or use --no-chaos")
    if args.peers > (most := _peers_max()):
        raise Refused(
            f"{args.peers} peers are too many for this machine, which has room for {most}"
        )
    try:
        output(str(args.output))
    except argparse.ArgumentTypeError as error:
        raise Refused(error) from None
    kind = args.output.suffix[1:]
    if kind not in ("", "png"):
        from matplotlib.backend_bases import FigureCanvasBase

        known = sorted(FigureCanvasBase.get_supported_filetypes())
        if kind.lower() not in known:
            raise Refused(f"{args.output}: a chart can be {', '.join(known)}, not {kind}")


def _peers_max() -> int:
    """The number of torch processes for which this machine has enough memory and cores."""
    most = _PEERS_PER_CORE * (os.cpu_count() or 1)
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = min(most, memory // _PEER_BYTES)
    return max(most, _PEERS)


def _perform(args: argparse.Namespace) -> int:
    began_s = time.monotonic()

    def note(text: str) -> None:
        progress.print(f"{time.monotonic() - began_s:6.1f} s  {text}")

    with pccl.MasterNode("127.0.0.1:0") as master, Fleet("pccl.cli.demo.peer") as fleet:
        if "PCCL_LOG_LEVEL" not in os.environ:  # the display says who is lost and who joins
            logging.getLogger("pccl").setLevel(logging.ERROR)
        director = Director(
            peers=args.peers,
            steps=args.steps,
            inner_steps=args.inner_steps,
            chaos=not args.no_chaos,
            say=note,
            kill=fleet.kill,
            go=lambda number: fleet.say(number, "go"),
        )
        options = {name: getattr(args, name) for name in PASSED_ON}
        options |= {"master": master.address, "min_peers": args.peers}
        options["shards"] = len(director.peers)
        for peer in director.peers:
            fleet.start(peer.number, json.dumps({"number": peer.number, **options}))
        with Progress(lambda: display.picture(director), _LINES_SHOWN) as progress:
            note(f"master at {master.address}; {len(director.peers)} processes are loading")
            _follow(fleet, director, progress, began_s)
        if verdict := director.verdict():
            for peer in director.peers:
                if peer.state is State.FAILED:
                    print(fleet.errors(peer.number), file=sys.stderr)
            complain("demo", f"FAILED: {verdict}")
            return 1
    _conclude(args, director)
    return 0


def _follow(fleet: Fleet, director: Director, progress: Progress, began_s: float) -> None:
    last_s = time.monotonic()
    while not director.over:
        try:
            number, news = fleet.heard.get(timeout=_REFRESH_S)
        except queue.Empty:
            if time.monotonic() - last_s > _SILENCE_S:
                director.silent(_SILENCE_S)
        else:
            last_s = time.monotonic()
            if isinstance(news, int):
                director.exited(number, news)
            else:
                director.receive(number, decode(news), last_s - began_s)
        progress.refresh()


def _conclude(args: argparse.Namespace, director: Director) -> None:
    display.save(director, args.output)
    first, last = director.validation_losses()
    sent = sum(peer.tx_bytes for peer in director.peers)
    otherwise = sum(peer.data_parallel_bytes for peer in director.peers)
    print(*map(shown, display.closing_table(director)), sep="\n")
    print(f"Validation loss {first:.3f} -> {last:.3f} nats per byte.")
    digest = next(peer.digest for peer in director.peers if peer.digest)
    print(f"All survivors hold the same bits: {digest}")
    print(f"All peers together sent {scaled(sent)}B of parameters and shared state.")
    print(
        f"Data-parallel training would have sent {scaled(otherwise)}B: "
        "a ring all-reduce in each inner step,\n"
        f"2 (n-1)/n x {scaled(director.reduce_bytes)}B for each of n peers."
    )
    print(f"Chart: {args.output}")
