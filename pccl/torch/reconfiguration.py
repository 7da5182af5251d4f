"""torch's reconfiguration (2.14 and later): the members of a group, and their ranks, by handles.

A handle is the number of a peer in its run, and where that run's master is. The members that it
names must be in the group: newcomers are admitted before (`ProcessGroup.admit`), and those that it
does not name must have left, or be lost.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from pccl import Communicator, PCCLError, PCCLTimeoutError, TooFewPeersError
from pccl.torch.members import Members
from pccl.types import Result

TAG = (1 << 31) + 1
_INTERVAL_S = 0.01
_ROW_BYTES = 64


def handle_of(comm: Communicator, number: int) -> str:
    """The handle of a peer."""
    return f"{number}@{comm.address}"


def order_of(comm: Communicator, handles: Collection[str]) -> list[int]:
    """The numbers that handles name: in the order of a list; of a set, in that of joining.

    Raises:
        ValueError: one is not a handle of a peer of this run, or they are not different.
    """
    numbers = []
    for handle in handles:
        number = handle.partition("@")[0]
        if not number.isdecimal() or handle != handle_of(comm, int(number)):
            raise ValueError(f"{handle!r} is not a handle of a peer of the run at {comm.address}")
        numbers.append(int(number))
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"two of the handles are equal: {sorted(handles)}")
    return numbers if isinstance(handles, Sequence) else sorted(numbers)


def settle(
    comm: Communicator, members: Members, uuid: int, order: Sequence[int], timeout_s: float
) -> None:
    """Returns when the group consists of these members, and all have given the same uuid.

    Raises:
        PCCLTimeoutError: others are in the group after that time, or some are not.
        PeerLostError: a member has been lost meanwhile.
        PCCLError: INVALID_ARGUMENT: the members do not ask for the same.
    """
    until_s = time.monotonic() + timeout_s
    while set(members.ring()) != set(order):
        if time.monotonic() > until_s:
            why = f"after {timeout_s:g} s the peers {sorted(members.ring())} are in the group"
            why += f", not {sorted(order)}"
            raise PCCLTimeoutError(Result.RANK_CONNECTION_LOST, "reconfigure", why)
        time.sleep(_INTERVAL_S)
    own = msgspec.json.encode([uuid, zlib.crc32(repr(list(order)).encode())])
    mine = np.zeros(_ROW_BYTES, np.uint8)
    mine[: len(own)] = np.frombuffer(own, np.uint8)
    comm.world_size  # noqa: B018 - this thread has seen who is there
    try:
        rows = comm.all_gather(mine, tag=TAG, timeout=max(0.0, until_s - time.monotonic()))
    except TooFewPeersError:
        return
    if any((row != mine).any() for row in rows):
        why = "the members have given different uuids, or handles in different orders"
        raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)
