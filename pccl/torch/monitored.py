"""torch's monitored_barrier: rank 0 hears from each of the others, and says who is missing.

What the errors say begins as gloo's errors do: programs look for these words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from pccl import PCCLError
from pccl.runtime.client.call import Deadline
from pccl.torch.members import Members
from pccl.torch.sends import BARRIER_TAG, Sends
from pccl.torch.work import Task, Work

_LEAST_S = 0.001  # for what has ended by now, or nearly so


class MonitoredBarrier:
    """The barriers of one group, which has made its sends."""

    def __init__(self, members: Members, sends: Sends, run: Callable[[Task, Any], Work]) -> None:
        self._members = members
        self._sends = sends
        self._run = run

    def meet(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Returns when all are here.

        Args:
            timeout: for all of it.
            wait_all_ranks: whether rank 0 waits for all, to name all that are missing.

        Raises:
            RuntimeError: on rank 0, others have not come; on others, rank 0 has not let them pass.
        """
        deadline = Deadline(timeout.total_seconds())
        if self._members.rank == 0:
            self._let_pass(timeout, deadline, wait_all_ranks)
        else:
            self._pass(deadline)

    def _pass(self, deadline: Deadline) -> None:
        try:
            self._say(0, deadline)
            self._hear(0, deadline)()
        except PCCLError as error:
            rank = self._members.rank
            raise RuntimeError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {error}"
            ) from error

    def _let_pass(self, timeout: timedelta, deadline: Deadline, wait_all_ranks: bool) -> None:
        limit = f"{timeout.total_seconds() * 1000:.0f} ms"
        if deadline.left_s == 0:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit}")
        others = range(1, self._members.size)
        listening = {rank: self._hear(rank, deadline) for rank in others}
        missing: dict[int, PCCLError] = {}
        for rank, heard in listening.items():
            try:
                heard()
            except PCCLError as error:
                missing[rank] = error
        if missing:
            named = list(missing) if wait_all_ranks else list(missing)[:1]
            who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
            why = missing[named[0]]
            raise RuntimeError(f"{who} failed to pass monitoredBarrier in {limit}: {why}") from why
        for rank in others:
            self._say(rank, deadline)

    def _say(self, rank: int, deadline: Deadline) -> None:
        self._start(self._sends.send(torch.ones(1), rank, BARRIER_TAG), deadline)()

    def _hear(self, rank: int, deadline: Deadline) -> Callable[[], object]:
        return self._start(self._sends.recv(torch.empty(1), rank, BARRIER_TAG), deadline)

    def _start(self, task: Task, deadline: Deadline) -> Callable[[], object]:
        left = timedelta(seconds=max(_LEAST_S, deadline.left_s or 0.0))
        return self._run(task, SimpleNamespace(timeout=left, asyncOp=False)).wait
