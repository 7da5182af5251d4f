"""What a call waits for, in words."""

from __future__ import annotations

from pccl.protocol.master.ledger import Ledger
from pccl.protocol.rounds import PENDING, Kind, Round, RoundId

ADMITTING = RoundId(Kind.TOPOLOGY, None)


def explain(run: Ledger, number: int, call: int, seq: int) -> str:
    """What a peer's call waits for; empty when its answer is on the way.

    Args:
        run: all that the master knows.
        number: of the peer.
        call: its number.
        seq: of a collective that has started; 0 otherwise.
    """
    peer = run.peers[number]
    if not peer.accepted:
        return f"to be admitted: {_calls_missing(run, ADMITTING)}"
    for round_ in run._rounds.of(number).values():
        if round_.votes[number].call == call:
            return f"in {round_.describe(number)}: {_votes_missing(run, round_)}"
    running = run._running.get(seq)
    if running is not None:
        late = sorted(running.members - running.votes.keys())
        return f"in {running.title}, which has started: {run._names(late)} must finish it"
    sync = run._groups[peer.info.group].sync
    if sync is not None and number in sync.members and sync.members[number].call == call:
        return f"in sync_shared_state(): {run._names(sorted(sync.fetching))} must receive it"
    measured = run._optimisation
    if measured is not None and measured.calls.get(number) == call:
        return f"in optimize_topology(): {run._names(sorted(measured.measuring))} measure links"
    return ""


def _calls_missing(run: Ledger, round_id: RoundId) -> str:
    round_ = run._rounds.get(round_id)
    voters = {} if round_ is None else round_.votes
    late = [number for number in run._accepted() if number not in voters]
    return f"{run._names(late)} must call {round_id.kind.value}(){_elsewhere(run, late)}"


def _votes_missing(run: Ledger, round_: Round[object]) -> str:
    late = [number for number in run._accepted(round_.id.group) if number not in round_.votes]
    if not late and round_.id == PENDING:
        return f"another peer must join the run, which has {len(round_.votes)}"
    return f"{run._names(late)} must enter it{_elsewhere(run, late)}"


def _elsewhere(run: Ledger, late: list[int]) -> str:
    """In which other calls those stand who are waited for; of some of them."""
    stand = [
        f"; {run.peers[number].info} stands in {round_.describe(number)}"
        for number in late[:3]
        for round_ in run._rounds.of(number).values()
    ]
    return "".join(stand[:3])
