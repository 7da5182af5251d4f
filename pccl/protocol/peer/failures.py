"""How calls fail, as their callers are told. Pure functions."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.peer.calls import ENTERING, Collective
from pccl.protocol.peer.effects import Fail, Fault
from pccl.types import Result

GONE = "its caller waits no longer"
WHY_MAX = 1000  # characters of a reason that is sent to the master

_FAULTS: dict[int, Fault] = {
    m.Cause.MISMATCH: Fault.MISMATCH,
    m.Cause.TIMEOUT: Fault.TIMEOUT,
    m.Cause.DIVERGENCE: Fault.DIVERGENCE,
    m.Cause.MEMORY: Fault.OTHER,
    m.Cause.REORDERED: Fault.REORDERED,
}


def refused(call: int, refusal: m.CallError | m.Failure) -> Fail:
    """The failure of a call that the master refuses before anything has happened."""
    result = Result(refusal.result)
    lost = Fault.PEER_LOST if result is Result.RANK_CONNECTION_LOST else Fault.OTHER
    fault = _FAULTS.get(refusal.cause, lost)
    return Fail(
        call, result, refusal.why, fault, ENTERING, fault in (Fault.PEER_LOST, Fault.REORDERED)
    )


def failed(collective: Collective, told: m.Finished) -> Fail:
    """The failure of a collective that had started."""
    own = collective.impatient or collective.cause is not m.Cause.OTHER
    cause = m.Cause.TIMEOUT if collective.impatient else told.cause
    fault = _FAULTS.get(cause, Fault.PEER_LOST)
    lost = Result.RANK_CONNECTION_LOST
    return Fail(collective.call, lost, told.why, fault, collective.phase, again=not own)


def timed_out(call: int, why: str) -> Fail:
    """The failure of a call whose time was up before the master answered it."""
    return Fail(call, Result.RANK_CONNECTION_LOST, why, Fault.TIMEOUT, ENTERING)


def abandoned(call: int) -> Fail:
    """The failure of a call that its caller left by an exception."""
    return Fail(call, Result.RANK_CONNECTION_LOST, GONE, phase=ENTERING)
