"""The numbers and results of a run, and its journal for the next master."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from msgspec import Struct

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Refusal
from pccl.types import Result

OTHER_RUN = Refusal(
    "the master has started another run: connect again", Result.MASTER_CONNECTION_FAILED
)
OUTNUMBERED = Refusal(
    "a master without a journal goes on with the run that most of the returning peers name, and "
    "this is another one: connect again",
    Result.MASTER_CONNECTION_FAILED,
)
GIVEN_UP = Refusal("it was given up as lost, or did not come back in time: connect again")
CROWDED = Refusal("the messages of other returning peers take too much memory already")
FINISHED = Refusal(
    "the run is finished: its peers have said so. For another run, start the master anew, without "
    "the journal of this one",
    Result.INVALID_USAGE,
    m.Cause.FINISHED,
)
WHOLE_RUN = 0  # a key of `Journal.refused`, in place of a peer's number: the run is finished
REFUSED_MAX = 256  # reasons kept, for the peers dropped last


def keep_latest(refused: MutableMapping[int, Any]) -> None:
    """Forgets the oldest reason if there are more than `REFUSED_MAX`, but never `WHOLE_RUN`."""
    if len(refused) > REFUSED_MAX:
        del refused[min(refused.keys() - {WHOLE_RUN})]


class Journal(Struct, frozen=True):
    """The knowledge of a restarted master: its run, how often it was restarted, the accepted peers,
    and why others were dropped.

    It is incomplete if the last writes failed; returning peers know the rest.
    """

    run: int
    incarnation: int
    next_peer: int
    accepted: frozenset[int]
    complete: bool = True
    refused: Mapping[int, Refusal] = {}


NONCE_BYTES = 8
# seqs and epochs begin with the number of the master's incarnation, because a restarted master may
# not know the last seqs and epochs
INCARNATION_SHIFT = 32
EPOCH_SHIFT = 16


class Numbers:
    """The numbers that one master gives, and their nonces.

    Args:
        secret: random bytes that only this master knows and uses; at most 64 bytes.
        incarnation: the number of restarts of the run's master; all numbers begin with it.

    Attributes:
        next_seq: the next sequence number.
        epoch: the latest epoch of any group.
    """

    def __init__(self, secret: bytes, incarnation: int = 0) -> None:
        self._secret = secret
        self.begin(incarnation)

    def begin(self, incarnation: int) -> None:
        """Begins the numbers of an incarnation; peers may know numbers of earlier ones."""
        self._first_seq = self.next_seq = (incarnation << INCARNATION_SHIFT) + 1
        self.epoch = incarnation << EPOCH_SHIFT

    @property
    def incarnation(self) -> int:
        return self.next_seq >> INCARNATION_SHIFT

    def take_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def take_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def is_old(self, seq: int) -> bool:
        """True if a sequence number belongs to an earlier incarnation."""
        return seq < self._first_seq

    def is_unknown(self, seq: int) -> bool:
        return seq >= self.next_seq

    def nonce(self, what: Literal["call", "epoch", "client"], number: int) -> int:
        """The nonce of a call, of an epoch, or of all streams to a client."""
        text = f"{what} {number}".encode()
        return int.from_bytes(blake2b(text, key=self._secret, digest_size=NONCE_BYTES).digest())


@dataclass(slots=True)
class StateHistory:
    revision: int | None = None
    syncs: int = 0  # number of its last synchronization, counted over all groups
    last_plan: int = 0  # seq of the last plan of the last synchronization
    holders: set[int] = field(default_factory=set)
    short: int = 0  # as in the last SyncResult
    # whether the last revision may be synchronized again, or any later one, because a peer was lost
    # or a collective failed since then; they always may while there are newcomers
    repeatable: bool = False


class History:
    """Numbers of completed rounds, and their latest results.

    Attributes:
        topology: rounds of `update_topology`.
        pending: rounds of `are_peers_pending`.
        were_pending: the result of the latest `are_peers_pending`.
        optimized: rounds of `optimize_topology`.
        finished: whether the run is finished.
    """

    def __init__(self) -> None:
        self.topology = self.pending = self.optimized = 0
        self.were_pending = self.finished = False
        self._groups: dict[int, StateHistory] = {}
        self._syncs = 0  # over all groups, so that a group that empties and returns repeats none

    def restore(self, before: History) -> None:
        self.topology, self.pending = before.topology, before.pending
        self.were_pending, self.optimized = before.were_pending, before.optimized
        self.finished |= before.finished
        self._groups = before._groups
        self._syncs = max((state.syncs for state in self._groups.values()), default=0)

    def of(self, group: int) -> StateHistory:
        if group not in self._groups:
            self._groups[group] = StateHistory()
        return self._groups[group]

    def count_sync(self, group: int) -> StateHistory:
        """Numbers a synchronization that has a result."""
        self._syncs += 1
        state = self.of(group)
        state.syncs = self._syncs
        return state

    def lose(self, group: int, numbers: Set[int]) -> bool:
        """Removes lost holders. True if the group's shared state is lost with them."""
        state = self.of(group)
        state.holders -= numbers
        if state.holders or state.revision is None:
            return False
        state.revision = None
        return True

    def forget(self, group: int) -> None:
        self._groups.pop(group, None)

    def done(self, group: int) -> m.Done:
        """The results that a peer of a group may have missed.

        The group may not exist yet, if the peer is pending.
        """
        state = self._groups.get(group) or StateHistory()
        return m.Done(
            self.topology,
            self.pending,
            self.were_pending,
            state.syncs,
            state.revision or 0,
            state.last_plan,
            optimized=self.optimized,
            short=state.short,
            finished=self.finished,
        )
