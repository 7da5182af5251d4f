"""The calls in progress on one peer: rounds of the run or group, and collectives by tag."""

from __future__ import annotations

import threading

from pccl.errors import error_for
from pccl.protocol.rounds import EXCLUSIVE
from pccl.runtime.client.call import Call
from pccl.types import Result


class Standing:
    """The calls in progress, and which calls may begin beside them.

    A launched collective counts as in progress until it is awaited, or can no longer be awaited.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handle may be collected while it is held
        self._rounds: dict[str, Call] = {}
        self._tags: dict[int | str, Call] = {}
        self._user: threading.Thread | None = None  # the thread that made the latest call
        self._shared = False  # whether several threads that live have made calls
        self.any_collective = False  # whether a collective has been launched since it was reset

    def enter(self, name: str, call: Call, *tags: int | str) -> None:
        """A call begins; `tags` are those of a collective, and in a send with the two peers.

        Raises:
            PCCLError: PENDING_ASYNC_OPS, INVALID_USAGE or INVALID_ARGUMENT: a call in progress
                excludes it.
        """
        with self._lock:
            self._may_enter(name)
            if not tags:
                self._rounds[name] = call
            self.any_collective |= bool(tags)
            for tag in tags:
                if self._tags.setdefault(tag, call) is not call:
                    raise error_for(Result.INVALID_ARGUMENT, name, _in_use(tag))

    def _may_enter(self, name: str) -> None:
        if name in EXCLUSIVE and self._tags:
            tags = sorted(self._tags, key=str)
            why = f"collectives are launched and not awaited (tags {tags}): wait() for them first"
            raise error_for(Result.PENDING_ASYNC_OPS, name, why)
        rounds = self._rounds.keys()
        others = rounds & (EXCLUSIVE | {name}) if name not in EXCLUSIVE else rounds
        if others:
            why = f"another thread of this peer stands in {min(others)}()"
            raise error_for(Result.INVALID_USAGE, name, why)

    def leave(self, call: Call) -> None:
        """A call has ended, if it ever began. Idempotent."""
        with self._lock:
            for name in [name for name, other in self._rounds.items() if other is call]:
                del self._rounds[name]
            for tag in [tag for tag, other in self._tags.items() if other is call]:
                del self._tags[tag]

    def single_threaded(self) -> bool:
        """Whether this thread is the only one there that has ever made a call.

        If so, it makes no other call while it waits in this one, and its vote says so: the master
        can tell it if no peer will ever join that call.
        """
        with self._lock:
            user, self._user = self._user, threading.current_thread()
            self._shared |= user is not None and user is not self._user and user.is_alive()
            return not self._shared


def _in_use(tag: int | str) -> str:
    return f"a collective with tag {tag} is launched and not awaited: use another tag"
