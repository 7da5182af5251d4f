"""torch's send and recv, as tasks to launch."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pccl import Communicator, PeerLostError
from pccl.calls import rows
from pccl.torch.members import Members
from pccl.torch.pieces import movable, put
from pccl.torch.work import Handle, Task
from pccl.types import Result

BARRIER_TAG = (1 << 31) - 1  # of `pccl.torch.monitored`
TAG_MAX = BARRIER_TAG - 1


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive under way that nobody has asked for yet."""

    handle: Handle
    piece: Tensor


class Sends:
    """Makes the tasks of one group. Ranks are torch's.

    Messages with one tag from one member to another arrive in the order in which they are sent: the
    n-th send and the n-th receive have the same tag of pccl's.
    """

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        # by sender and tag, in order: what was tried for a receive from anyone
        self._posted: defaultdict[tuple[int, int], deque[_Posted]] = defaultdict(deque)

    def _other(self, rank: int) -> int:
        order = self._members.order
        if not 0 <= rank < len(order) or order[rank] == self._members.own:
            raise ValueError(
                f"rank {rank} is not another member's: they are 0 to {len(order) - 1}, this one's "
                f"is {self._members.rank}"
            )
        return order[rank]

    @staticmethod
    def _tag(tag: int, index: int) -> int:
        if not 0 <= tag <= TAG_MAX and tag != BARRIER_TAG:
            raise ValueError(f"tag is {tag}: it must be in 0 to {TAG_MAX}")
        return tag << 32 | index & 0xFFFFFFFF

    def send(self, tensor: Tensor, rank: int, tag: int) -> Task:
        """Sends a tensor to a member, which receives it."""
        piece, other = movable(tensor), self._other(rank)
        place = self._tag(tag, self._sent[other, tag])

        def launch(_: int) -> Handle:
            self._sent[other, tag] += 1
            work = rows.send(piece, (self._members.own, other))
            return self._comm.parts.launcher.launch("send", work, place)

        return Task("send", launch, [tensor], counts=False)

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Task:
        """Receives a tensor from a member."""
        other = self._other(rank)
        waiting = self._posted[other, tag]
        posted = waiting[0] if waiting else None
        piece = movable(tensor) if posted is None else posted.piece
        if piece.nbytes != tensor.nbytes:
            raise ValueError(
                f"{tensor.nbytes} bytes from rank {rank}: an earlier receive from anyone has asked "
                f"it for {piece.nbytes}"
            )

        def launch(_: int) -> Handle:
            if posted is not None:
                return waiting.popleft().handle
            return self._receive(piece, other, tag)

        return Task("recv", launch, [tensor], settle=lambda: put(tensor, piece), counts=False)

    def _receive(self, piece: Tensor, other: int, tag: int) -> Handle:
        place = self._tag(tag, self._received[other, tag])
        self._received[other, tag] += 1
        work = rows.recv(piece, (other, self._members.own))
        return self._comm.parts.launcher.launch("recv", work, place)

    def recv_any(self, tensor: Tensor, tag: int) -> Task:
        """Receives a tensor from whoever is the first to send one.

        It is asked for from all; what others send is kept for the next receives.
        """
        chosen: list[tuple[int, Tensor]] = []

        def launch(_: int) -> Handle:
            tried = {}
            for other in self._members.order:
                if other == self._members.own:
                    continue
                waiting = self._posted[other, tag]
                if not waiting:
                    piece = movable(tensor).clone()
                    waiting.append(_Posted(self._receive(piece, other, tag), piece))
                tried[other] = waiting
            return _First(tried, lambda other, piece: chosen.append((other, piece)))

        def settle() -> None:
            put(tensor, chosen[0][1])

        def source() -> int:
            return self._members.order.index(chosen[0][0]) if chosen else -1

        return Task("recv", launch, [tensor], settle=settle, source=source, counts=False)

    def undo_send(self, other: int) -> None:
        """A message of a barrier to that member was given up: the next one takes its place."""
        self._sent[other, BARRIER_TAG] -= 1

    def undo_recv(self, other: int) -> None:
        """The same of one that was to come."""
        self._received[other, BARRIER_TAG] -= 1

    def give_up(self) -> None:
        """Ends the receives that nobody has asked for."""
        for waiting in self._posted.values():
            while waiting:
                waiting.popleft().handle.wait(timeout=0)


class _First:
    """Of several receives under way, the one that ends first."""

    def __init__(
        self, tried: dict[int, deque[_Posted]], choose: Callable[[int, Tensor], None]
    ) -> None:
        self.error: Exception | None = None
        self._tried = tried
        self._choose = choose
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._callback: Callable[[], None] | None = None
        for other, waiting in tried.items():
            waiting[0].handle.add_done_callback(lambda other=other: self._end(other))  # type: ignore[misc]

    def _end(self, other: int) -> None:
        self._ended.put(other)
        if self._callback is not None:
            self._callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls it when the first one has ended, and perhaps more often."""
        self._callback = callback
        if not self._ended.empty():
            callback()

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, Any]:
        """Waits for the first one that succeeds."""
        for _ in self._tried:
            try:
                other = self._ended.get(timeout=timeout)
            except queue.Empty:
                why = f"nobody has sent anything within {timeout:g} s"
                self.error = PeerLostError(Result.RANK_CONNECTION_LOST, "recv", why)
                return False, Result.RANK_CONNECTION_LOST.value, None
            posted = self._tried[other].popleft()
            well, status, info = posted.handle.wait()
            if well:
                self._choose(other, posted.piece)
                return well, status, info
            self.error = posted.handle.error
        return False, Result.RANK_CONNECTION_LOST.value, None
