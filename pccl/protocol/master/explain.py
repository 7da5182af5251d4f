"""What a call waits for, in words."""

from __future__ import annotations

from pccl.protocol.master.run import Run
from pccl.protocol.rounds import PENDING, Kind, Round, RoundId

ADMITTING = RoundId(Kind.TOPOLOGY, None)


def explain(run: Run, number: int, call: int, seq: int) -> str:
    """What a peer's call waits for; empty when its answer is on the way.

    Args:
        run: all that the master knows.
        number: of the peer.
        call: its number.
        seq: of a collective that has started; 0 otherwise.
    """
    names = run.membership.names
    if not run.membership.peers[number].accepted:
        return f"to be admitted: {_calls_missing(run, ADMITTING)}"
    for round_ in run.voting.open.of(number).values():
        if round_.votes[number].call == call:
            return f"in {round_.describe(number)}: {_votes_missing(run, round_)}"
    running = run.table.get(seq)
    if running is not None:
        late = names(sorted(running.missing))
        return f"in {running.title}, which has started: {late} must finish it"
    sync = run.synchronisations.of(number)
    if sync is not None and sync.members[number].call == call:
        return f"in sync_shared_state(): {names(sorted(sync.fetching))} must receive it"
    measured = run.optimisations.current
    if measured is not None and measured.calls.get(number) == call:
        return f"in optimize_topology(): {names(sorted(measured.measuring))} measure links"
    return ""


def _calls_missing(run: Run, round_id: RoundId) -> str:
    round_ = run.voting.open.get(round_id)
    late = run.membership.accepted() if round_ is None else run.voting.absent(round_)
    names = run.membership.names(late)
    return f"{names} must call {round_id.kind.value}(){_elsewhere(run, late)}"


def _votes_missing(run: Run, round_: Round[object]) -> str:
    late = run.voting.absent(round_)
    if not late and round_.id == PENDING:
        return f"another peer must join the run, which has {len(round_.votes)}"
    return f"{run.membership.names(late)} must enter it{_elsewhere(run, late)}"


def _elsewhere(run: Run, late: list[int]) -> str:
    """In which other calls those stand who are waited for; of some of them."""
    stand = [
        f"; {run.membership.info(number)} stands in {round_.describe(number)}"
        for number in late[:3]
        for round_ in run.voting.open.of(number).values()
    ]
    return "".join(stand[:3])
