"""One peer's membership in a run: the state that all calls of one `Communicator` share."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pccl.calls.joining import Patience, join
from pccl.calls.launch import error_of
from pccl.calls.ranks import KnownRanks
from pccl.calls.standing import Standing
from pccl.errors import error_for
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call, Note
from pccl.runtime.client.client import Client
from pccl.runtime.config import Config
from pccl.runtime.forks import FORKED
from pccl.runtime.room import NoRoomError, no_room, require_room
from pccl.runtime.uninterrupted import aside
from pccl.types import Result


class Membership:
    """One peer's membership: before it begins, while it lasts, and after its end.

    Attributes:
        standing: the calls in progress.
        ranks: the ranks that the program knows.
        revision: the shared state's revision after the last synchronisation; 0 before the first.
        synced: whether this peer has synchronised shared state since it joined.
        has_admitted: whether this peer has made a call of `admit` since it joined.
    """

    def __init__(self) -> None:
        self.standing = Standing()
        self.ranks = KnownRanks()
        self.revision = 0
        self.synced = self.has_admitted = False
        self._client: Client | None = None
        self._finalizer: weakref.finalize[..., object] | None = None

    # ---- its begin and end ----

    def begin(
        self,
        host: str,
        port: int,
        config: Config,
        make: Callable[[str], Client],
        patience: Patience,
        owner: object,
    ) -> None:
        """Joins a run; see `joining.join`. Leaves it at the latest when `owner` is collected.

        Args:
            host: host of the master.
            port: port of the master.
            config: timings and limits.
            make: makes a client of the master at an address.
            patience: the time limits of the attempts.
            owner: the object that uses this membership.

        Raises:
            PCCLError: INVALID_USAGE: this peer is in a run already, or no port is free for it;
                INTERNAL_ERROR: the system has no descriptors or threads for it; or as `join`.
        """
        if self._client is not None and self._client.over is FORKED:
            raise error_of("connect", FORKED)
        if self._client is not None and self._client.over is None:
            why = "this communicator is connected already"
            raise error_for(Result.INVALID_USAGE, "connect", why)
        self.standing.single_threaded()
        self.end()  # the previous membership is over, but its threads may remain
        try:
            aside(require_room)  # it opens threads and descriptors, and must close them
        except NoRoomError as error:
            raise error_for(Result.INTERNAL_ERROR, "connect", str(error)) from None

        def begun(address: str) -> Client:
            try:
                return make(address)
            except OSError as error:
                if lacking := no_room(error):  # there was room when it looked
                    raise error_for(Result.INTERNAL_ERROR, "connect", str(lacking)) from None
                cure = ": choose a wider PCCL_PORT_RANGE (port_range=)" if config.ports else ""
                why = f"for bulk data this peer {error.strerror or error}{cure}"
                raise error_for(Result.INVALID_USAGE, "connect", why) from None

        def admitted(client: Client) -> None:
            self.ranks.tell(client.plan, client.number)
            self.synced = self.has_admitted = self.standing.any_collective = False
            why = "the communicator was deleted"
            self._finalizer = weakref.finalize(owner, client.close, why)
            self._client = client

        join(host, port, config.handshake_timeout_s, begun, admitted, patience)

    def end(self) -> None:
        """Leaves the run; collectives in progress fail and are restored. Idempotent."""
        if self._client is not None:
            self._client.close("the communicator was closed")
        if self._finalizer is not None:
            self._finalizer.detach()

    @property
    def is_fresh(self) -> bool:
        """Whether the others admitted this peer in the call that it is about to make too."""
        return not (self.has_admitted or self.standing.any_collective)

    # ---- the peer, for a call ----

    def client(self, name: str) -> Client:
        """The client, for the API call `name`.

        Raises:
            PCCLError: INVALID_USAGE before `begin`; after the end, the reason for the end.
        """
        client = self._client
        if client is None:
            why = "this communicator is not connected: call connect() first"
            raise error_for(Result.INVALID_USAGE, name, why)
        if client.over is not None:
            raise error_of(name, client.over)  # in a forked child too, where locks may stay locked
        self.standing.single_threaded()
        return client

    def last(self, name: str) -> Client:
        """The client, also when its membership is over.

        Raises:
            PCCLError: INVALID_USAGE before `begin`.
        """
        return self.client(name) if self._client is None else self._client

    def seen(self, name: str) -> Client:
        """The client; this thread has now seen its ranks."""
        client = self.client(name)
        self.ranks.see(client.plan, client.number)
        return client

    def one_of_several(self, name: str) -> Client:
        """The client, if its group has other members.

        Raises:
            PCCLError: TOO_FEW_PEERS, or as `client`.
        """
        client = self.client(name)
        if client.world.local_size < 2:
            self.ranks.see(client.plan, client.number)
            why = f"this peer is alone in its group of the run at {client.master}"
            raise error_for(Result.TOO_FEW_PEERS, name, why)
        return client

    # ---- a call that is a round ----

    def stand(self, name: str, client: Client, take_part: Callable[[Call], Note]) -> effects.Answer:
        """Takes part in a round of the whole run until it ends.

        Raises:
            PCCLError: the round has failed, or another call in progress excludes it.
        """
        call = client.call()
        try:
            self.standing.enter(name, call)
            end = take_part(call)
            self.standing.leave(call)
        except BaseException:
            self.let_go(client, call)
            raise
        if isinstance(end, effects.Fail):
            raise error_of(name, end, call.began_s)
        assert isinstance(end, effects.Answer)
        return end

    def let_go(self, client: Client, call: Call) -> None:
        """Abandons a call that an exception has left."""
        try:
            client.let_go(call)
        finally:
            self.standing.leave(call)
