"""A process of a run: a peer that takes step after step with the others, or a master.

The peers agree on everything by their shared state: the number of the step, hence which collective
comes next, and by a flag in a small all-reduce that it is time to end. So a peer may be lost at any
moment, and the others go on.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from faults import Fault, seen

import pccl
import pccl.master

T = TypeVar("T")
FINISH = 0  # signs are bytes of memory that is shared with the driver
LEAVE = 8  # plus the slot
ATTEMPTS = 12  # a second apart: a master without a fault is back by then
LARGE = 60_000  # elements: too large for the master to reduce
STATE = 50_000


class Reports:
    """One line of JSON each, into a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def say(self, **report: object) -> None:
        os.write(self._pipe, json.dumps(report).encode() + b"\n")


def _same(array: np.ndarray) -> int:
    assert (array == array.flat[0]).all(), "elements differ"
    return int(array.flat[0])


def small(comm: pccl.Communicator, mine: float, ending: bool) -> tuple[int, bool]:
    x = np.array([mine, float(ending)])
    comm.all_reduce(x, op="sum")
    return int(x[0]), x[1] > 0


def large(comm: pccl.Communicator, mine: float, ending: bool) -> tuple[int, bool]:
    x = np.full(LARGE, mine, np.float32)
    try:
        comm.all_reduce(x, op="sum", tag=1)
    except pccl.PCCLError:
        assert (x == mine).all(), "it was not restored"
        raise
    return _same(x), False


def quantized(comm: pccl.Communicator, mine: float, ending: bool) -> tuple[int, bool]:
    x = np.full(LARGE, mine, np.float32)
    y = np.zeros_like(x)
    handle = comm.all_reduce_async(x, y, op="max", tag=2)
    handle.wait()
    if handle.error is not None:
        raise handle.error
    return _same(y), False


def gathered(comm: pccl.Communicator, mine: float, ending: bool) -> tuple[int, bool]:
    rows = comm.all_gather(np.full(LARGE // 8, mine, np.float32))
    return sum(_same(row) for row in rows), False


STEPS: list[Callable[[pccl.Communicator, float, bool], tuple[int, bool]]] = [
    small,
    large,
    quantized,
    gathered,
]


class Peer:
    """A peer of a run, in its own process."""

    def __init__(self, address: str, slot: int, signs: mmap.mmap, reports: Reports) -> None:
        self._address = address
        self._slot = slot
        self._signs = signs
        self._say = reports.say
        self._longest = (0.0, "")

    def live(self) -> None:
        comm = pccl.Communicator(self._address)
        try:
            self._timed("connect", lambda: comm.connect(ATTEMPTS))
            self._say(joined=self._slot)
            self._train(comm)
        finally:
            self._timed("close", comm.close)
            self._say(longest=self._longest)

    def _timed(self, what: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        finally:
            self._longest = max(self._longest, (time.monotonic() - began, what))

    def _train(self, comm: pccl.Communicator) -> None:
        step = np.zeros(1, np.int64)
        state = np.zeros(STATE, np.float32)
        shared = self._begin(step, state)
        shared = self._sync(comm, shared, step, state)
        while not self._signs[LEAVE + self._slot]:
            moved, ended = self._cycle(comm, step)
            if ended:
                return
            state += moved
            pending = self._timed("are_peers_pending", comm.are_peers_pending)
            if pending:
                self._timed("update_topology", comm.update_topology)
            if pending or moved:  # who was pending may be lost by now: nobody has joined then
                shared.push_revision()
                shared = self._sync(comm, shared, step, state)

    def _begin(self, step: np.ndarray, state: np.ndarray) -> pccl.SharedState:
        """The content with which a run begins."""
        step[:], state[:] = 0, self._slot
        return pccl.SharedState.from_tensors({"step": step, "state": state})

    def _sync(
        self, comm: pccl.Communicator, shared: pccl.SharedState, step: np.ndarray, state: np.ndarray
    ) -> pccl.SharedState:
        """Synchronizes. Returns the shared state, which is a new one if the run begins anew."""
        while True:
            try:
                self._timed("sync_shared_state", partial(comm.sync_shared_state, shared))
                return shared
            except pccl.PCCLError as error:
                if shared.torn and error.result is pccl.Result.NO_SHARED_STATE_AVAILABLE:
                    shared = self._begin(step, state)  # the one holder is gone, and all was lost
                elif error.result is not pccl.Result.RANK_CONNECTION_LOST:
                    raise  # else: who holds the state could not send it

    def _cycle(self, comm: pccl.Communicator, step: np.ndarray) -> tuple[bool, bool]:
        """Takes each kind of step once, or until it is alone: whether one was, and the last one."""
        for index in range(len(STEPS)):
            try:
                if self._once(comm, int(step[0])):
                    return True, True
            except pccl.TooFewPeersError:
                return index > 0, bool(self._signs[FINISH])
            step += 1
        return True, False

    def _once(self, comm: pccl.Communicator, step: int) -> bool:
        """One collective, until it commits."""
        collective = STEPS[step % len(STEPS)]
        while True:
            call = partial(collective, comm, 2.0**self._slot, bool(self._signs[FINISH]))
            try:
                value, ended = self._timed(collective.__name__, call)
            except pccl.PCCLError as error:  # a peer was lost, or could not go on
                if error.result is not pccl.Result.RANK_CONNECTION_LOST:
                    raise
                continue
            self._say(step=step, what=collective.__name__, value=value, world=comm.world_size)
            return ended


def begin(
    role: str, address: str, signs: mmap.mmap, pipe: int, directory: str, fault: Fault
) -> int:
    """The life of a process that was just forked; its exit status."""
    log = os.open(
        os.path.join(directory, f"{role}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    reports = Reports(pipe)
    armed = role == fault.at
    status = 0
    try:
        if armed:
            fault.arm()
        if role == "master":
            os.dup2(pipe, 1)
            journal = os.path.join(directory, "journal")
            status = pccl.master.main(["--listen-address", address, "--state", journal])
        else:
            slot = 3 if role == "newcomer" else int(role.removeprefix("peer"))
            Peer(address, slot, signs, reports).live()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        reports.say(error=type(error).__name__, text=str(error))
        status = 1
    if armed:
        reports.say(seen=seen())
    sys.stdout.flush()
    return status
