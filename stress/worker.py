"""A worker of a stress run: a process that `python -m stress` starts.

It joins the run of PCCL_MASTER, and runs one of PROGRAMS until its stdin says "leave" or ends. Any
other line on stdin names a fault that it inflicts on itself (mischief.py). It records its calls in
a diary (diary.py), which checker.py reads.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for all scripts of this directory

import diary
import mischief
import numpy as np

import pccl

REPEATS = 1, 700  # of a contribution: small enough for the master; large enough for the ring
REPEATED = 64  # or as many repeats as the state has times this many elements
TAGS = 4  # collectives of `overlap` that are under way at once
SIZES_EVERY = 50  # revisions
COMPUTE_S = 0.002
FIRST_TAG = 10
MODES: dict[str, dict[str, Any]] = {  # of DiLoCo
    "sync": {"inner_steps": 2},
    "delayed": {"inner_steps": 2},
    "streaming": {"inner_steps": 4, "fragments": 2, "overlap": 1, "alpha": 0.5},
}


def gradient_of(revision: int, size: int) -> np.ndarray:
    """The contribution of each peer at a revision."""
    return np.random.default_rng(revision).integers(-9, 9, size).astype(np.float32)


class Membership:
    """The arguments of a program: a communicator, its worker's diary, and settings."""

    def __init__(
        self,
        comm: pccl.Communicator,  # is connected
        notes: diary.Diary,  # its worker's
        number: int,  # of its worker
        elements: int,  # of the state
        optimize: bool,  # whether all measure links after each admission
        ending: threading.Event,  # set when it should leave
    ) -> None:
        self.comm = comm
        self.notes = notes
        self.number = number
        self.elements = elements
        self.ending = ending
        self._optimize = optimize

    def admit(self) -> None:
        """Admits newcomers."""
        if self.comm.are_peers_pending():
            self.comm.update_topology()
            self.optimize()

    def optimize(self) -> None:
        """Measures links, as do all members, including newcomers, after an admission."""
        world = self.comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)
        if not self._optimize or world < 2:
            return
        self.notes.write(diary.Begin(diary.now(), "optimize", 0))
        outcome = "done"
        try:
            self.comm.optimize_topology()
        except pccl.PCCLError as error:
            if error.result not in (
                pccl.Result.TOPOLOGY_OPTIMIZATION_FAILED,
                pccl.Result.INVALID_USAGE,  # alone now
            ):
                raise
            outcome = "lost"
        self.notes.write(diary.End(diary.now(), outcome, 0, what="optimize"))


class Loop:
    """Synchronizes, reduces, takes a step: like DiLoCo, without overlap."""

    def __init__(self, membership: Membership) -> None:
        self._member = membership
        self._weights = np.zeros(membership.elements, np.float32)
        self._shared = pccl.SharedState.from_tensors({"weights": self._weights})

    def run(self) -> None:
        member = self._member
        member.optimize()
        while not member.ending.is_set():
            self._sync()
            revision = self._shared.revision
            if revision % SIZES_EVERY == 0:
                member.notes.size()
            attempt = 0
            while not (self._count(revision, attempt) and self._step(revision)):
                attempt += 1
            self._shared.push_revision()
            member.admit()

    def _sync(self) -> None:
        notes, shared = self._member.notes, self._shared
        notes.write(diary.Begin(diary.now(), "sync", shared.revision))
        self._member.comm.sync_shared_state(shared)
        digest = diary.digest_of(self._weights)
        notes.write(diary.End(diary.now(), "done", shared.revision, digest))

    def _count(self, revision: int, attempt: int) -> bool:
        """Sums one contribution of each peer; False: a peer was lost."""
        sums = Sums(self._member, revision, [3])
        sums.launch(attempt, self._member.comm.all_reduce)
        return not sums.lost

    def _step(self, revision: int) -> bool:
        """Takes a step, to which all peers contribute the same numbers. False: a peer was lost."""
        weights = self._weights
        gradient = gradient_of(revision, weights.size)
        parts = {
            "first": gradient[: weights.size // 3].copy(),
            "rest": gradient[weights.size // 3 :],
        }
        expected = gradient.copy()
        try:
            self._member.comm.all_reduce(parts, op="avg", tag=revision % 3)
        except pccl.TooFewPeersError:
            pass
        except pccl.PeerLostError:
            assert (np.concatenate(list(parts.values())) == expected).all(), "it was not restored"
            return False
        assert (np.concatenate(list(parts.values())) == expected).all(), "the mean is wrong"
        weights += expected
        return True


class Sums:
    """Sums of one contribution of each peer in one step, one or several at once."""

    def __init__(self, member: Membership, revision: int, tags: list[int]) -> None:
        self.lost = tags  # the tags of those that failed because a peer was lost
        self._member = member
        self._revision = revision
        self._open: dict[int, tuple[np.ndarray, Any]] = {}

    def launch(self, attempt: int, reduce: Callable[..., Any]) -> None:
        """Relaunches the failed ones; a blocking call also ends them."""
        member = self._member
        gives = diary.contribution(member.number)
        tags, self.lost = self.lost, []
        for tag in tags:
            sizes = *REPEATS, max(REPEATS[1], member.elements // REPEATED)
            repeats = sizes[(self._revision + tag) % len(sizes)]
            data = diary.buffer_of(gives, repeats)
            member.notes.write(
                diary.Begin(diary.now(), "reduce", self._revision, attempt, repeats, gives, tag)
            )
            try:
                made = reduce(data, op="sum", tag=tag)
            except pccl.TooFewPeersError:
                self._end(tag, "alone", data)
            except pccl.PeerLostError:
                self._end(tag, "lost", data)
            else:
                if isinstance(made, pccl.AsyncReduceHandle):
                    self._open[tag] = data, made
                else:
                    self._end(tag, "done", data, made.local_world_size)

    def wait(self, order: random.Random) -> None:
        """Waits for all that are in progress, in any order."""
        tags = sorted(self._open)
        order.shuffle(tags)
        for tag in tags:
            data, handle = self._open.pop(tag)
            well, _, info = handle.wait()
            error = handle.error
            if isinstance(error, pccl.TooFewPeersError):
                self._end(tag, "alone", data)
            elif isinstance(error, pccl.PeerLostError):
                self._end(tag, "lost", data)
            elif error is not None:
                raise error
            else:
                assert well
                self._end(tag, "done", data, info.local_world_size)

    def _end(self, tag: int, outcome: str, data: np.ndarray, world: int = 0) -> None:
        if outcome == "lost":
            self.lost.append(tag)
        words = diary.words_of(data)
        digest = diary.digest_of(data)
        entry = diary.End(diary.now(), outcome, self._revision, digest, words, world, tag, "reduce")
        self._member.notes.write(entry)


class Overlap(Loop):
    """Several collectives at once, which each peer awaits in a different order."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._order = random.Random(membership.number)

    def _count(self, revision: int, attempt: int) -> bool:
        """Sums several contributions of each peer at once; `attempt` counts steps that failed."""
        comm = self._member.comm
        sums = Sums(self._member, revision, [FIRST_TAG + 10 * attempt + i for i in range(TAGS)])
        again = 0
        while sums.lost:
            self._order.shuffle(sums.lost)
            sums.launch(again, comm.all_reduce_async)
            end_s = time.monotonic() + COMPUTE_S
            while time.monotonic() < end_s:
                np.sort(self._weights[:1000])
            sums.wait(self._order)
            again += 1
        return True


class Training(ABC):
    """Trains a model; each peer has its own data."""

    def __init__(self, membership: Membership) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._member, self._torch = membership, torch
        self._width = max(2, int(membership.elements**0.5 / 2))
        self._draw = np.random.default_rng(membership.number)
        membership.notes.write(diary.Begin(diary.now(), "join", 0))
        self._join()
        membership.notes.write(diary.End(diary.now(), "done", 0, what="join"))

    def run(self) -> None:
        member, shape = self._member, (4, self._width)
        while not member.ending.is_set():
            given = self._torch.from_numpy(self._draw.standard_normal(shape, np.float32))
            before = self._revision()
            member.notes.write(diary.Begin(diary.now(), "sync", before))
            self._step(given)
            revision = self._revision()
            outcome = "done" if revision != before else "inner"
            digest = self._digest() if revision != before else ""
            member.notes.write(diary.End(diary.now(), outcome, revision, digest))
            if revision != before and revision % SIZES_EVERY == 0:
                member.notes.size()

    @abstractmethod
    def _join(self) -> None:
        """Makes the model and its trainer."""

    @abstractmethod
    def _revision(self) -> int: ...

    @abstractmethod
    def _step(self, given: Any) -> None: ...

    @abstractmethod
    def _digest(self) -> str:
        """The digest of the shared state."""


class DiLoCo(Training):
    """DiLoCo, in any mode."""

    def __init__(self, membership: Membership, mode: str) -> None:
        self._mode = mode
        super().__init__(membership)

    def _join(self) -> None:
        from pccl.diloco import DiLoCo as Trainer

        nn, width = self._torch.nn, self._width
        self._model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        optimizer = self._torch.optim.SGD(self._model.parameters(), 0.01)
        comm, mode = self._member.comm, self._mode
        self._trainer = Trainer(comm, self._model, optimizer, mode=mode, **MODES[mode])

    def _revision(self) -> int:
        return self._trainer.shared_state.revision

    def _step(self, given: Any) -> None:
        self._model(given).square().mean().backward()
        self._trainer.step()

    def _digest(self) -> str:
        return self._trainer.state_digest()


class DataParallel(Training):
    """pccl.torch's DistributedDataParallel."""

    def _join(self) -> None:
        import warnings

        import pccl.torch

        warnings.simplefilter("ignore")  # of find_unused_parameters
        nn, width = self._torch.nn, self._width
        layers = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        self._model = nn.Sequential(*layers)
        self._optimizer = self._torch.optim.SGD(self._model.parameters(), 0.01, momentum=0.9)
        self._replica = pccl.torch.DistributedDataParallel(
            self._model,
            {"optimizer": self._optimizer},
            process_group=pccl.torch.ProcessGroup(self._member.comm),
            bucket_cap_mb=0.02,
        )

    def _revision(self) -> int:
        return self._replica.steps

    def _step(self, given: Any) -> None:
        self._replica(given).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _digest(self) -> str:
        parameters = [p.detach().numpy().ravel() for p in self._model.parameters()]
        return diary.digest_of(np.concatenate(parameters))


Program = Callable[[Membership], Any]
PROGRAMS: dict[str, Program] = {
    "loop": Loop,
    "overlap": Overlap,
    **{f"diloco-{mode}": lambda m, mode=mode: DiLoCo(m, mode) for mode in MODES},
    "ddp": DataParallel,
}
KNOWN = ("loop", "overlap")  # programs whose shared state is known, and that measure links


class Worker:
    """Joins, and rejoins if it was dropped after it had cut its own link."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._notes = diary.Diary(diary.path_of(args.diary, args.number))
        self._ending = threading.Event()
        port = int(os.environ["PCCL_MASTER"].rpartition(":")[2])
        self._mischief = mischief.Mischief(port, self._fail)
        threading.Thread(target=self._follow_commands, daemon=True).start()

    def live(self) -> int:
        """Runs until it is told to leave, or is dropped. Returns the exit code."""
        try:
            while self._belong() and not self._ending.is_set():
                pass
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        return 0

    def _fail(self, why: str) -> None:
        self._notes.write(diary.Out(diary.now(), "failed", why))

    def _follow_commands(self) -> None:
        rest = b""
        while data := os.read(0, 4096):  # not sys.stdin, whose lock could block the exit
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"leave":
                    self._ending.set()
                else:
                    self._mischief.do(line.decode())
        self._ending.set()

    def _belong(self) -> bool:
        """Runs one membership; True if it should rejoin."""
        args = self._args
        comm = pccl.Communicator(os.environ["PCCL_MASTER"], args.group)
        try:
            self._mischief.joined(comm)
            comm.connect(n_attempts=30)
            self._notes.write(diary.Joined(diary.now(), args.group))
            member = Membership(
                comm, self._notes, args.number, args.elements, args.optimize, self._ending
            )
            PROGRAMS[args.program](member).run()
            self._notes.write(diary.Out(diary.now(), "left"))
        except (pccl.KickedError, pccl.MasterLostError) as error:
            how = "cut off" if self._mischief.cut_off else "dropped"
            self._notes.write(diary.Out(diary.now(), how, str(error)))
            return self._mischief.cut_off
        finally:
            comm.close()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=PROGRAMS, default="loop")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--optimize", action="store_true")
    parser.add_argument("--diary", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)
    return Worker(args).live()


if __name__ == "__main__":
    sys.exit(main())
