"""A training run whose peers and master are killed, frozen and replaced at random moments.

    python stress/churn.py [--seconds 60] [--peers 4] [--elements 200000] [--seed N] [--calm 0.5]
                           [--curve-dir DIR]

Every peer is a process that synchronises its state, reduces with the others and takes a step, as
DiLoCo does; what comes out is known, so each checks every element. Every state is compared among
the peers by its digest. The exit code is 1 if two states of one revision differ, a result is wrong,
a peer ends with an error that it cannot have deserved, or nothing moves for --patience seconds.
Runs on Linux, macOS and Windows (which cannot freeze a process).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import pccl

WARM_S = 15.0  # a process starts, imports and joins in less
Report = tuple[int, str, int, str]  # process, what, revision, details


def step(comm: pccl.Communicator, revision: int, weights: np.ndarray) -> bool:
    """One step; all peers of a revision contribute the same numbers. False: a peer was lost."""
    gradient = np.random.default_rng(revision).integers(-9, 9, weights.size).astype(np.float32)
    parts = {"first": gradient[: weights.size // 3].copy(), "rest": gradient[weights.size // 3 :]}
    expected = gradient.copy()
    try:
        comm.all_reduce(parts, op="avg", tag=revision % 3)
    except pccl.TooFewPeersError:
        pass
    except pccl.PeerLostError:
        assert (np.concatenate(list(parts.values())) == expected).all(), "it was not restored"
        return False
    assert (np.concatenate(list(parts.values())) == expected).all(), "the mean is wrong"
    weights += expected
    return True


def train(address: str, number: int, elements: int, reports: Any, stop: Any) -> None:
    """Life of a peer."""
    weights = np.zeros(elements, np.float32)
    shared = pccl.SharedState.from_tensors({"weights": weights})
    lost = 0
    comm = pccl.Communicator(address)
    try:
        comm.connect(n_attempts=30)
        while not stop.is_set():
            comm.sync_shared_state(shared)
            digest = xxhash.xxh3_64_hexdigest(weights.data)
            reports.put((number, "state", shared.revision, digest))
            while not step(comm, shared.revision, weights):
                lost += 1
            shared.push_revision()
            if comm.are_peers_pending():
                comm.update_topology()
    except (pccl.KickedError, pccl.MasterLostError) as error:
        reports.put((number, "dropped", 0, str(error)))
    except BaseException as error:
        reports.put((number, "failed", 0, f"{type(error).__name__}: {error}"))
        raise
    finally:
        comm.close()
        reports.put((number, "ended", lost, ""))


@dataclass
class Peer:
    """A peer's process, seen from here."""

    number: int
    process: BaseProcess
    heard_s: float  # when its last report came, or when there is reason to wait anew
    frozen: bool = False
    moves: bool = False  # it has come so far as to report


@dataclass
class Churn:
    """The run, and what was seen of it."""

    args: argparse.Namespace
    address: str
    journal: Path
    reports: Queue[Report]
    stop: Event
    peers: dict[int, Peer] = field(default_factory=dict)
    frozen_ever: set[int] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    last_step_s: float = 0.0
    stall_s: float = 0.0
    restarted_at: int = 0  # steps that were done when the master was killed last

    def start_master(self) -> None:
        """Starts it, for the first time or again."""
        command = [sys.executable, "-m", "pccl.master", "--listen-address", self.address]
        command += ["--state", str(self.journal)]
        if self.args.curve_dir:
            command += ["--curve-dir", self.args.curve_dir]
        self.master = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def join(self) -> None:
        """One more peer."""
        number = self.counts["joined"]
        self.counts["joined"] += 1
        job = (self.address, number, self.args.elements, self.reports, self.stop)
        process = multiprocessing.get_context("spawn").Process(target=train, args=job, daemon=True)
        process.start()
        self.peers[number] = Peer(number, process, time.monotonic() + WARM_S)

    def kill(self, peer: Peer) -> None:
        """SIGKILL, or TerminateProcess."""
        peer.process.kill()
        peer.process.join()
        del self.peers[peer.number]

    def act(self, rng: random.Random) -> None:
        """One random event."""
        awake = [peer for peer in self.peers.values() if peer.moves and not peer.frozen]
        frozen = [peer for peer in self.peers.values() if peer.frozen]
        events = ["join"] * (len(self.peers) < self.args.peers) * 3
        if len(self.digests) > self.restarted_at:  # who restarts it all the time stops the run
            events.append("restart")
        if len(awake) > 1:
            events += ["kill"] * 3 + ["freeze"] * hasattr(signal, "SIGSTOP")
        events += ["thaw"] * bool(frozen)
        if not events:
            return
        event = rng.choice(events)
        self.counts[event] += 1
        self.say(event)
        if event == "join":
            self.join()
        elif event == "kill":
            self.kill(rng.choice(awake))
        elif event == "freeze":
            peer = rng.choice(awake)
            peer.frozen = True
            self.frozen_ever.add(peer.number)
            os.kill(peer.process.pid or 0, signal.SIGSTOP)
        elif event == "thaw":
            self.thaw(rng.choice(frozen))
        else:
            self.restarted_at = len(self.digests)
            self.master.kill()
            self.master.wait()
            time.sleep(rng.uniform(0.0, 1.0))
            self.start_master()

    def say(self, what: str) -> None:
        """One line of the run's story."""
        passed_s = time.monotonic() - self.began_s
        frozen = sum(peer.frozen for peer in self.peers.values())
        print(
            f"{passed_s:6.1f} s  {what:8} {len(self.digests):6} steps, {len(self.peers)} peers, "
            f"{frozen} of them frozen",
            flush=True,
        )

    def thaw(self, peer: Peer) -> None:
        """Lets a frozen peer go on; it has been dropped meanwhile, or not."""
        peer.frozen = False
        peer.heard_s = time.monotonic()
        os.kill(peer.process.pid or 0, signal.SIGCONT)

    def read(self) -> None:
        """Takes in what the peers have reported."""
        while not self.reports.empty():
            number, what, revision, text = self.reports.get()
            now = time.monotonic()
            if number in self.peers:
                self.peers[number].moves = True
                self.peers[number].heard_s = max(self.peers[number].heard_s, now)
            if what == "state":
                if revision not in self.digests:
                    if self.last_step_s:
                        self.stall_s = max(self.stall_s, now - self.last_step_s)
                    self.last_step_s = now
                if self.digests.setdefault(revision, text) != text:
                    self.faults.append(f"peer {number} has another state of revision {revision}")
            elif what == "ended":
                self.counts["retries"] += revision
                self.peers.pop(number, None)
            else:
                self.counts[what] += 1
                if what == "failed" or number not in self.frozen_ever:
                    self.faults.append(f"peer {number} {what}: {text}")

    def check(self) -> None:
        """Notices who has not moved for too long."""
        late = time.monotonic() - self.args.patience
        for peer in self.peers.values():
            if not peer.frozen and peer.heard_s < late:
                self.faults.append(f"peer {peer.number} has not moved for {self.args.patience} s")

    def close(self) -> None:
        """Ends the run: all leave."""
        self.stop.set()
        for peer in list(self.peers.values()):
            if peer.frozen:
                self.kill(peer)
        give_up_at = time.monotonic() + self.args.patience
        while self.peers and time.monotonic() < give_up_at:
            self.read()
            time.sleep(0.01)
        for peer in list(self.peers.values()):
            if not self.faults:
                self.faults.append(f"peer {peer.number} did not leave")
            self.kill(peer)
        self.master.terminate()
        self.master.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--peers", type=int, default=4, help="at most so many at once")
    parser.add_argument("--elements", type=int, default=200_000, help="float32 of the state")
    parser.add_argument("--seed", type=int, default=0, help="of the events and their moments")
    parser.add_argument("--calm", type=float, default=0.5, help="seconds between events, at most")
    parser.add_argument("--patience", type=float, default=40.0, help="seconds for a step")
    parser.add_argument("--curve-dir", default="", help="keys made by pccl keys")
    args = parser.parse_args()
    os.environ.setdefault("PCCL_HEARTBEAT_MS", "500")
    os.environ.setdefault("PCCL_HEARTBEAT_TIMEOUT_MS", "2000")
    os.environ.setdefault("PCCL_LOG_LEVEL", "ERR")
    if args.curve_dir:
        os.environ["PCCL_CURVE_DIR"] = args.curve_dir
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        journal = Path(directory) / "journal"
        churn = Churn(args, address, journal, context.Queue(), context.Event())
        churn.start_master()
        try:
            for _ in range(args.peers):
                churn.join()
            end_s = time.monotonic() + args.seconds
            event_s = time.monotonic()
            while time.monotonic() < end_s and not churn.faults:
                churn.read()
                churn.check()
                if churn.digests and time.monotonic() > event_s:
                    churn.act(rng)
                    event_s = time.monotonic() + rng.uniform(0.0, 2 * args.calm)
                time.sleep(0.005)
        finally:
            churn.close()
    print(f"{len(churn.digests)} steps; longest stand-still {churn.stall_s:.2f} s")
    print(", ".join(f"{count} {what}" for what, count in sorted(churn.counts.items())))
    for fault in churn.faults:
        print("FAULT:", fault)
    return 1 if churn.faults else 0


if __name__ == "__main__":
    sys.exit(main())
