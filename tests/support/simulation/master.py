"""The master of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from pccl.protocol import messages as m
from pccl.protocol.master import Master
from pccl.protocol.master.history import History
from pccl.protocol.master.restart import Recovery
from pccl.protocol.master.topology import Verdict
from pccl.protocol.rounds import Kind, Round, RoundId
from pccl.types import Result


class Watched(Master):
    """A master that lets itself be watched when it judges, and when shared state is gone.

    Attributes:
        blamed: told of a peer that has to go, its group's size, and whether that synchronizes.
        bereft: told of a group whose shared state is gone; None: all groups have lost theirs.
        odd: told of a peer that is dropped because it stands alone.
        parted: told that nobody has a majority in a dispute: whose calls fail, and why.
    """

    blamed: Callable[[int, tuple[int, bool]], None]
    bereft: Callable[[int | None], None]
    odd: Callable[[int], None]
    parted: Callable[[list[tuple[int, int, RoundId]], str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dismissals, history = self.run.dismissals, self.run.history
        self._drop_for, self._lose, self._restore = (
            dismissals.drop_for,
            history.lose,
            history.restore,
        )
        dismissals.drop_for = self._watch_drops
        history.lose, history.restore = self._watch_lose, self._watch_restore
        self._restored = False
        self._dismiss, self._failure = dismissals.dismiss_all, self.run.outbox.failure
        dismissals.dismiss_all, self.run.outbox.failure = self._watch_dismiss, self._watch_failure
        self._close = self.run.voting.open.close
        self.run.voting.open.close = self._watch_close
        self._split: list[Round] = []  # rounds without a majority, which fail together
        self._why = ""

    def _watch_drops(self, group: int, verdict: Verdict) -> None:
        size, syncs = self.run.membership.size(group), self.run.synchronizations.current
        self.blamed(verdict.guilty, (size, group in syncs))
        self._drop_for(group, verdict)

    def _watch_lose(self, group: int, numbers: Set[int]) -> bool:
        gone = self._lose(group, numbers)
        if gone:
            self.bereft(group)
        return gone

    def _watch_restore(self, before: History) -> None:
        self._restore(before)
        self._restored = True
        for group in {peer.info.group for peer in self.peers.values()}:
            if not before.of(group).holders:
                self.bereft(group)

    # ---- the outcome of a dispute ----

    def _most(self, members: Sequence[int], camp: Set[int]) -> bool:
        """Whether a camp has most of those who decide for some members."""
        deciding = [n for n in members if self.peers[n].veteran] or members
        return 2 * len(camp.intersection(deciding)) > len(deciding)

    def _camps(self) -> Iterator[tuple[Round, set[int]]]:
        """For all open rounds: the peers that ask for the same."""
        for round_ in self.run.voting.open:
            asks = {
                number: (vote.payload, vote.data is None, vote.rows is None)
                if round_.id.kind in (Kind.START, Kind.PAIR)
                else None
                for number, vote in round_.votes.items()
            }
            for form in {*asks.values()}:
                yield round_, {number for number, its in asks.items() if its == form}

    def _watch_dismiss(
        self, whys: Mapping[int, str], result: Result, cause: m.Cause = m.Cause.OTHER
    ) -> None:
        """A peer dropped for a mismatch disagrees with a majority: it is in another call, or has
        other arguments."""
        for number in whys if cause is m.Cause.MISMATCH else ():
            group = self.peers[number].info.group
            against = [
                camp
                for round_, camp in self._camps()
                for scope in {group, round_.id.group}
                for members in [round_.id.pair or self.run.membership.accepted(scope)]
                if number in members and number not in camp and self._most(members, camp)
            ]
            assert against, f"peer {number} was dropped, and no majority stands against it"
            self.odd(number)
        self._dismiss(whys, result, cause)

    def _watch_failure(
        self, round_id: RoundId, result: Result, why: str, cause: m.Cause = m.Cause.OTHER
    ) -> m.Failure:
        """Rounds that fail for a mismatch fail together, and are closed after that."""
        round_ = self.run.voting.open.get(round_id)
        if cause is m.Cause.MISMATCH and round_ is not None:
            self._split.append(round_)
            self._why = why
        return self._failure(round_id, result, why, cause)

    def _watch_close(self, round_: Round) -> None:
        split, self._split = self._split, []
        if split:
            self._judge(split)
        self._close(round_)

    def _judge(self, rounds: Sequence[Round]) -> None:
        """No peer of a majority gets an error, unless a send or recv is in the way."""
        if all(round_.id.kind is not Kind.PAIR for round_ in rounds):
            groups = [round_.id.group for round_ in rounds if round_.id.group is not None]
            for mine, camp in self._camps():
                others = {n for one in rounds if one is not mine for n in one.votes}
                # a round of the whole run may also be split between groups
                scopes = {groups[0] if groups else None, mine.id.group}
                members = [self.run.membership.accepted(scope) for scope in scopes]
                most = mine in rounds and all(self._most(one, camp - others) for one in members)
                assert not most, f"most ask for the same, and got an error: {self._why}"
        self.parted([(n, c, one.id) for one in rounds for n, c in one.calls.items()], self._why)

    def _go_on(self, recovery: Recovery) -> None:
        self._restored = False
        super()._go_on(recovery)
        if not self._restored:  # no peer came back
            self.bereft(None)
