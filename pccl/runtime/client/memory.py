"""The memory that the engine refers to on behalf of a call: of a collective, or of shared state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from pccl.protocol import messages as m
from pccl.protocol import small
from pccl.protocol.messages import REDUCING
from pccl.protocol.peer.calls import NO_ROWS, Rows
from pccl.runtime.client.call import Call
from pccl.runtime.inline import contribution
from pccl.runtime.quantization import wire_bytes
from pccl.tensors.arrays import Buffer
from pccl.types import ReduceOp

if TYPE_CHECKING:
    import numpy as np

Pieces = list[tuple[int, int, int]]  # (piece number, address, bytes)


class Operand(Struct, frozen=True):
    """One array of a collective: its input, its output, and the elements of one slice or row."""

    send: Buffer
    recv: Buffer
    count: int


class Wide:
    """An average of integers, as the engine sums it up: over wide copies of the arrays.

    Attributes:
        parts: the copies: addresses to send and to receive, elements, and the engine's type; None
            where an array needs none.
        is_used: whether the engine has got them; what travels with the votes needs none.
    """

    def __init__(self, each: tuple[Operand, ...]) -> None:
        from pccl.runtime import averages  # imports numpy

        self.is_used = False
        self.parts: list[tuple[int, int, int, int] | None] = []
        self._arrays: list[tuple[Operand, np.ndarray, np.ndarray]] = []
        for given in each:
            if not given.send.dtype.is_integer:
                self.parts.append(None)
                continue
            send = recv = averages.widen(averages.array_of(given.send))
            if given.recv.count != given.send.count:
                recv = averages.empty(given.recv.count, send.dtype)
            code = averages.code_of(send.dtype)
            self.parts.append((send.ctypes.data, recv.ctypes.data, given.count, code))
            self._arrays.append((given, send, recv))

    def narrow(self, members: int) -> None:
        """Writes the means, when the sums of so many members are there."""
        from pccl.runtime import averages  # imports numpy

        for given, _, total in self._arrays if self.is_used else ():
            if given.recv.count:
                target = averages.array_of(given.recv)
                target[:] = averages.narrow(total, members, target.dtype)


@dataclass(frozen=True, slots=True)
class Gradual:
    """Host memory that is filled, and read, while the collective runs (c/pccl.h, GRADUALLY).

    Attributes:
        step: the offsets of a step.
        written: called by the control thread for each step that holds the result.
    """

    step: int
    written: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays of a collective; keeps them alive until the engine has released them.

    In an exchange, `send_rows` and `recv_rows` are the rows that each array has for each rank, and
    from each; empty: none. `uneven`: other peers cannot know these numbers.
    `pair`: the peers of a send, the one that sends first.
    `gradual`: None if the memory holds the contribution. `wide`: for an average of integers.
    """

    work: m.Work
    each: tuple[Operand, ...]
    send_rows: tuple[int, ...] = ()
    recv_rows: tuple[int, ...] = ()
    uneven: bool = False
    pair: tuple[int, ...] = ()
    gradual: Gradual | None = None
    wide: Wide | None = None

    @property
    def averages_integers(self) -> bool:
        """Whether sums of its elements would not fit their type."""
        average = self.work.redop == ReduceOp.AVG.value and self.work.what in REDUCING
        return average and any(each.send.dtype.is_integer for each in self.each)

    def place(self, tag: int) -> int | str:
        """What no two calls of a peer have at the same time."""
        if not self.pair:
            return tag
        giver, taker = self.pair
        return f"{tag} from peer {giver} to peer {taker}"

    @property
    def rows(self) -> Rows:
        """What the other peers must be told of the rows: nothing, if all have one for each."""
        return (self.send_rows, self.recv_rows) if self.uneven else NO_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes that are reduced, or gathered, as they go over the wire."""
        sent = received = 0
        for each in self.each:
            sent += wire_bytes(self.work, each.send.dtype, each.send.count)
            received += wire_bytes(self.work, each.recv.dtype, each.recv.count)
        return max(sent, received)

    def vote(self, members: int, limit: int | None) -> tuple[m.Work, bytes | None]:
        """The work to vote for, and the contribution, if that travels with the vote because it is
        one small array.

        Args:
            members: how many this peer knows.
            limit: the most bytes; None: it depends on the members.
        """
        nbytes = sum(operand.send.nbytes for operand in self.each)
        work, travels = small.enter(self.work, nbytes, members, limit)
        if not travels:
            return work, None
        return work, b"".join(contribution(operand.send) for operand in self.each)


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory of a serve or fetch op, kept alive by `owner`.

    Pieces below `first_counted` are not payload. `reader` receives the leaves of a fetch. A serve
    op sends at most `limit` bytes until it is allowed more; 0: no limit.
    """

    pieces: Pieces
    first_counted: int
    owner: object
    reader: Call | None = None
    limit: int = 0
