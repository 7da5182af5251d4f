"""A training run whose peers and master are killed, frozen and replaced at random moments.

    python stress/churn.py [--seconds 60] [--peers 4] [--elements 200000] [--seed N] [--calm 0.5]
                           [--curve-dir DIR] [--mischief] [--tcp] [--diary DIR]

Every peer is a process that synchronises its state, reduces with the others and takes a step, as
DiLoCo does; what comes out is known, so each checks every element. Every state is compared among
the peers by its digest. The exit code is 1 if two states of one revision differ, a result is wrong,
a peer ends with an error that it cannot have deserved, or nothing moves for --patience seconds.
With --mischief connections are reset, and the peers' programs fork and run programs (mischief.py);
then peer 0 stays from beginning to end, and must not grow. With --diary all write down what they
do, and the master its event log, for checker.py; `python -m stress` does both. Runs on Linux, macOS
and Windows (which cannot freeze a process).

The processes share no lock, which one that is killed might hold: each has a pipe of its own for its
reports, and a file tells them to stop.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import diary
import mischief
import numpy as np

import pccl
from pccl.runtime.signals import ended_by, interrupt

SETTLE_S = 3.0  # a peer whose link is reset knows it in less
WARM_S = 15.0  # a process starts, imports and joins in less
STACKS_S = 1.0  # for all to print where they stand
EVENT_LOG = "master.jsonl"
GROWTH_MAX = 20, 4, 48  # descriptors, threads, MiB: more is a leak
REPEATS = 1, 700  # of a contribution: by way of the master, and around the ring
Report = tuple[str, int, str]  # what, revision, details


def gradient_of(revision: int, size: int) -> np.ndarray:
    """What all peers contribute at a revision."""
    return np.random.default_rng(revision).integers(-9, 9, size).astype(np.float32)


def step(comm: pccl.Communicator, revision: int, weights: np.ndarray) -> bool:
    """One step; all peers of a revision contribute the same numbers. False: a peer was lost."""
    gradient = gradient_of(revision, weights.size)
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


class Notes:
    """A peer's diary, if it keeps one; and the calls that are judged by all diaries together."""

    def __init__(self, number: int, directory: Path | None) -> None:
        self._number = number
        self._diary = None if directory is None else diary.Diary(diary.path_of(directory, number))

    def write(self, entry: diary.Entry) -> None:
        if self._diary is not None:
            self._diary.write(entry)

    def sync(self, comm: pccl.Communicator, shared: pccl.SharedState, weights: np.ndarray) -> str:
        """Synchronises; the digest of what it has then."""
        self.write(diary.Begin(diary.now(), "sync", shared.revision))
        comm.sync_shared_state(shared)
        digest = diary.digest_of(weights)
        self.write(diary.End(diary.now(), "done", shared.revision, digest))
        return digest

    def reduce(self, comm: pccl.Communicator, revision: int, attempt: int) -> bool:
        """Sums one contribution of each peer; False: a peer was lost."""
        if self._diary is None:
            return True
        gives, repeats = diary.contribution(self._number), REPEATS[revision % len(REPEATS)]
        data = diary.buffer_of(gives, repeats)
        self.write(diary.Begin(diary.now(), "reduce", revision, attempt, repeats, gives))
        outcome, world = "done", 0
        try:
            world = comm.all_reduce(data, op="sum", tag=3).local_world_size
        except pccl.TooFewPeersError:
            outcome = "alone"
        except pccl.PeerLostError:
            outcome = "lost"
        words = tuple(map(int, data[: diary.WORDS]))
        digest = diary.digest_of(data)
        self.write(diary.End(diary.now(), outcome, revision, digest, words, world))
        return outcome != "lost"

    def size(self, held: str) -> None:
        if held:
            self.write(diary.Size(diary.now(), *map(int, held.split())))


class Program:
    """The program of a peer: joins, and joins again where that is its right."""

    def __init__(
        self,
        address: str,
        elements: int,
        reports: Connection,
        orders: Connection | None,
        notes: Notes,
    ) -> None:
        self._address = address
        self._notes = notes
        self._reports = reports
        self._speaking = threading.Lock()
        self._weights = np.zeros(elements, np.float32)
        self._shared = pccl.SharedState.from_tensors({"weights": self._weights})
        self._lost = 0
        self._mischief: mischief.Mischief | None = None
        if orders is not None:
            port = int(address.rpartition(":")[2])
            self._mischief = mischief.Mischief(orders, port, lambda why: self._say("failed", why))

    def _say(self, what: str, text: str = "", revision: int = 0) -> None:
        report: Report = (what, revision, text)
        with self._speaking:
            self._reports.send(report)

    def live(self, stop: Path) -> None:
        """Until it is told to stop, or is dropped."""
        try:
            while self._belong(stop):
                self._say("rejoined")
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self._notes.write(diary.Out(diary.now(), "failed", why))
            self._say("failed", why)
            raise
        finally:
            self._say("ended", revision=self._lost)

    def _belong(self, stop: Path) -> bool:
        """One membership; whether another one should follow."""
        comm = pccl.Communicator(self._address)
        try:
            if self._mischief is not None:
                self._mischief.joined(comm)
            comm.connect(n_attempts=30)
            self._notes.write(diary.Joined(diary.now()))
            self._train(comm, stop)
            self._notes.write(diary.Out(diary.now(), "left"))
        except (pccl.KickedError, pccl.MasterLostError) as error:
            if self._mischief is not None and self._mischief.cut_off:
                self._notes.write(diary.Out(diary.now(), "cut off", str(error)))
                return not stop.exists()
            self._notes.write(diary.Out(diary.now(), "dropped", str(error)))
            self._say("dropped", str(error))
        finally:
            comm.close()
        return False

    def _train(self, comm: pccl.Communicator, stop: Path) -> None:
        while not stop.exists():
            digest = self._notes.sync(comm, self._shared, self._weights)
            revision = self._shared.revision
            self._say("state", digest, revision)
            if revision % 50 == 0:
                held = resources()
                self._notes.size(held)
                self._say("size", held)
            before = self._lost
            while not (
                self._notes.reduce(comm, revision, self._lost - before)
                and step(comm, revision, self._weights)
            ):
                self._lost += 1
            self._shared.push_revision()
            if comm.are_peers_pending():
                comm.update_topology()


def resources() -> str:
    """What this process holds: descriptors, threads, MiB of memory; where /proc tells."""
    if not os.path.isdir("/proc/self/fd"):
        return ""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return f"{len(os.listdir('/proc/self/fd'))} {threading.active_count()} {mib}"


def train(
    address: str,
    elements: int,
    reports: Connection,
    stop: Path,
    orders: Connection | None,
    number: int,
    directory: Path | None,
) -> None:
    """Life of a peer's process."""
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)
    Program(address, elements, reports, orders, Notes(number, directory)).live(stop)


@dataclass
class Peer:
    """A peer's process, seen from here."""

    number: int
    process: BaseProcess
    reports: Connection
    heard_s: float  # when its last report came, or when there is reason to wait anew
    orders: Connection | None = None  # for its mischief
    frozen: bool = False
    moves: bool = False  # it holds the state: without a peer that does, the run would begin anew
    settled_s: float = 0.0  # what it reports earlier may be older than the loss of its link


@dataclass
class Churn:
    """The run, and what was seen of it."""

    args: argparse.Namespace
    address: str
    journal: Path
    stop: Path  # the file that tells all to stop
    peers: dict[int, Peer] = field(default_factory=dict)
    frozen_ever: set[int] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    last_step_s: float = 0.0
    stall_s: float = 0.0
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # of peer 0, see resources()
    restarted_at: int = 0  # steps that were done when the master was killed last

    def __post_init__(self) -> None:
        directory: Path | None = self.args.diary
        self._diary = None if directory is None else diary.Diary(directory / diary.DIRECTOR)

    def write(self, what: str, worker: int = -1) -> None:
        """Writes down what is about to befall a worker, or the master."""
        if self._diary is not None:
            self._diary.write(diary.Fault(diary.now(), what, worker))

    def start_master(self) -> None:
        """Starts it, for the first time or again."""
        command = [sys.executable, "-m", "pccl.master", "--listen-address", self.address]
        command += ["--state", str(self.journal)]
        if self.args.curve_dir:
            command += ["--curve-dir", self.args.curve_dir]
        if self.args.diary is not None:
            command += ["--event-log", str(self.args.diary / EVENT_LOG)]
        self.master = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def join(self) -> None:
        """One more peer."""
        number = self.counts["joined"]
        self.counts["joined"] += 1
        theirs, ours = multiprocessing.Pipe(duplex=False) if self.args.mischief else (None, None)
        reports, told = multiprocessing.Pipe(duplex=False)
        job = (self.address, self.args.elements, told, self.stop, theirs, number, self.args.diary)
        context = multiprocessing.get_context("spawn")
        # a daemon may have no children
        process = context.Process(target=train, args=job, daemon=not self.args.mischief)
        process.start()
        told.close()
        if theirs is not None:
            theirs.close()
        self.peers[number] = Peer(number, process, reports, time.monotonic() + WARM_S, ours)

    def kill(self, peer: Peer) -> None:
        """SIGKILL, or TerminateProcess."""
        self.write("kill", peer.number)
        peer.process.kill()
        peer.process.join()
        del self.peers[peer.number]
        self.hear(peer)

    def act(self, rng: random.Random) -> None:
        """One random event."""
        awake = [peer for peer in self.peers.values() if peer.moves and not peer.frozen]
        mortal = [peer for peer in awake if peer.number or not self.args.mischief]
        frozen = [peer for peer in self.peers.values() if peer.frozen]
        victims: dict[str, list[Peer]] = {}
        if self.args.mischief and awake:
            victims |= dict.fromkeys(mischief.KINDS, awake)
        if len(awake) > 1 and mortal:
            victims |= {"kill": mortal, "freeze": mortal}
        else:
            victims.pop(mischief.RESET_LINK, None)
        if not hasattr(signal, "SIGSTOP"):
            victims.pop("freeze", None)
        if frozen:
            victims["thaw"] = frozen
        events = [*victims, *["kill"] * (2 * ("kill" in victims))]
        events += ["join"] * (len(self.peers) < self.args.peers) * 3
        if len(awake) > 2 and mortal:
            events.append("kill all but one")
        if self.args.peers - len(self.peers) > 1:
            events.append("burst")
        if len(self.digests) > self.restarted_at:  # who restarts it all the time stops the run
            events.append("restart")
        if not events:
            return
        event = rng.choice(events)
        self.counts[event] += 1
        peer = rng.choice(victims[event]) if event in victims else None
        self.say(event if peer is None else f"{event}: {peer.number}")
        if peer is not None:
            self.harm(event, peer)
        elif event == "kill all but one":
            spared = rng.choice(awake)
            for one in mortal:
                if one is not spared:
                    self.kill(one)
        elif event in ("join", "burst"):
            for _ in range(self.args.peers - len(self.peers) if event == "burst" else 1):
                self.join()
        else:
            self._restart_master(rng.uniform(0.0, 1.0))

    def _restart_master(self, pause_s: float) -> None:
        self.restarted_at = len(self.digests)
        self.write("restart")
        self.master.kill()
        self.master.wait()
        time.sleep(pause_s)
        self.start_master()

    def harm(self, event: str, peer: Peer) -> None:
        """What befalls a single peer."""
        if event == "kill":
            self.kill(peer)
        elif event == "freeze":
            peer.frozen = True
            self.frozen_ever.add(peer.number)
            self.write("freeze", peer.number)
            os.kill(peer.process.pid or 0, signal.SIGSTOP)
        elif event == "thaw":
            self.thaw(peer)
        else:
            if event == mischief.RESET_LINK:
                peer.moves, peer.settled_s = False, time.monotonic() + SETTLE_S
            assert peer.orders is not None
            self.write(event, peer.number)
            with suppress(OSError):  # it has died: what it has said last says why
                peer.orders.send(event)

    def say(self, what: str) -> None:
        """One line of the run's story."""
        passed_s = time.monotonic() - self.began_s
        frozen = sum(peer.frozen for peer in self.peers.values())
        print(
            f"{passed_s:6.1f} s  {what:22} {len(self.digests):6} steps, {len(self.peers)} peers, "
            f"{frozen} of them frozen",
            flush=True,
        )

    def thaw(self, peer: Peer) -> None:
        """Lets a frozen peer go on; it has been dropped meanwhile, or not."""
        peer.frozen = False
        peer.heard_s = time.monotonic()
        os.kill(peer.process.pid or 0, signal.SIGCONT)
        self.write("thaw", peer.number)

    def read(self) -> None:
        """Takes in what the peers have reported."""
        for peer in list(self.peers.values()):
            self.hear(peer)

    def hear(self, peer: Peer) -> None:
        """Takes in what one peer has reported. A report goes into its pipe whole, or not at all."""
        try:
            while peer.reports.poll():
                self.note(peer, *peer.reports.recv())
        except EOFError:  # its process has ended
            peer.reports.close()
            if self.peers.pop(peer.number, None) is not None:
                self.faults.append(f"the process of peer {peer.number} has died")

    def note(self, peer: Peer, what: str, revision: int, text: str) -> None:
        """Takes in one report."""
        now = time.monotonic()
        peer.heard_s = max(peer.heard_s, now)
        peer.moves |= what == "state" and now >= peer.settled_s
        peer.moves &= what != "rejoined"
        if what == "state":
            if revision not in self.digests:
                if self.last_step_s:
                    self.stall_s = max(self.stall_s, now - self.last_step_s)
                self.last_step_s = now
            if self.digests.setdefault(revision, text) != text:
                self.faults.append(f"peer {peer.number} has another state of revision {revision}")
        elif what == "ended":
            self.counts["retries"] += revision
            self.peers.pop(peer.number, None)
        elif what == "size":
            if peer.number == 0 and text:
                self.sizes.append(tuple(map(int, text.split())))
        elif what == "rejoined":
            self.counts[what] += 1
        else:
            self.counts[what] += 1
            if what == "failed" or peer.number not in self.frozen_ever:
                self.faults.append(f"peer {peer.number} {what}: {text}")

    def check(self) -> None:
        """Notices who has not moved for too long."""
        late = time.monotonic() - self.args.patience
        for peer in self.peers.values():
            if not peer.frozen and peer.heard_s < late:
                self.faults.append(f"peer {peer.number} has not moved for {self.args.patience} s")
        if self.faults and hasattr(faulthandler, "register"):  # where do they stand?
            for peer in self.peers.values():
                os.kill(peer.process.pid or 0, signal.SIGUSR1)
            time.sleep(STACKS_S)

    def close(self) -> None:
        """Ends the run: all leave."""
        self.stop.touch()
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
        if self._diary is not None:
            self._diary.close()

    def grown(self) -> str:
        """Whether peer 0 holds more at the end than in the middle of the run."""
        half, last = len(self.sizes) // 2, len(self.sizes) // 4
        if last == 0:
            return ""
        early, late = (
            [max(column) for column in zip(*sizes, strict=True)]
            for sizes in (self.sizes[last:half], self.sizes[-last:])
        )
        print(f"peer 0 held {early} descriptors, threads and MiB, and {late} at the end")
        grown = [after - before for before, after in zip(early, late, strict=True)]
        much = any(more > limit for more, limit in zip(grown, GROWTH_MAX, strict=True))
        return f"peer 0 has grown from {early} to {late}" if much else ""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--peers", type=int, default=4, help="at most so many at once")
    parser.add_argument("--elements", type=int, default=200_000, help="float32 of the state")
    parser.add_argument("--seed", type=int, default=0, help="of the events and their moments")
    parser.add_argument("--calm", type=float, default=0.5, help="seconds between events, at most")
    parser.add_argument("--patience", type=float, default=40.0, help="seconds for a step")
    parser.add_argument("--mischief", action="store_true", help="resets, forks and programs too")
    parser.add_argument("--tcp", action="store_true", help="no ipc between the peers")
    parser.add_argument("--curve-dir", default="", help="keys made by pccl keys")
    parser.add_argument("--diary", type=Path, metavar="DIR", help="write there what all do")
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Makes a run and tells its story; what was wrong."""
    os.environ.setdefault("PCCL_HEARTBEAT_MS", "500")
    os.environ.setdefault("PCCL_HEARTBEAT_TIMEOUT_MS", "2000")
    os.environ.setdefault("PCCL_LOG_LEVEL", "ERR")
    if args.tcp:
        os.environ["PCCL_TRANSPORT"] = "tcp"
    if args.curve_dir:
        os.environ["PCCL_CURVE_DIR"] = args.curve_dir
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        journal = Path(directory) / "journal"
        churn = Churn(args, address, journal, Path(directory) / "stop")
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
    if why := churn.grown():
        churn.faults.append(why)
    print(f"{len(churn.digests)} steps; longest stand-still {churn.stall_s:.2f} s")
    print(", ".join(f"{count} {what}" for what, count in sorted(churn.counts.items())))
    return churn.faults


def main() -> int:
    faults = run(parser().parse_args())
    for fault in faults:
        print("FAULT:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    with ended_by(interrupt):
        sys.exit(main())
