"""The rounds of the whole run: the admission of newcomers, and the optimisation of the rings."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from pccl.calls.membership import Membership
from pccl.errors import PCCLTimeoutError, TooFewPeersError, error_for
from pccl.protocol.rounds import Grace
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline, Note
from pccl.runtime.client.probe import optimise
from pccl.support.logs import REMINDER_S, Reminder
from pccl.types import Result

_log = logging.getLogger("pccl")

T = TypeVar("T")


class Admission:
    """One peer's part in these rounds, by the methods of `Communicator`."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._asked_s = -math.inf  # when `are_peers_pending` was answered by no

    def update_topology(self, deadline: Deadline) -> int:
        """Admits pending peers; the new size of the group, the same for all."""
        client = self._membership.client("update_topology")

        def take_part(call: Call) -> Note:
            client.update_topology(call)
            return deadline.next(client, call)

        size = self._membership.stand("update_topology", client, take_part).value
        self._membership.ranks.tell(client.plan, client.number)
        assert isinstance(size, int)
        return size

    def are_peers_pending(self, deadline: Deadline) -> bool:
        """Whether peers wait to be admitted: the same answer for all."""
        return self.ask(deadline, limits.PENDING_PATIENCE_S if self.asks_again else 0.0)

    @property
    def asks_again(self) -> bool:
        """Whether the program has just been told that no peer is pending: it may be polling."""
        return time.monotonic() - self._asked_s < limits.PENDING_AGAIN_S

    def ask(self, deadline: Deadline, patience_s: float, grace: Grace | None = None) -> bool:
        """Whether peers are pending. A no may come up to `patience_s` later, a yes at once.

        Members that have not come when the `grace` is over are dropped from the run; None: this
        peer waits for all, and is not one of the `enough` that others have.
        """
        client = self._membership.client("are_peers_pending")
        stuck = self._membership.standing.single_threaded() and deadline.left_s is None

        def take_part(call: Call) -> Note:
            client.are_peers_pending(call, stuck, patience_s > 0, grace)
            if patience_s > 0:
                note = deadline.next_within(client, call, patience_s)
                if note is not None:
                    return note
                client.hurry(call)
            return deadline.next(client, call)

        pending = bool(self._membership.stand("are_peers_pending", client, take_part).value)
        self._asked_s = -math.inf if pending else time.monotonic()
        return pending

    def wait_for_peers(self, n: int, timeout: float | None) -> int:
        """Admits newcomers until this group has at least `n` members; returns its size."""
        if n < 1:
            raise ValueError(f"n is {n}: it must be at least 1")
        deadline = Deadline(timeout)
        client = self._membership.client("wait_for_peers")
        size = client.world.local_size
        try:
            while size < n:
                size = self.await_newcomers(deadline, limits.FOREVER_S) or size
        except PCCLTimeoutError as error:
            why = f"{client.world.local_size} of {n} peers are there after {timeout:g} s"
            raise PCCLTimeoutError(error.result, "wait_for_peers", why) from None
        return size

    def admit(
        self,
        synchronise: Callable[[Deadline], object],
        deadline: Deadline,
        patience_s: float = 0.0,
    ) -> bool:
        """Admits newcomers, and synchronises with them; whether there are any.

        A newcomer's `connect` returns while the others are in this call. So its first `admit` does
        not ask for further newcomers, but goes on where the others are: at the synchronisation.
        """
        fresh = self._membership.is_fresh
        if not fresh and self.ask(deadline, patience_s):
            self.update_topology(deadline)
        elif not fresh:
            return False
        self._membership.client("admit")
        if not (fresh and self._membership.synced):
            synchronise(deadline)
        self._membership.has_admitted = True
        return True

    def begin(self, round_: Callable[[], T], wanted: int, timeout: float | None) -> T:
        """Makes a call that begins a run, again and again with newcomers while they are too few.

        All members are told alike that they are too few. So all admit the next newcomers, and make
        the call again together with them.
        """
        deadline = Deadline(timeout)
        client = self._membership.client("sync_shared_state")
        reminder = Reminder(_log)
        say_at_s = time.monotonic() + REMINDER_S
        while True:
            try:
                return round_()
            except TooFewPeersError:
                found = f"{wanted} (or more, for another peer), {client.world.local_size} here"
            try:
                while not self.await_newcomers(
                    deadline, max(0.0, say_at_s - time.monotonic()) or limits.FOREVER_S
                ):
                    if time.monotonic() >= say_at_s:
                        reminder.warn(
                            f"this peer waits for others to begin with: min_peers is {found}"
                        )
            except PCCLTimeoutError as error:
                why = f"the run has not begun after {timeout:g} s: min_peers is {found}"
                raise PCCLTimeoutError(error.result, "sync_shared_state", why) from None

    def await_newcomers(self, deadline: Deadline, patience_s: float) -> int:
        """Waits for newcomers and admits them; the new size of the group, the same for all.

        Returns 0 if none have come within the `patience_s` of any of the peers.
        """
        return self.update_topology(deadline) if self.ask(deadline, patience_s) else 0

    def finish(self, deadline: Deadline) -> None:
        """Ends the run for all; nobody is admitted any more."""
        client = self._membership.client("finish")

        def take_part(call: Call) -> Note:
            client.finish(call)
            return deadline.next(client, call)

        self._membership.stand("finish", client, take_part)

    def optimize_topology(self, deadline: Deadline) -> None:
        """Measures the links between the peers, and chooses the fastest rings for each group."""
        client = self._membership.client("optimize_topology")
        if client.world.global_size < 2:
            why = "this peer is alone in the run: there is no order to optimise"
            raise error_for(Result.INVALID_USAGE, "optimize_topology", why)
        self._membership.stand(
            "optimize_topology", client, lambda call: optimise(client, call, deadline)
        )
        self._membership.ranks.tell(client.plan, client.number)
