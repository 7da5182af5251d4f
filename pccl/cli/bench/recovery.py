"""Measures how long a run stands still when a peer dies, freezes or joins, or the master dies.

The peers reduce all the time, each in its own process, over loopback; the master is another
process, with a journal. Times end when the last survivor has completed a collective that began
after the event. Times of a freeze exclude the heartbeat timeout. POSIX only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

import pccl
from pccl.cli.arguments import option, size, whole_number
from pccl.cli.bench.options import PEERS_MAX
from pccl.cli.processes import follow_parent, free_address, start_master
from pccl.cli.terminal import Refused

PATIENCE_S = 60.0
BEGAN, ENDED, WORLD, CONNECTED_S, FIRST_S, STOP, FIELDS = range(7)  # the fields of a peer's board


class Peer(NamedTuple):
    board: SynchronizedArray[float]  # its notes, and whether it must stop
    process: SpawnProcess


def _live(address: str, nbytes: int, board: SynchronizedArray[float]) -> None:
    """The life of a peer: reduces, admits newcomers, records the time of its last collective."""
    follow_parent()
    x = np.ones(nbytes // 4, np.float32)
    began = time.monotonic()
    comm = pccl.Communicator(address)
    comm.connect(n_attempts=50)
    board[CONNECTED_S] = time.monotonic() - began
    began = time.monotonic()
    with closing(comm):
        while not board[STOP]:
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


class Run:
    """A master, and the peers that live."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.peers: list[Peer] = []
        self._address, self._nbytes = free_address(), args.bytes
        self._heartbeat_s = args.heartbeat_ms / 1e3
        self._journal = str(directory / "journal")
        self._start_master()
        for _ in range(args.peers):
            self._start()

    def kill(self) -> Iterator[float]:
        return self._lose(signal.SIGKILL, 0.0)

    def freeze(self) -> Iterator[float]:
        return self._lose(signal.SIGSTOP, self._heartbeat_s)

    def join(self) -> Iterator[float]:
        """A newcomer's connect(), which needs a vote of all others; then its first collective."""
        newcomer = self._start()
        _wait_until(lambda: newcomer.board[FIRST_S] > 0, "the newcomer reduces")
        yield newcomer.board[CONNECTED_S]
        yield newcomer.board[FIRST_S]
        self.peers.remove(newcomer)
        newcomer.board[STOP] = 1
        newcomer.process.join()

    def restart_master(self) -> Iterator[float]:
        """The master is killed, and started again a little later."""
        self._master.close()
        time.sleep(random.uniform(0.0, 2.0))
        began_s = time.monotonic()
        self._start_master()
        yield self._recovered_s(began_s, "the peers reduce again") - began_s

    def settle(self) -> None:
        """Waits until all reduce together, then for a random time before the event."""
        self._recovered_s(time.monotonic(), "all reduce together")
        time.sleep(random.uniform(0.0, 0.2))

    def close(self) -> None:
        for peer in self.peers:
            peer.process.kill()
            peer.process.join()
        self._master.close()

    def _start_master(self) -> None:
        self._master = start_master(self._address, "--state", self._journal)

    def _start(self) -> Peer:
        context = get_context("spawn")
        board = context.Array("d", FIELDS, lock=False)
        job = (self._address, self._nbytes, board)
        peer = Peer(board, context.Process(target=_live, args=job, daemon=True))
        peer.process.start()
        self.peers.append(peer)
        return peer

    def _lose(self, number: int, known_s: float) -> Iterator[float]:
        """A peer gets a signal, and another one takes its place afterwards."""
        victim = self.peers.pop(random.randrange(len(self.peers)))
        assert victim.process.pid is not None
        began_s = time.monotonic()
        os.kill(victim.process.pid, number)
        yield self._recovered_s(began_s, "the survivors reduce again") - began_s - known_s
        victim.process.kill()
        self._start()

    def _recovered_s(self, since_s: float, what: str) -> float:
        """Waits until each peer has completed a collective that began after `since_s`. Returns the
        end of the last one."""

        def recovered() -> bool:
            size = len(self.peers)
            return all(
                board[WORLD] == size and board[ENDED] > since_s and board[BEGAN] > since_s
                for board, _ in self.peers
            )

        _wait_until(recovered, what)
        return max(board[ENDED] for board, _ in self.peers)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"waited {PATIENCE_S:g} s until {what}")
        time.sleep(0.001)


EVENTS: dict[str, tuple[tuple[str, ...], Callable[[Run], Iterator[float]]]] = {
    "kill": (("kill -9 of a peer",), Run.kill),
    "freeze": (("SIGSTOP of a peer, less {} ms",), Run.freeze),
    "join": (("a newcomer's connect()", "and its first collective"), Run.join),
    "master": (("kill -9 of the master, from its start on",), Run.restart_master),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "how often each event comes; the table shows medians"
    option(parser, "-n --iters N", text, 15, whole_number(1))
    option(parser, "--peers N", "processes", 3, whole_number(3, PEERS_MAX))
    option(parser, "--bytes SIZE", "bytes that the peers reduce", "4M", size)
    option(parser, "--heartbeat-ms MS", "heartbeat timeout", 2000, whole_number(100))
    option(parser, "--only", "leave out the other events", choices=EVENTS, nargs="+")


def run(args: argparse.Namespace) -> int:
    if os.name != "posix":
        raise Refused("recovery needs POSIX: it sends SIGSTOP")
    os.environ.setdefault("PCCL_LOG_LEVEL", "ERR")
    os.environ["PCCL_HEARTBEAT_TIMEOUT_MS"] = str(args.heartbeat_ms)
    os.environ["PCCL_HEARTBEAT_MS"] = str(args.heartbeat_ms // 4)
    print(f"# {args.peers} peers, {args.bytes} bytes; ms, median (min, max) of {args.iters}")
    with (
        tempfile.TemporaryDirectory(prefix="pccl-bench-") as directory,
        closing(Run(args, Path(directory))) as run,
    ):
        for titles, event in (EVENTS[name] for name in args.only or EVENTS):
            rows = []
            for _ in range(args.iters):
                run.settle()
                rows.append(list(event(run)))
            for title, times in zip(titles, zip(*rows, strict=True), strict=True):
                ms = [1e3 * t for t in times]
                spread = f"{median(ms):7.1f} ({min(ms):.1f}, {max(ms):.1f})"
                print(f"{title.format(args.heartbeat_ms):44} {spread}", flush=True)
    return 0
