"""The exceptions of the API: whose fault it is, what still works, and what to call next.

    PCCLError                 any call that failed; `.result` says how
    +-- PeerLostError         RANK_CONNECTION_LOST: another peer went away
    +-- TooFewPeersError      TOO_FEW_PEERS: nobody else is there, or not enough
    +-- MismatchError         INVALID_USAGE, INVALID_ARGUMENT: peers stand in calls that never meet
    +-- KickedError           the master dropped this peer
    +-- MasterLostError       MASTER_CONNECTION_FAILED: the master cannot be reached
    +-- PCCLTimeoutError      a time limit of the caller's has passed; also a TimeoutError
    +-- DivergenceError       INVALID_ARGUMENT: shared state differs that should be equal
    +-- UnsupportedError      INVALID_USAGE, INVALID_ARGUMENT: this version cannot do that

All pickle, so they cross process boundaries. docs/errors.md lists what can happen, with its cause
and cure.
"""

from __future__ import annotations

from typing import ClassVar

from pccl.types import Result


class PCCLError(Exception):
    """A call failed.

    Raised as such for mistakes of the caller (INVALID_USAGE, INVALID_ARGUMENT, PENDING_ASYNC_OPS)
    that were noticed before anybody else was involved, so the communicator is usable and the
    message says what to do instead; and for INTERNAL_ERROR, after which it is best closed.

    Attributes:
        result: how the call ended.
        func_name: the call.
        message: why, and who: peers, addresses; in which phase of the call, and after how long.
        remedy: what to do about errors of this class; the text ends with it.
    """

    remedy: ClassVar[str] = ""

    def __init__(self, result: Result, func_name: str, message: str = "") -> None:
        # Not super(): OSError, a base of PCCLTimeoutError, would take the result for an errno.
        Exception.__init__(self, result, func_name, message)
        self.result = result
        self.func_name = func_name
        self.message = message

    def __str__(self) -> str:
        parts = [f"{self.func_name}: {self.result.name}"]
        parts += [part for part in (self.message, self.remedy) if part]
        return ": ".join(parts[:2]) + "".join(f" -> {part}" for part in parts[2:])

    def __reduce__(self) -> tuple[type[PCCLError], tuple[Result, str, str]]:
        return type(self), (self.result, self.func_name, self.message)

    @staticmethod
    def check(result: int, func_name: str) -> None:
        """Does nothing for SUCCESS.

        Raises:
            PCCLError: for any other value of a `Result`; the subclass that fits.
        """
        if result == Result.SUCCESS.value:
            return
        try:
            known = Result(result)
        except ValueError:
            why = f"{result} is not the value of a Result"
            raise PCCLError(Result.INTERNAL_ERROR, func_name, why) from None
        raise error_for(known, func_name)


class PeerLostError(PCCLError):
    """Another peer went away while a collective needed it: nobody's fault who gets this.

    The communicator is usable, world sizes are fresh, and the send buffer holds what it held. Call
    the collective again: it goes on with the peers that are left.
    """

    remedy = "call again: inputs hold what they held, and the next attempt goes on without the lost"


class TooFewPeersError(PCCLError):
    """This peer is alone in its group, and a collective needs two. Buffers are untouched.

    Or a first synchronisation of shared state wants `min_peers`, and there are fewer.

    The communicator is usable. Go on alone, and admit others when they come: `are_peers_pending`,
    then `update_topology`.
    """

    remedy = "admit others by are_peers_pending() and update_topology(); meanwhile go on without"


class MismatchError(PCCLError):
    """Peers stand in calls that can never meet; the message says who is in which.

    One in `update_topology` and one in `all_reduce`, or the same tag with another count: a mistake
    in the program that runs on them, which all of them are told. The communicator is usable and no
    buffer has changed. Make all peers take the same calls in the same order.
    """

    remedy = "make all peers take the same calls, with the same arguments, in the same order"


class KickedError(PCCLError):
    """The master dropped this peer, for the reason that the message gives.

    Its own fault, or a failure that only it had, such as shared state that is unlike all others' or
    an address that nobody reaches. This communicator is over, the run goes on without it. Repair
    the cause, then make a new one and connect.
    """

    remedy = "the run goes on without this peer: repair the cause, then connect a new Communicator"


class MasterLostError(PCCLError):
    """The master cannot be reached: it is down, or the network between is.

    This communicator is over. Check that the master runs and that its port is open, then make a new
    one and connect.
    """

    remedy = (
        "check that the master runs and that its port is open (pccl doctor HOST:PORT), then "
        "connect a new Communicator"
    )


class PCCLTimeoutError(PCCLError, TimeoutError):
    """The time limit that the caller gave has passed; the message says who was waited for.

    The communicator is usable. Call again, with more time or without the peers that are named.
    """

    remedy = "nothing has changed: call again, with more time, or see what keeps the others"


class DivergenceError(PCCLError):
    """Peers have different shared state at the same revision, and one of them wants an error then.

    The message names the peers and the entries. All peers of the group get it, the communicator is
    usable, and no memory has changed. Without `raise_on_divergence` the same call repairs it.
    """

    remedy = "call again without raise_on_divergence, which repairs it"


class UnsupportedError(PCCLError):
    """This version cannot do what was asked, though the API has a name for it.

    Nothing has happened and the communicator is usable. The message says what to use instead.
    """


_LEAVES: dict[Result, type[PCCLError]] = {
    Result.RANK_CONNECTION_LOST: PeerLostError,
    Result.TOO_FEW_PEERS: TooFewPeersError,
    Result.MASTER_CONNECTION_FAILED: MasterLostError,
}


def not_picklable(what: object, instead: str) -> TypeError:
    """The exception for what belongs to this process alone; to be raised by `__reduce__`."""
    return TypeError(f"a {type(what).__name__} cannot be pickled or copied: {instead}")


def error_for(result: Result, func_name: str, message: str = "") -> PCCLError:
    """The exception for a result, of the subclass that the result alone tells; to be raised.

    INVALID_USAGE and INVALID_ARGUMENT can be a caller's mistake, a mismatch or something that is
    unsupported, and a kick can have any result: whoever knows names the subclass instead.
    """
    return _LEAVES.get(result, PCCLError)(result, func_name, message)
