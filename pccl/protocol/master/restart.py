"""A restarted master: it waits for its peers, and continues from what they have said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from pccl.protocol import messages as m
from pccl.protocol.master.collectives import Running
from pccl.protocol.master.effects import Adopt, Effect, Remember
from pccl.protocol.master.recovery import Back, Before, Recovery, Unresolved
from pccl.protocol.master.run import Run
from pccl.types import Result

BACKLOG_MAX = 4  # messages of one connection kept during a recovery; peers send two
RESTARTED = "the master was restarted"


class Backlog:
    """Messages that arrive during a recovery and are handled afterwards; within limits."""

    def __init__(self) -> None:
        self.events: list[Callable[[], list[Effect]]] = []
        self._said: Counter[bytes] = Counter()

    def add(self, conn: bytes, event: Callable[[], list[Effect]]) -> bool:
        """Keeps a message. Returns False, once, if there are too many."""
        self._said[conn] += 1
        if self._said[conn] <= BACKLOG_MAX:
            self.events.append(event)
        return self._said[conn] != BACKLOG_MAX + 1

    def __contains__(self, conn: bytes) -> bool:
        return conn in self._said


class Restart:
    """The time in which a restarted master waits for its peers.

    Attributes:
        recovery: the peers that are back, and those still awaited.
        backlog: messages of all others meanwhile.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.backlog = Backlog()

    def has_heard(self, conn: bytes) -> bool:
        """Whether it holds a message of this connection."""
        return conn in self.backlog or conn in self.recovery


def restore(run: Run, before: Before, back: Mapping[int, Back], now_s: float) -> None:
    """Has a run go on as it was, with those who are back; at this time, as is shown."""
    membership = run.membership
    membership.next_number = max(membership.next_number, before.next_peer)
    incarnation = max(run.numbers.incarnation, before.incarnation + 1)
    run.numbers.begin(incarnation)
    run.outbox.do(Adopt(run.number, incarnation))
    for number, info in before.accepted.items():
        its = back[number]
        peer = membership.bring_back(its.conn, info, its.host, its.resume)
        peer.since_s = peer.spoke_s = now_s
        peer.veteran = number in before.veterans
        run.outbox.do(Remember(info))
    run.history.restore(before)
    if run.history.finished:
        run.finish()
    for group, was in before.groups.items():
        run.groups.restore(group, was.rings)
        if not was.holders:
            run.outbox.note(f"the last holder of group {group}'s shared state is gone")
    run.publish_world()
    for group in before.groups:
        run.groups.renew(group)
    for number, info in before.accepted.items():
        run.outbox.send(number, m.Admitted(run.number, run.history.done(info.group)))
    for seq in sorted(before.collectives):
        _resolve(run, seq, before.collectives[seq], now_s)
    for _, number, message in sorted(_lacked(before), key=lambda one: one[:2]):
        run.outbox.send(number, message)
    for number, peer in membership.peers.items():
        run.outbox.send(number, m.Resumed(run.history.done(peer.info.group)))


def _lacked(before: Before) -> Iterator[tuple[int, int, m.MasterMessage]]:
    """What some peers know and others lack: its seq, whom to tell, and what.

    Who hears of a seq must have heard of all before it: the next restart relies on that.
    """
    for number, small in before.missed:
        yield small.seq, number, m.Missed(small)
    for number, failure in before.failed:
        yield failure.seq, number, m.Failed(failure)
    lost = Result.RANK_CONNECTION_LOST.value
    for seq, was in before.collectives.items():
        called = m.Called.COLLECTIVE, was.tag, was.pair or ()
        for number in was.unheard:  # its vote to start is void, as it is for the others
            failure = m.Failure(seq, *called, lost, RESTARTED, m.Cause.OTHER)
            yield seq, number, m.Failed(failure)


def _resolve(run: Run, seq: int, was: Unresolved, now_s: float) -> None:
    if was.outcome is None:
        running = Running(seq, was.group, was.members, was.votes)
        running.since_s = now_s
        running.paired = was.pair is not None
        run.collectives.resolve(running, RESTARTED)
        return
    for number in sorted(was.open):
        run.outbox.send(number, m.Finished(seq, was.outcome, "" if was.outcome else RESTARTED))
