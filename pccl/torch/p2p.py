"""Point-to-point calls: send and recv.

Messages with one tag from one member to another arrive in the order in which they are sent: the
n-th send and the n-th receive match by their number. A number is taken at the launch. If a message
fails, it fails on both sides, and both give the number back, so that the next two match.

Error messages begin as those of gloo, because programs look for these words.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pccl import (
    Communicator,
    MismatchError,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    extension,
    operands,
)
from pccl.extension import Deadline
from pccl.torch.members import Members
from pccl.torch.tensors import movable, put
from pccl.torch.work import POOL, Handle, Task
from pccl.types import DataType, Result

BARRIER_TAG = (1 << 31) - 1  # of monitored_barrier
TAG_MAX = BARRIER_TAG - 1
_GIVEN, _ROOM = 1 << 30, 1 << 31  # above the numbers of messages: tags of the exchanged sizes


class _Numbers:
    """The numbers of the messages of one tag, from one member to another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._free: list[int] = []

    @contextlib.contextmanager
    def take(self) -> Iterator[int]:
        """Takes the next number; gives it back if the launch raises."""
        with self._lock:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                number, self._next = self._next, self._next + 1
        try:
            yield number
        except BaseException:
            self.give_back(number)
            raise

    def give_back(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)


class _Message:
    """The handle of a message with a fixed sender and receiver.

    A message may have fewer elements than the receiver's tensor, which gets them as its first ones.
    pccl fails a call if the two peers give different sizes. Then they exchange these, and repeat
    it. So equal sizes, as nearly always, cost nothing.

    Attributes:
        piece: what is sent, or the memory that receives; after success, no more than was sent.
        number: the number of the message.
        ended: for its user: whether it is known to have succeeded or failed.
    """

    def __init__(
        self,
        comm: Communicator,
        piece: Tensor,
        pair: tuple[int, int],
        is_sent: bool,
        tag: int,
        number: int,
    ) -> None:
        """`pair` is the numbers of the sender and the receiver."""
        self.piece, self.number, self.ended = piece, number, False
        self._comm, self._pair, self._is_sent = comm, pair, is_sent
        self._tag = tag << 32 | number % _GIVEN
        self._lock = threading.Lock()
        self._is_repeated = False
        self._handle: Handle = self._begin()

    def _begin(self) -> Handle:
        name, make = ("send", operands.send) if self._is_sent else ("recv", operands.recv)
        return extension.launch(self._comm, name, make(self.piece, self._pair), self._tag)

    @property
    def error(self) -> Exception | None:
        return self._handle.error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._handle.add_done_callback(callback)

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, Any]:
        deadline = Deadline(timeout)
        with self._lock:
            found = self._handle.wait(timeout=timeout)
            if isinstance(self._handle.error, MismatchError) and not self._is_repeated:
                self._is_repeated = True
                if self._has_room(deadline):
                    self._handle = self._begin()
                    found = self._handle.wait(timeout=deadline.left_s)
        return found

    def _has_room(self, deadline: Deadline) -> bool:
        """True if the message fits into the receiver's tensor; both peers find the same."""
        dtype = DataType.from_torch_dtype(self.piece.dtype).value
        own = torch.tensor([self.piece.numel(), dtype])
        theirs, (me, other), tags = torch.empty_like(own), self._pair, (_GIVEN, _ROOM)
        if not self._is_sent:
            me, other, tags = other, me, (_ROOM, _GIVEN)
        sizes = [
            extension.launch(
                self._comm, "send", operands.send(own, (me, other)), self._tag | tags[0]
            ),
            extension.launch(
                self._comm, "recv", operands.recv(theirs, (other, me)), self._tag | tags[1]
            ),
        ]
        if not all([each.wait(timeout=deadline.left_s)[0] for each in sizes]):
            return False
        sent, room = (own, theirs) if self._is_sent else (theirs, own)
        self.piece = self.piece[: int(sent[0])]
        return bool(sent[0] <= room[0] and sent[1] == room[1])


@dataclass
class _Source:
    posted: deque[_Message] = field(default_factory=deque)  # receives that have been launched
    arrived: deque[Tensor] = field(default_factory=deque)


class _Request:
    """The handle of a receive that takes the first message of any sender, or of one.

    Attributes:
        other: the number of the sender; None: any, until a message has come.
        message: a future of it.
    """

    def __init__(self, mailbox: _Mailbox, other: int | None, nbytes: int) -> None:
        self.other = other
        self.nbytes = nbytes
        self.message: Future[Tensor] = Future()
        self._mailbox = mailbox

    @property
    def error(self) -> Exception | None:
        found = self.message.exception()
        assert found is None or isinstance(found, Exception)
        return found

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.message.add_done_callback(lambda _: callback())

    def wait(self, *, timeout: float | None = None) -> tuple[bool, int, Any]:
        """Waits for a message. After a time-out, the message is for the next request."""
        if not wait([self.message], timeout).done:
            self._mailbox.forget(self, timeout or 0.0)
        well = self.error is None
        return well, (Result.SUCCESS if well else Result.RANK_CONNECTION_LOST).value, None


class _Mailbox:
    """All receives of one tag, since the first one from any sender.

    For each request, a receive is under way from each member whose message it would accept.
    Requests are served in order; receives and messages that are left over are for later requests.

    Attributes:
        lock: held while any of it changes.
    """

    def __init__(self, post: Callable[[Tensor, int], _Message], free: Any) -> None:
        self.lock = threading.RLock()
        self._post = post
        self._free = free  # gives back a member's number of a message
        self._requests: list[_Request] = []
        self._sources: defaultdict[int, _Source] = defaultdict(_Source)

    def holds(self, other: int) -> bool:
        """True if a receive from that member must queue behind others here."""
        source = self._sources.get(other)
        return source is not None and bool(source.posted or source.arrived)

    def request(self, tensor: Tensor, others: list[int], other: int | None) -> _Request:
        """Requests a message of a tensor's size, from `other` or from the first of `others`.

        Raises:
            TooFewPeersError: there is no other peer.
            PeerLostError: a member that is asked is lost.
        """
        with self.lock:
            request = _Request(self, other, tensor.nbytes)
            self._requests.append(request)
            try:
                for each in others if other is None else [other]:
                    source = self._sources[each]
                    wanted = sum(one.other in (None, each) for one in self._requests)
                    while len(source.posted) + len(source.arrived) < wanted:
                        self._ask(tensor, each, source)
            except BaseException:
                self._requests.remove(request)
                raise
            for each in list(self._sources):
                self._serve(each)
        return request

    def _ask(self, tensor: Tensor, other: int, source: _Source) -> None:
        posted = self._post(movable(tensor).clone(), other)
        source.posted.append(posted)

        def ended() -> None:
            posted.wait()
            with self.lock:
                posted.ended = True
                self._settle(other)

        # not in the thread that calls back, which must not wait
        posted.add_done_callback(lambda: POOL.run(ended))

    def _settle(self, other: int) -> None:
        """Takes the ended receives from one member, in order."""
        source = self._sources[other]
        while source.posted and source.posted[0].ended:
            posted = source.posted.popleft()
            well, _, _ = posted.wait()
            if well:
                source.arrived.append(posted.piece)
                continue
            self._free(other, posted.number)
            self._fail(other, posted.error)
        self._serve(other)

    def _serve(self, other: int) -> None:
        arrived = self._sources[other].arrived
        for request in [one for one in self._requests if one.other in (None, other)]:
            if not arrived:
                return
            self._requests.remove(request)
            if arrived[0].nbytes > request.nbytes:
                why = (
                    f"a receive of {request.nbytes} bytes: an earlier receive from any sender has "
                )
                why += f"asked the same member for {arrived[0].nbytes}"
                request.message.set_exception(ValueError(why))
            else:
                request.other = other
                request.message.set_result(arrived.popleft())

    def _fail(self, other: int, error: Exception | None) -> None:
        """A receive from that member has failed, and so has the request that it was for.

        If a member is lost, a request to all goes on as long as another one may send.
        """
        for request in list(self._requests):
            if request.other not in (None, other):
                continue
            if request.other is None and isinstance(error, PeerLostError):
                if any(source.posted for source in self._sources.values()):
                    continue
            self._requests.remove(request)
            request.message.set_exception(error)
            return

    def forget(self, request: _Request, seconds: float) -> None:
        """Ends a request whose caller has stopped waiting."""
        with self.lock:
            if request not in self._requests:
                return
            self._requests.remove(request)
            why = f"no message has come within {seconds:g} s"
            error = PCCLTimeoutError(Result.TIMEOUT, "recv", why)
            request.message.set_exception(error)

    def give_up(self) -> None:
        """Ends the receives that no request is waiting for."""
        for source in list(self._sources.values()):
            for posted in list(source.posted):
                posted.wait(timeout=0)


class Sends:
    """Makes the point-to-point tasks of one group. Ranks are torch's."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        # by the other member and the tag
        self._sent: defaultdict[tuple[int, int], _Numbers] = defaultdict(_Numbers)
        self._received: defaultdict[tuple[int, int], _Numbers] = defaultdict(_Numbers)
        self._mailboxes: dict[int, _Mailbox] = {}

    def _other(self, rank: int) -> int:
        order = self._members.order
        if not 0 <= rank < len(order) or order[rank] == self._members.own:
            raise ValueError(
                f"rank {rank} is not that of another member: ranks are 0 to {len(order) - 1}, and "
                f"this member has {self._members.rank}"
            )
        return order[rank]

    @staticmethod
    def _check(tag: int) -> None:
        if not 0 <= tag <= TAG_MAX and tag != BARRIER_TAG:
            raise ValueError(f"tag is {tag}: it must be in 0 to {TAG_MAX}")

    def _message(
        self, tensor: Tensor, pair: tuple[int, int], is_sent: bool, numbers: _Numbers, tag: int
    ) -> Task:
        """The task of a message with a fixed sender and receiver."""
        piece, taken = movable(tensor), list[int]()

        def launch(_: int) -> Handle:
            with numbers.take() as number:
                handle = _Message(self._comm, piece, pair, is_sent, tag, number)
                taken.append(number)
            return handle

        def failed() -> None:
            while taken:
                numbers.give_back(taken.pop())

        def settle() -> None:
            if not is_sent:
                put(tensor, piece)

        name = "send" if is_sent else "recv"
        return Task(name, launch, [tensor], settle=settle, failed=failed, counts=False)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Task:
        self._check(tag)
        other = self._other(rank)
        pair = self._members.own, other
        return self._message(tensor, pair, True, self._sent[other, tag], tag)

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Task:
        self._check(tag)
        other = self._other(rank)
        mailbox = self._mailboxes.get(tag)
        if mailbox is not None and mailbox.holds(other):
            return self._requested(mailbox, tensor, other)
        pair = other, self._members.own
        return self._message(tensor, pair, False, self._received[other, tag], tag)

    def recv_any(self, tensor: Tensor, tag: int) -> Task:
        """Receives a tensor from the first member that sends one.

        It posts a receive from each member; messages of the others are for later receives.
        """
        self._check(tag)
        mailbox = self._mailboxes.get(tag)
        if mailbox is None:
            mailbox = self._mailboxes[tag] = self._mailbox(tag)
        return self._requested(mailbox, tensor, None)

    def _mailbox(self, tag: int) -> _Mailbox:
        def post(piece: Tensor, other: int) -> _Message:
            pair = other, self._members.own
            with self._received[other, tag].take() as number:
                return _Message(self._comm, piece, pair, False, tag, number)

        return _Mailbox(post, lambda other, number: self._received[other, tag].give_back(number))

    def _requested(self, mailbox: _Mailbox, tensor: Tensor, other: int | None) -> Task:
        requests: list[_Request] = []

        def launch(_: int) -> Handle:
            others = [each for each in self._members.order if each != self._members.own]
            if not others:
                raise ValueError("a receive from any sender: the group has no other member")
            requests.append(mailbox.request(tensor, others, other))
            return requests[0]

        def settle() -> None:
            piece, whole = requests[0].message.result(), movable(tensor)
            whole[: piece.numel()] = piece
            put(tensor, whole)

        def source() -> int:
            order, sender = self._members.order, requests[0].other if requests else None
            return order.index(sender) if sender in order else -1

        name = "recv" if other is not None else "recvAnySource"
        return Task(name, launch, [tensor], settle=settle, source=source, counts=False)

    def give_up(self) -> None:
        """Ends the receives that no request is waiting for."""
        for mailbox in self._mailboxes.values():
            with contextlib.suppress(PCCLError):
                mailbox.give_up()
