"""Measures how long a run stands still when a peer dies, freezes or joins, or the master dies.

The peers reduce all the time, each in a process of its own over loopback; the master is another
process, with a journal. Times are until the last survivor has completed a collective that began
after the event; those of a freeze do not include the heartbeat timeout. POSIX only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from statistics import median

import numpy as np

import pccl
from pccl.cli.arguments import option, size, whole_number
from pccl.cli.bench.options import PEERS_MAX
from pccl.cli.processes import Process, follow_parent
from pccl.cli.terminal import complain

EVENTS = ("kill", "freeze", "join", "master")
PATIENCE_S = 60.0
BEGAN, ENDED, WORLD, CONNECTED_S, FIRST_S, FIELDS = range(6)


def _peer(address: str, nbytes: int, board: SynchronizedArray[float], stop: int) -> None:
    """The life of a peer: reduces, admits newcomers, and notes when its last collective was."""
    follow_parent()
    x = np.ones(nbytes // 4, np.float32)
    began = time.monotonic()
    comm = pccl.Communicator(address)
    comm.connect(n_attempts=50)
    board[CONNECTED_S] = time.monotonic() - began
    began = time.monotonic()
    with closing(comm):
        while not board[stop]:
            started = time.monotonic()
            try:
                info = comm.all_reduce(x, op="max")
            except pccl.PeerLostError:
                continue
            except pccl.TooFewPeersError:
                info = pccl.ReduceInfo(1, 0, 0)
            board[BEGAN], board[ENDED], board[WORLD] = started, time.monotonic(), info.world_size
            board[FIRST_S] = board[FIRST_S] or board[ENDED] - began
            if comm.are_peers_pending():
                comm.update_topology()


class _Peer:
    """A peer's process, seen from here."""

    def __init__(self, run: _Run) -> None:
        self.board = run.context.Array("d", FIELDS + 1, lock=False)
        job = (run.address, run.nbytes, self.board, FIELDS)
        self.process = run.context.Process(target=_peer, args=job, daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class _Run:
    """A master, and the peers that live."""

    def __init__(self, size: int, nbytes: int, directory: Path) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.nbytes = nbytes
        self.journal = directory / "journal"
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.start_master()
        self.peers = [_Peer(self) for _ in range(size)]

    def start_master(self) -> None:
        options = ["--listen-address", self.address, "--state", str(self.journal)]
        command = [sys.executable, "-P", "-m", "pccl.master", *options]
        self.master = Process(command, os.environ)

    def reduced_since(self, moment: float, size: int) -> Callable[[], bool]:
        """A condition: all have completed a collective of `size` peers that began after that
        moment."""
        return lambda: all(
            p.board[WORLD] == size and p.board[ENDED] > moment and p.board[BEGAN] > moment
            for p in self.peers
        )

    def last_end(self) -> float:
        return float(max(p.board[ENDED] for p in self.peers))

    def settle(self) -> None:
        """Waits until all reduce together, then for a random time, so the event comes anywhere."""
        _wait_until(self.reduced_since(time.monotonic(), len(self.peers)), "all reduce together")
        time.sleep(random.uniform(0.0, 0.2))

    def close(self) -> None:
        for p in self.peers:
            p.process.kill()
            p.process.join()
        self.master.close()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"waited {PATIENCE_S:g} s until {what}")
        time.sleep(0.001)


def _lose(run: _Run, number: int, known_s: float) -> Iterator[float]:
    """A peer gets a signal, and another one takes its place afterwards."""
    victim = run.peers.pop(random.randrange(len(run.peers)))
    moment = time.monotonic()
    victim.signal(number)
    _wait_until(run.reduced_since(moment, len(run.peers)), "the survivors reduce again")
    yield run.last_end() - moment - known_s
    victim.process.kill()
    run.peers.append(_Peer(run))


def _join(run: _Run) -> Iterator[float]:
    """A newcomer's connect(), which needs all others to vote; then its first collective."""
    newcomer = _Peer(run)
    run.peers.append(newcomer)
    _wait_until(lambda: newcomer.board[FIRST_S] > 0, "the newcomer reduces")
    yield newcomer.board[CONNECTED_S]
    yield newcomer.board[FIRST_S]
    run.peers.remove(newcomer)
    newcomer.board[FIELDS] = 1
    newcomer.process.join()


def _restart(run: _Run) -> Iterator[float]:
    """The master is killed, and started again a little later."""
    run.master.close()
    time.sleep(random.uniform(0.0, 2.0))
    moment = time.monotonic()
    run.start_master()
    _wait_until(run.reduced_since(moment, len(run.peers)), "the peers reduce again")
    yield run.last_end() - moment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "-n --iters",
        "N",
        whole_number(1),
        "how often each event comes; the table shows medians",
        15,
    )
    option(parser, "--peers", "N", whole_number(3, PEERS_MAX), "processes", 3)
    option(parser, "--bytes", "SIZE", size, "bytes that the peers reduce", "4M")
    option(parser, "--heartbeat-ms", "MS", whole_number(100), "heartbeat timeout", 2000)
    parser.add_argument(
        "--only", nargs="+", choices=EVENTS, default=EVENTS, help="leave out the other events"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 1 if a run did not recover, 2 if it cannot start."""
    if os.name != "posix":
        complain("bench", "recovery needs POSIX: it sends SIGSTOP")
        return 2
    os.environ.setdefault("PCCL_LOG_LEVEL", "ERR")
    os.environ["PCCL_HEARTBEAT_TIMEOUT_MS"] = str(args.heartbeat_ms)
    os.environ["PCCL_HEARTBEAT_MS"] = str(args.heartbeat_ms // 4)
    events: dict[str, tuple[tuple[str, ...], Callable[[_Run], Iterator[float]]]] = {
        "kill": (("kill -9 of a peer",), lambda run: _lose(run, signal.SIGKILL, 0.0)),
        "freeze": (
            (f"SIGSTOP of a peer, less {args.heartbeat_ms} ms",),
            lambda run: _lose(run, signal.SIGSTOP, args.heartbeat_ms / 1e3),
        ),
        "join": (("a newcomer's connect()", "and its first collective"), _join),
        "master": (("kill -9 of the master, from its start on",), _restart),
    }
    print(f"# {args.peers} peers, {args.bytes} bytes; ms, median (min, max) of {args.iters}")
    with tempfile.TemporaryDirectory(prefix="pccl-bench-") as directory:
        run = _Run(args.peers, args.bytes, Path(directory))
        try:
            for name in args.only:
                titles, event = events[name]
                rows = []
                for _ in range(args.iters):
                    run.settle()
                    rows.append(list(event(run)))
                for title, times in zip(titles, zip(*rows, strict=True), strict=True):
                    ms = [1e3 * t for t in times]
                    print(
                        f"{title:44} {median(ms):7.1f} ({min(ms):.1f}, {max(ms):.1f})", flush=True
                    )
        finally:
            run.close()
    return 0
