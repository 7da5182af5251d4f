"""Functions of a `Communicator` for code that extends pccl; programs do not need them.

An integration of a framework, or a binding for another language, launches collectives with its own
operands and ranks, and takes part in rounds with its own time limits.

    from pccl import extension, operands

    ring = extension.ring(comm)
    ranks = extension.ranks(ring, extension.member(comm).number)
    work = operands.all_gather(x, None, ranks)
    handle = extension.launch(comm, "all_gather", work, tag=7)

Before `connect`, all functions raise PCCLError INVALID_USAGE; after the end of the membership, the
reason for the end. A function that makes a call of the run raises the same errors as the public
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pccl.communicator import Communicator
from pccl.errors import AGAIN, PCCLError, TooFewPeersError
from pccl.membership import AsyncReduceHandle, until_no_peer_leaves
from pccl.operands import Ranks
from pccl.protocol.rounds import GRACE_MAX_S, Grace
from pccl.protocol.tuning import DIRECT_MAX
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.memory import Operands
from pccl.runtime.config import Config
from pccl.runtime.limits import FOREVER_S
from pccl.shared_state import SharedState, sync_shared_state
from pccl.types import ReduceInfo, SharedStateSyncInfo

__all__ = [
    "DIRECT_MAX", "FOREVER_S", "GRACE_MAX_S", "Deadline", "Grace", "Member", "Operands", "Ranks",
    "are_peers_pending", "await_newcomers", "expect_no_return", "gather", "has_synchronized",
    "launch", "member", "names", "ranks", "repeat_until_enough", "ring", "run", "synchronize_once",
    "until_no_peer_leaves", "update_topology",
]  # fmt: skip

T = TypeVar("T")


class Member(NamedTuple):
    """This peer, as the run knows it."""

    number: int  # unique in the run; peers are numbered in the order in which they join
    host: str  # the host at which others reach it
    group: int
    team: int  # as given to the Communicator; 0: none
    team_size: int


def member(comm: Communicator) -> Member:
    """This peer."""
    known = comm._membership.client("member").knowledge
    own = known.info(known.number)
    return Member(own.peer, own.host, own.group, own.team, own.team_size)


def ring(comm: Communicator) -> tuple[int, ...]:
    """The numbers of the group's peers by rank, as of the master's last message.

    Unlike `Communicator.rank`, this does not update the ranks that this thread has seen.
    """
    return comm._membership.client("ring").knowledge.by_rank


def ranks(ring: Sequence[int], number: int) -> Ranks:
    """The ranks for the operands of a collective that depends on them; `number` is this peer's.

    If the peers are no longer in this order when the collective starts, it fails on all of them.
    """
    return Ranks.of(ring, number)


def names(comm: Communicator) -> dict[int, str]:
    """Descriptions of the run's peers by their numbers, as of the master's last message."""
    return comm._membership.client("names").knowledge.plan.names


def expect_no_return(comm: Communicator, most_s: float) -> None:
    """Declares that the master never comes back once its process has ended.

    Call this before `connect`. If the master is unreachable, this peer tries to reconnect for at
    most `most_s`.
    """
    patience_s = min(most_s, Config.from_env().master_patience_s)
    comm._settings.update(master_patience_s=patience_s, master_returns=False)


# ---- collectives ----


def launch(comm: Communicator, name: str, work: Operands, tag: int) -> AsyncReduceHandle:
    """Launches a collective.

    Args:
        comm: this peer.
        name: name of the call, for errors.
        work: made by a function of `pccl.operands`.
        tag: as for `Communicator.all_reduce`.
    """
    return comm._membership.launch(name, work, tag)


def run(
    comm: Communicator, name: str, work: Operands, tag: int, timeout: float | None = None
) -> ReduceInfo:
    """Launches a collective and waits for it; `timeout` is in seconds."""
    return comm._membership.run(name, work, tag, timeout)


def gather(comm: Communicator, own: Any) -> Any:
    """The arrays of all peers by rank, as one of shape (peers, *own.shape).

    If a peer is lost, the survivors gather again; one that is alone has only its own.
    """
    while True:
        _ = comm.rank  # a gather uses the ranks that this thread has seen
        try:
            return comm.all_gather(own)
        except TooFewPeersError:
            return own[None]
        except PCCLError as error:
            if error.result not in AGAIN:
                raise


# ---- rounds ----


def are_peers_pending(comm: Communicator, grace: Grace | None = None) -> bool:
    """True if peers wait to be admitted. Unlike the public call, it does not slow down polling.

    When the `grace` is over, the master drops members that have not entered.
    """
    return comm._membership.ask(Deadline(None), 0.0, grace)


def update_topology(comm: Communicator) -> int:
    """Admits pending peers. Returns the new number of members, the same on all peers."""
    return comm._membership.update_topology(Deadline(None))


def await_newcomers(
    comm: Communicator, patience_s: float = FOREVER_S, deadline: Deadline | None = None
) -> int:
    """Waits for newcomers and admits them; all peers must call it.

    Returns the new number of members, the same on all peers; 0 if the `patience_s` of one of the
    peers is over and no newcomer has come.

    Raises:
        PCCLTimeoutError: the deadline has passed.
    """
    return comm._membership.await_newcomers(deadline or Deadline(None), patience_s)


def has_synchronized(comm: Communicator) -> bool:
    """True if this peer has synchronized shared state since it joined."""
    return comm._membership.synced


def synchronize_once(
    comm: Communicator, shared_state: SharedState, min_peers: int
) -> SharedStateSyncInfo:
    """Like `sync_shared_state`, but does not wait for `min_peers`.

    Raises:
        TooFewPeersError: there are fewer than `min_peers`; raised on all peers.
    """
    return sync_shared_state(comm._membership, shared_state, Deadline(None), min_peers=min_peers)


def repeat_until_enough(comm: Communicator, attempt: Callable[[], T], min_peers: int) -> T:
    """Returns `attempt()`; while that raises TooFewPeersError, admits newcomers and repeats it."""
    return comm._membership.repeat_until_enough(attempt, min_peers, None)
