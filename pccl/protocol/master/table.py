"""The table of running collectives: those that have started and whose outcome is not known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.master.tally import Reason
from pccl.protocol.rounds import RoundId, described


@dataclass(slots=True)
class Running:
    """A collective between its start and its outcome, with the votes on its end."""

    seq: int
    group: int
    members: set[int]
    votes: dict[int, bool] = field(default_factory=dict)
    began_as: RoundId | None = None  # the round; unknown of one from before a restart
    around: tuple[int, tuple[m.Ring, ...]] | None = None  # its epoch and rings
    why: str = ""
    cause: m.Cause = m.Cause.OTHER
    since_s: float = 0.0  # when the last peer entered it
    paired: bool = False  # a send: the loss of others is nothing to it
    work: m.Work | None = None  # unknown of one from before a restart
    size: int = 0  # its members, at its start
    reason: Reason = Reason.LINK  # if it is interrupted
    interrupted_s: float = 0.0  # and when
    progress: dict[int, int] = field(default_factory=dict)  # thousandths, by member

    @property
    def title(self) -> str:
        """Its call, in words."""
        if self.began_as is None:
            return f"collective {self.seq}"
        giver, _ = self.began_as.pair or (0, 0)
        return described(self.began_as, self.work, giver)

    @property
    def missing(self) -> set[int]:
        """The members that have not voted on its end."""
        return self.members - self.votes.keys()


class CollectiveTable:
    """Running collectives by their sequence numbers.

    Attributes:
        committed: how many have committed.
        aborted: how many have aborted.
    """

    def __init__(self) -> None:
        self.committed = self.aborted = 0
        self._running: dict[int, Running] = {}
        self._counts: dict[int, int] = {}  # by peer: of how many it is a member

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def __len__(self) -> int:
        return len(self._running)

    def get(self, seq: int) -> Running | None:
        """The collective with this number, if it runs."""
        return self._running.get(seq)

    def of_group(self, group: int) -> list[Running]:
        """The collectives of all peers of a group, in the order of their starts."""
        return [
            running
            for running in self._running.values()
            if running.group == group and not running.paired
        ]

    def running(self, number: int) -> int:
        """Of how many running collectives a peer is a member."""
        return self._counts.get(number, 0)

    def add(self, running: Running) -> None:
        """Adds a collective that has started."""
        self._running[running.seq] = running
        counts = self._counts
        for number in running.members:
            counts[number] = counts.get(number, 0) + 1

    def remove(self, running: Running, ok: bool) -> None:
        """Removes a collective that has an outcome."""
        del self._running[running.seq]
        if ok:
            self.committed += 1
        else:
            self.aborted += 1
        counts = self._counts
        for number in running.members:
            if counts[number] == 1:
                del counts[number]
            else:
                counts[number] -= 1

    def lose(self, group: int, lost: Collection[int]) -> list[Running]:
        """Peers of a group are lost: removes them. Returns the collectives that they were in."""
        lost = set(lost)
        running = self.of_group(group)
        running += [one for one in self._running.values() if one.paired and one.members & lost]
        for one in running:
            one.members.difference_update(lost)
            for number in lost:
                one.votes.pop(number, None)
        for number in lost:
            self._counts.pop(number, None)
        return running

    def waits(self) -> Iterator[tuple[object, Iterable[int], str]]:
        """Everything that peers wait for: its name, the missing peers, and a title."""
        for running in self._running.values():
            if running.votes:
                yield running.seq, running.missing, running.title
