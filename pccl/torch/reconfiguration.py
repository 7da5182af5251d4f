"""torch's reconfiguration (2.14 and later): the members of a group, and their ranks, by handles.

A handle names a process, and where its run's master is. Newcomers have one before they are admitted
(their ProcessGroup `waits`); the members admit them when a reconfiguration names more than there
are. Those that it does not name must have left, or be lost.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from pccl import Communicator, PCCLError, PCCLTimeoutError, PeerLostError, TooFewPeersError
from pccl.runtime.client.call import Deadline
from pccl.torch.members import Members
from pccl.types import Result

TAG = (1 << 31) + 1
_INTERVAL_S = 0.01
_PATIENCE_S = 1.0
_ROW_BYTES = 128


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """What a process says of itself, and of what it was asked for."""

    token: str
    number: int
    uuid: int
    handles: int  # a digest of them


class Reconfigurer:
    """One process's part in the reconfigurations of a group.

    Attributes:
        handle: what names this process, for as long as it has this object.
    """

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        self._token = secrets.token_hex(8)
        self.handle = f"{self._token}@{comm.address}"

    def settle(self, uuid: int, handles: Collection[str], timeout_s: float) -> list[int]:
        """Returns when those that the handles name are the group: their numbers, by rank.

        The order is that of a list; of a set, that of joining.

        Raises:
            ValueError: one is not a handle of a process of this run, or two are equal.
            PCCLTimeoutError: others are in the group after that time, or some are not.
            PCCLError: INVALID_ARGUMENT: the members do not ask for the same, or one that the
                handles do not name is in the group instead of another one.
        """
        tokens = self._tokens(handles)
        deadline = Deadline(timeout_s)
        while True:
            try:
                if not self._are_as_many(len(tokens), deadline):
                    continue
                rows = self._exchange(uuid, tokens, deadline)
            except PeerLostError:  # who is there is looked at again
                continue
            except PCCLTimeoutError as error:
                found = f"{len(self._members.ring())} peers are in the group"
                why = f"after {timeout_s:g} s {found}, not the {len(tokens)} that the handles name"
                raise PCCLTimeoutError(error.result, "reconfigure", why) from None
            return _order(rows, tokens, isinstance(handles, Sequence))

    def _tokens(self, handles: Collection[str]) -> list[str]:
        tokens = []
        for handle in handles:
            token = handle.partition("@")[0]
            if handle != f"{token}@{self._comm.address}":
                where = self._comm.address
                raise ValueError(f"{handle!r} is not a handle of a process of the run at {where}")
            tokens.append(token)
        if len(set(tokens)) != len(tokens):
            raise ValueError(f"two of the handles are equal: {sorted(handles)}")
        return tokens if isinstance(handles, Sequence) else sorted(tokens)

    def _are_as_many(self, wanted: int, deadline: Deadline) -> bool:
        """Whether so many are there; if not, it waits a while, and admits those who wait."""
        there = len(self._members.ring())
        if there == wanted:
            return True
        if deadline.left_s == 0:
            raise PCCLTimeoutError(Result.RANK_CONNECTION_LOST, "reconfigure", "")
        if there < wanted:
            self._comm.parts.admission.await_newcomers(deadline, _PATIENCE_S)
        else:
            time.sleep(_INTERVAL_S)
        return False

    def _exchange(self, uuid: int, tokens: list[str], deadline: Deadline) -> list[_Row]:
        digest = zlib.crc32(" ".join(tokens).encode())
        own = _Row(self._token, self._members.own, uuid, digest)
        text = msgspec.json.encode(own)
        mine = np.zeros(_ROW_BYTES, np.uint8)
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        self._comm.world_size  # noqa: B018 - this thread has seen who is there
        try:
            rows = self._comm.all_gather(mine, tag=TAG, timeout=deadline.left_s)
        except TooFewPeersError:
            return [own]
        found = [msgspec.json.decode(bytes(each).rstrip(b"\0"), type=_Row) for each in rows]
        if any((row.uuid, row.handles) != (uuid, digest) for row in found):
            why = "the members have given different uuids, or handles in different orders"
            raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)
        return found


def _order(rows: list[_Row], tokens: list[str], by_rank: bool) -> list[int]:
    """The numbers of the processes that the tokens name; all rows are of them, or it is refused."""
    numbers = {row.token: row.number for row in rows}
    if numbers.keys() != set(tokens):
        why = "a process that the handles do not name is in the group instead of another one"
        raise PCCLError(Result.INVALID_ARGUMENT, "reconfigure", why)
    order = [numbers[token] for token in tokens]
    return order if by_rank else sorted(order)
