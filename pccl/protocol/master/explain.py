"""What a call waits for, in words."""

from __future__ import annotations

from collections.abc import Mapping

from pccl.protocol.master.optimisations import Optimisation
from pccl.protocol.master.run import Run
from pccl.protocol.master.synchronisations import Sync
from pccl.protocol.master.table import Running
from pccl.protocol.rounds import PENDING, Kind, Round, RoundId

ADMITTING = RoundId(Kind.TOPOLOGY, None)


def explain(run: Run, number: int, call: int, seq: int) -> str:
    """What a peer's call waits for; empty if its answer is on the way.

    Args:
        run: the state of the run.
        number: of the peer.
        call: its number.
        seq: of a collective that has started; 0 otherwise.
    """
    peer = run.membership.peers[number]
    if not peer.accepted and not run.membership.teams.is_whole(peer.info):
        return f"to be admitted: the other {peer.info.team_size - 1} of its team must connect()"
    if not peer.accepted:
        return f"to be admitted: {admitting(run)}"
    for round_ in run.voting.open.of(number).values():
        if round_.votes[number].call == call:
            return f"in {round_.describe(number)}: {entering(run, round_)}"
    running = run.table.get(seq)
    if running is not None:
        return f"in {running.title}, which has started: {finishing(run, running)}"
    sync = run.synchronisations.of(number)
    if sync is not None and sync.members[number].call == call:
        return f"in sync_shared_state(): {receiving(run, sync)}"
    measured = run.optimisations.current
    if measured is not None and measured.calls.get(number) == call:
        return f"in optimize_topology(): {measuring(run, measured)}"
    return ""


def admitting(run: Run) -> str:
    """What newcomers wait for."""
    round_ = run.voting.open.get(ADMITTING)
    late = run.membership.accepted() if round_ is None else run.voting.absent(round_)
    names = run.membership.names(late)
    return f"{names} must call {ADMITTING.kind.value}(){_elsewhere(run, late)}"


def entering(run: Run, round_: Round[object]) -> str:
    """What an open round waits for."""
    late = run.voting.absent(round_)
    if not late and round_.id == PENDING:
        return f"another peer must join the run, which has {len(round_.votes)}"
    return f"{run.membership.names(late)} must enter it{_elsewhere(run, late)}"


def finishing(run: Run, running: Running) -> str:
    """What a running collective waits for."""
    late = sorted(running.missing)
    return f"{run.membership.names(late)} must finish it{_done(late, running.progress)}"


def receiving(run: Run, sync: Sync) -> str:
    """What a synchronisation waits for."""
    late = sorted(sync.fetching)
    return f"{run.membership.names(late)} must receive it{_done(late, sync.progress)}"


def measuring(run: Run, optimisation: Optimisation) -> str:
    """What an optimisation waits for."""
    return f"{run.membership.names(sorted(optimisation.measuring))} measure links"


def _done(late: list[int], progress: Mapping[int, int]) -> str:
    """How far the awaited peers are that are behind all others; empty if none has said so."""
    told = sorted((progress[number], number) for number in late if number in progress)
    return "".join(f"; peer {number} has {done / 10:g} % of it" for done, number in told[:3])


def _elsewhere(run: Run, late: list[int]) -> str:
    """In which other calls the awaited peers are; for some of them."""
    stand = [
        f"; {run.membership.info(number)} stands in {round_.describe(number)}"
        for number in late[:3]
        for round_ in run.voting.open.of(number).values()
    ]
    return "".join(stand[:3])
