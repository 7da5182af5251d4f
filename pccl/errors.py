"""The exceptions of the API: their causes, what still works, and what to call next.

    PCCLError                 any call that failed; `.result` says how
    +-- PeerLostError         RANK_CONNECTION_LOST: another peer went away
    +-- TooFewPeersError      TOO_FEW_PEERS: this peer is alone, or too few peers are present
    +-- MismatchError         INVALID_USAGE, INVALID_ARGUMENT: the peers' calls do not match
    +-- KickedError           the master dropped this peer
    +-- MasterLostError       MASTER_CONNECTION_FAILED: the master cannot be reached
    +-- RunFinishedError      INVALID_USAGE: the run is finished; also a SystemExit, of status 0
    +-- PCCLTimeoutError      TIMEOUT: a time limit has passed; also a TimeoutError
    +-- NotFiniteError        INVALID_ARGUMENT: a peer has sent a NaN or an infinity
    +-- DivergenceError       INVALID_ARGUMENT: shared state differs that should be equal
    +-- UnsupportedError      INVALID_USAGE, INVALID_ARGUMENT: not supported by this version

Each is also a RuntimeError. Wrong arguments raise ValueError or TypeError, before anything has
happened; arrays that do not match each other raise ArgumentError, a subclass of ValueError.

All can be pickled, so they cross process boundaries. docs/reference/errors.md lists every error,
with its cause and cure.
"""

from __future__ import annotations

from typing import ClassVar

from pccl.types import Result

# a collective has failed on all peers, inputs are unchanged, and the program may call again
AGAIN = (Result.RANK_CONNECTION_LOST, Result.TIMEOUT)


class ArgumentError(ValueError, AssertionError):
    """Arguments do not match each other, or something is missing.

    It is a ValueError. pypccl used assertions here, so it is also an AssertionError for programs
    that were written for pypccl.
    """


class PCCLError(RuntimeError):
    """A call failed.

    This class itself is raised for mistakes of the caller (INVALID_USAGE, INVALID_ARGUMENT,
    PENDING_ASYNC_OPS), before any other peer is involved: the communicator remains usable, and the
    message says what to do instead. It is also raised for INTERNAL_ERROR; then close the
    communicator.

    Attributes:
        result: how the call ended.
        func_name: the call.
        message: the cause, with peers and addresses, the phase of the call, and the elapsed time.
        remedy: what to do about errors of this class; the error's text ends with it.
    """

    remedy: ClassVar[str] = ""

    def __init__(self, result: Result, func_name: str, message: str = "") -> None:
        # Not super(): OSError, a base of PCCLTimeoutError, would mistake the result for an errno.
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
            PCCLError: for any other value of a `Result`; the matching subclass.
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
    """Another peer was lost during a call, or has left it by an exception such as Ctrl-C.

    The peer that gets this error is not at fault. The communicator is usable, world sizes are up to
    date, and the send buffer is unchanged. Call again: the call runs with the remaining peers.
    """

    remedy = "call again: inputs are unchanged, and the next attempt runs without the lost peer"


class RanksChangedError(PeerLostError):
    """The ring has a new order that a peer did not know yet; no peer is lost.

    The communicator is usable. Call again, with the current ranks.
    """


class TooFewPeersError(PCCLError):
    """This peer is alone in its group, and a collective needs two. Buffers are untouched.

    Also raised when the first synchronization of shared state needs `min_peers` and fewer are
    present.

    The communicator is usable. Continue alone, and admit others when they arrive:
    `are_peers_pending`, then `update_topology`.
    """

    remedy = "call admit() to admit others, or continue alone"


class MismatchError(PCCLError):
    """Peers are in calls that can never match; the message says which peer is in which call.

    For example, one peer is in `update_topology` and another in `all_reduce`, or two peers use one
    tag with different counts. This is a mistake in the program. If a newcomer or a minority differs
    from the others, only it gets the error and is dropped from the run; the others continue without
    it. If there is no majority, all peers get the error, the communicator is usable and no buffer
    has changed. Make the same calls on all peers in the same order. After `update_topology`, the
    next call of the others must be the first call of the newcomer; `admit` arranges that.
    """

    remedy = (
        "make the same calls on all peers, with the same arguments, in the same order; admit() "
        "may be anywhere in a loop"
    )


class KickedError(PCCLError):
    """The master dropped this peer, for the reason that the message gives.

    The cause concerns this peer only, such as shared state that differs from that of all others, or
    an address that no other peer can reach. This communicator can no longer be used; the run
    continues without it. Fix the cause, then connect a new communicator.
    """

    remedy = "the run continues without this peer: fix the cause, then connect a new Communicator"


class MasterLostError(PCCLError):
    """The master cannot be reached: the master or the network is down.

    This communicator can no longer be used. Check that the master runs and that its port is open,
    then connect a new communicator.
    """

    remedy = (
        "check that the master runs and that its port is open (pccl doctor HOST:PORT), then "
        "connect a new Communicator"
    )


class RunFinishedError(PCCLError, SystemExit):
    """The run is finished (`Communicator.finish`), and the communicator is unusable.

    A program that does not catch it exits with status 0, so launchers do not restart it.
    """

    remedy = "for another run, restart the master"
    code = 0


class PCCLTimeoutError(PCCLError, TimeoutError):
    """A time limit has passed; the message says whose, and which peers the call waited for.

    The communicator is usable. Call again, with more time or without these peers.
    """

    remedy = "nothing has changed: call again with more time, or find out what delays the others"


class NotFiniteError(PCCLError, ArithmeticError):
    """A peer's array has a NaN or an infinity, and all peers have passed `check="finite"`.

    The message names the peer. All peers of the group get this error, the communicator is usable,
    and no array has changed.
    """

    remedy = "skip this step on all peers; check the data and the device of that peer"


class DivergenceError(PCCLError):
    """Peers have different shared state at the same revision, and one set `raise_on_divergence`.

    The message names the peers and the entries. All peers of the group get this error, the
    communicator is usable, and no memory has changed. Without `raise_on_divergence`, the same call
    repairs the difference. `Communicator.run` raises this error at its end, on the minority.
    """

    remedy = "sync_shared_state without raise_on_divergence repairs it"


class UnsupportedError(PCCLError):
    """The API defines the request, but this version does not support it.

    Nothing has happened and the communicator is usable. The message says what to use instead.
    """


_LEAVES: dict[Result, type[PCCLError]] = {
    Result.RANK_CONNECTION_LOST: PeerLostError,
    Result.TOO_FEW_PEERS: TooFewPeersError,
    Result.MASTER_CONNECTION_FAILED: MasterLostError,
    Result.TIMEOUT: PCCLTimeoutError,
}


def not_picklable(what: object, instead: str) -> TypeError:
    """The exception for objects that belong to one process; `__reduce__` raises it."""
    return TypeError(f"a {type(what).__name__} cannot be pickled or copied: {instead}")


def error_for(result: Result, func_name: str, message: str = "") -> PCCLError:
    """The exception for a result, of the subclass that follows from the result alone.

    INVALID_USAGE and INVALID_ARGUMENT can be a caller's mistake, a mismatch, or something
    unsupported, and a KickedError can have any result: callers that know more use the subclass.
    """
    return _LEAVES.get(result, PCCLError)(result, func_name, message)
