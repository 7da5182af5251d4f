"""Point-to-point calls: send and recv.

Messages with one tag from one member to another arrive in the order in which they are sent: the
n-th send and the n-th receive match by their number. A message takes its number at the launch. If
it fails, it fails on both sides, and both return the number, so that the next two match.

Error messages begin like gloo's, because programs look for these words.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
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

BARRIER_TAG = (1 << 31) - 1  # the tag of monitored_barrier
TAG_MAX = BARRIER_TAG - 1
_GIVEN, _ROOM = 1 << 30, 1 << 31  # above the numbers of messages: tags for exchanging sizes


class _Numbers:
    """The numbers of messages with one tag, from one member to another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh = itertools.count()
        self._returned: list[int] = []

    def take(self) -> int:
        with self._lock:
            return heapq.heappop(self._returned) if self._returned else next(self._fresh)

    def give_back(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._returned, number)


class _Message:
    """The handle of a message with a fixed sender and receiver.

    A message may have fewer elements than the receiver's tensor, whose first elements it fills. A
    call of pccl fails if the two peers give different sizes. They then exchange the sizes, and
    repeat the call. So equal sizes, the usual case, have no cost.

    Attributes:
        piece: the data to send, or the memory that receives; after success, only the received part.
        ended: whether its user knows its outcome.
    """

    def __init__(
        self,
        comm: Communicator,
        piece: Tensor,
        pair: tuple[int, int],
        is_sent: bool,
        tag: int,
        numbers: _Numbers,
    ) -> None:
        """`pair` has the numbers of the sender and the receiver."""
        self.piece, self.ended = piece, False
        self._comm, self._pair, self._is_sent = comm, pair, is_sent
        self._numbers, self._number = numbers, numbers.take()
        self._tag = tag << 32 | self._number % _GIVEN
        self._lock = threading.Lock()
        self._is_repeated = False
        try:
            self._handle: Handle = self._begin()
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Returns its number, after a failure on both sides."""
        self._numbers.give_back(self._number)

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
        works = (
            ("send", operands.send(own, (me, other))),
            ("recv", operands.recv(theirs, (other, me))),
        )
        sizes = [
            extension.launch(self._comm, *work, self._tag | tag)
            for work, tag in zip(works, tags, strict=True)
        ]
        if not all([each.wait(timeout=deadline.left_s)[0] for each in sizes]):
            return False
        sent, room = (own, theirs) if self._is_sent else (theirs, own)
        self.piece = self.piece[: int(sent[0])]
        return bool(sent[0] <= room[0] and sent[1] == room[1])


class _Request:
    """The handle of a receive that takes the first message from any sender, or from one.

    Attributes:
        other: the number of the sender; None: any, until a message has arrived.
        message: a future of the message.
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
        """Waits for a message. After a time-out, the message goes to the next request."""
        if not wait([self.message], timeout).done:
            why = f"no message has come within {timeout or 0.0:g} s"
            self._mailbox.end(self, PCCLTimeoutError(Result.TIMEOUT, "recv", why))
        well = self.error is None
        return well, (Result.SUCCESS if well else Result.RANK_CONNECTION_LOST).value, None


class _Mailbox:
    """All receives with one tag, since the first one from any sender.

    For each request, a receive is in progress from each member whose message it would accept.
    Requests are served in order; remaining receives are for later requests.
    """

    def __init__(self, post: Callable[[Tensor, int], _Message]) -> None:
        """`post` begins a receive from a member."""
        self._post = post
        self._lock = threading.RLock()
        self._requests: list[_Request] = []
        # by sender, the receives without a request
        self._posted: defaultdict[int, deque[_Message]] = defaultdict(deque)

    def holds(self, other: int) -> bool:
        """True if a receive from this member must queue behind others here."""
        return bool(self._posted.get(other))

    def request(self, tensor: Tensor, others: list[int], other: int | None) -> _Request:
        """Requests a message of a tensor's size, from `other` or the first of `others`.

        Raises PeerLostError: one of these members is lost; TooFewPeersError: all are.
        """
        with self._lock:
            request = _Request(self, other, tensor.nbytes)
            self._requests.append(request)
            try:
                for each in others if other is None else [other]:
                    wanted = sum(one.other in (None, each) for one in self._requests)
                    while len(self._posted[each]) < wanted:
                        self._ask(tensor, each)
            except BaseException:
                self._requests.remove(request)
                raise
            self._serve()
        return request

    def _ask(self, tensor: Tensor, other: int) -> None:
        posted = self._post(movable(tensor).clone(), other)
        self._posted[other].append(posted)

        def ended() -> None:
            posted.wait()
            with self._lock:
                posted.ended = True
                self._serve()

        # not in the callback's thread, which must not wait
        posted.add_done_callback(lambda: POOL.run(ended))

    def _serve(self) -> None:
        """Assigns ended receives to requests, in order for each sender.

        If a member is lost, a request to all continues as long as another member may send.
        """
        for other, posted in self._posted.items():
            while posted and posted[0].ended:
                message, error = posted[0], posted[0].error
                request = self._first(other, error)
                if error is not None:
                    message.give_back()
                    if request is not None:
                        self.end(request, error)
                elif request is None:
                    break
                elif message.piece.nbytes > request.nbytes:
                    why = f"a receive of {request.nbytes} bytes: an earlier receive from any sender"
                    why += f" has asked the same member for {message.piece.nbytes}"
                    self.end(request, ValueError(why))
                    continue
                else:
                    self._requests.remove(request)
                    request.other = other
                    request.message.set_result(message.piece)
                posted.popleft()

    def _first(self, other: int, error: Exception | None) -> _Request | None:
        """The request that gets a message from this member, or the error of a receive."""
        others_send = any(posted for each, posted in self._posted.items() if each != other)
        survives = isinstance(error, PeerLostError) and others_send
        accepted = (other,) if survives else (None, other)
        return next((each for each in self._requests if each.other in accepted), None)

    def end(self, request: _Request, error: Exception) -> None:
        """Fails a request that has no message."""
        with self._lock:
            if request in self._requests:
                self._requests.remove(request)
                request.message.set_exception(error)

    def give_up(self) -> None:
        """Ends the receives that no request is waiting for."""
        for posted in [each for queue in list(self._posted.values()) for each in queue]:
            posted.wait(timeout=0)


class Sends:
    """Creates the point-to-point tasks of a group. Ranks are torch's."""

    def __init__(self, comm: Communicator, members: Members) -> None:
        self._comm = comm
        self._members = members
        # by the numbers of the sender and the receiver, and the tag
        self._numbers: defaultdict[tuple[int, int, int], _Numbers] = defaultdict(_Numbers)
        self._mailboxes: dict[int, _Mailbox] = {}

    def send(self, tensor: Tensor, rank: int, tag: int) -> Task:
        return self._task(tensor, self._members.own, self._other(rank, tag), tag)

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Task:
        other = self._other(rank, tag)
        mailbox = self._mailboxes.get(tag)
        if mailbox is not None and mailbox.holds(other):
            return self._requested(mailbox, tensor, other)
        return self._task(tensor, other, self._members.own, tag)

    def recv_any(self, tensor: Tensor, tag: int) -> Task:
        """Receives a tensor from the first member that sends one.

        It posts a receive from each member; messages from the others are for later receives.
        """
        _check(tag)
        if tag not in self._mailboxes:
            own = self._members.own
            self._mailboxes[tag] = _Mailbox(
                lambda piece, other: self._message(piece, other, own, tag)
            )
        return self._requested(self._mailboxes[tag], tensor, None)

    def _other(self, rank: int, tag: int) -> int:
        _check(tag)
        order = self._members.order
        if not 0 <= rank < len(order) or order[rank] == self._members.own:
            raise ValueError(
                f"rank {rank} is not that of another member: ranks are 0 to {len(order) - 1}, and "
                f"this member has {self._members.rank}"
            )
        return order[rank]

    def _message(self, piece: Tensor, sender: int, receiver: int, tag: int) -> _Message:
        is_sent, numbers = sender == self._members.own, self._numbers[sender, receiver, tag]
        return _Message(self._comm, piece, (sender, receiver), is_sent, tag, numbers)

    def _task(self, tensor: Tensor, sender: int, receiver: int, tag: int) -> Task:
        """The task of a message with a fixed sender and receiver."""
        piece, launched = movable(tensor), list[_Message]()

        def launch(_: int) -> Handle:
            launched.append(self._message(piece, sender, receiver, tag))
            return launched[0]

        def failed() -> None:
            for message in launched:
                message.give_back()

        def received() -> None:
            put(tensor, piece)

        if sender == self._members.own:
            return Task("send", launch, [tensor], failed=failed, counts=False)
        return Task("recv", launch, [tensor], settle=received, failed=failed, counts=False)

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


def _check(tag: int) -> None:
    if not 0 <= tag <= TAG_MAX and tag != BARRIER_TAG:
        raise ValueError(f"tag is {tag}: it must be in 0 to {TAG_MAX}")
