"""How calls fail, as their callers are told. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from pccl.errors import (
    DivergenceError,
    MismatchError,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
)
from pccl.protocol import messages as m
from pccl.protocol.peer.calls import ENTERING, Collective, Syncing
from pccl.protocol.peer.effects import Fail
from pccl.protocol.rounds import WITHDRAWN, Kind
from pccl.types import Result

_ERRORS: dict[int, type[PCCLError]] = {
    m.Cause.MISMATCH: MismatchError,
    m.Cause.TIMEOUT: PCCLTimeoutError,
    m.Cause.DIVERGENCE: DivergenceError,
    m.Cause.MEMORY: PCCLError,
}


def refused(refusal: m.CallError) -> Fail:
    """The failure that the master tells, before anything has happened."""
    result = Result(refusal.result)
    lost = PeerLostError if result is Result.RANK_CONNECTION_LOST else PCCLError
    error = _ERRORS.get(refusal.cause, lost)
    again = error is PeerLostError
    return Fail(refusal.call, result, refusal.why, error, ENTERING, again)


def failed(collective: Collective, told: m.Finished) -> Fail:
    """The failure of a collective that had begun, by whoever's fault."""
    own = collective.impatient or collective.cause is not m.Cause.OTHER
    cause = m.Cause.TIMEOUT if collective.impatient else told.cause
    error = _ERRORS.get(cause, PeerLostError)
    lost = Result.RANK_CONNECTION_LOST
    return Fail(collective.call, lost, told.why, error, collective.phase, again=not own)


def parting(fail: Fail, vote: m.PeerMessage | None, long: Collective | Syncing | None) -> Fail:
    """What a caller is told that does not wait for the outcome of its call.

    Args:
        fail: why.
        vote: its vote, if the call is a round and nothing else.
        long: what is known of it, if it is a call that lasts longer.
    """
    kind = Kind.START
    if isinstance(vote, m.TopologyVote):
        kind = Kind.TOPOLOGY
    elif isinstance(long, Syncing):
        kind = Kind.OPTIMIZE if long.optimises else Kind.SYNC
    phase = ENTERING if long is None else long.phase
    return replace(fail, result=WITHDRAWN[kind], phase=phase)
