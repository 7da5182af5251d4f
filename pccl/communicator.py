"""`Communicator`: one peer's membership in a run, and its collectives."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

import xxhash

from pccl.collectives import Collectives
from pccl.errors import PCCLTimeoutError, error_for, not_picklable
from pccl.ext import ffi, lib
from pccl.joining import Patience, join
from pccl.launch import error_of
from pccl.logs import configure_logging
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call, Deadline, Note
from pccl.runtime.client.client import Client
from pccl.runtime.client.devices import HostView
from pccl.runtime.client.probe import optimise
from pccl.runtime.client.staging import Region
from pccl.runtime.client.sync import Outcome, Wish, synchronise
from pccl.runtime.config import Config, machine_id
from pccl.runtime.forks import FORKED
from pccl.runtime.room import NoRoomError, require_room
from pccl.runtime.uninterrupted import aside
from pccl.security import Security
from pccl.shared_state import SharedState
from pccl.text import (
    address_text,
    parse_address,
    parse_advertised,
    parse_ports,
)
from pccl.types import (
    Attribute,
    EntryDivergence,
    Result,
    SharedStateProgress,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)
from pccl.version import __version__

log = logging.getLogger("pccl")

AGAIN_S = 0.002  # who asks whether peers are pending so soon after a no asks in a loop,
PATIENCE_S = 0.02  # and hears another no so much later: no core is busy with nothing
FOREVER_S = threading.TIMEOUT_MAX


class Communicator(Collectives):
    """One peer of a run: joins it at a master, and takes part in its collectives.

        with pccl.Communicator("host:48148") as comm:
            comm.all_reduce(x)

    Usable from several threads. Construction does no I/O.

    Args:
        address: `host:port` of the master; an IPv6 address stands in brackets.
        peer_group: collectives and shared state are among the peers of one group.
        p2p_connection_pool_size: connections (lanes) to each neighbour; 0 chooses well.
        security: encrypts, with the keys in this directory (see `pccl keys`); None: in the
            directory PCCL_CURVE_DIR, and without that not at all.
        advertise: the host at which other peers reach this one; None: PCCL_ADVERTISE, and without
            that the address that the master sees.
        port_range: "FIRST-LAST": the TCP ports on one of which this peer listens for bulk data;
            None: PCCL_PORT_RANGE, and without that any.
        connect_timeout: seconds for which `connect` tries to reach a master that is not up yet, in
            any number of attempts; None: PCCL_CONNECT_TIMEOUT_S, and without that as many attempts
            as `connect` is told to make.

    Raises:
        AssertionError: `address` has no colon.
        ValueError: `address` is malformed otherwise, or another argument is out of range.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        security: Security | str | os.PathLike[str] | None = None,
        advertise: str | None = None,
        port_range: str | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        self._host, self._port = parse_address(address)
        if not 0 <= peer_group < 1 << 32:
            raise ValueError(f"peer_group is {peer_group}: it must be in 0 to 2**32 - 1")
        if not 0 <= p2p_connection_pool_size <= 256:
            raise ValueError(
                f"p2p_connection_pool_size is {p2p_connection_pool_size}: it must be in 0 to 256"
            )
        self._group = peer_group
        self._pool_size = p2p_connection_pool_size
        self._security = security
        self._settings: dict[str, Any] = {}
        if advertise is not None:
            self._settings["advertise"] = parse_advertised(advertise, "advertise")
        if port_range is not None:
            self._settings["ports"] = parse_ports(port_range, "port_range")
        Deadline(connect_timeout, "connect_timeout")  # is it one?
        self._connect_timeout = connect_timeout
        super().__init__()
        self._master = address_text(self._host, self._port)
        self._client: Client | None = None
        self._finalizer: weakref.finalize[..., Communicator] | None = None
        self._shared_revision = 0
        self._asked_s = -math.inf  # when `are_peers_pending` was answered by no

    # ---- joining and leaving ----

    def connect(self, n_attempts: int = 5, *, timeout: float | None = None) -> None:
        """Joins the run; returns when all accepted peers have admitted this one.

        They admit it by `update_topology`; the first peer of a run is accepted at once.

        Args:
            n_attempts: tries to reach the master, one second apart. With the communicator's
                `connect_timeout`, or PCCL_CONNECT_TIMEOUT_S, that limit counts instead.
            timeout: seconds for the whole call: until the master is reached, and this peer is
                admitted. It ends the call in any case; None: admission takes as long as it takes.

        Raises:
            PCCLTimeoutError: the master did not answer, or the peers did not admit this one, within
                `timeout`; this peer has left again.
            PCCLError: MASTER_CONNECTION_FAILED when the master did not answer in `n_attempts` or
                within `connect_timeout`; INVALID_USAGE when already connected, when the master
                refuses this peer, or when keys are missing or unsafe (the message says why);
                INTERNAL_ERROR when the system has no descriptors or threads for it.
            ValueError: `n_attempts` is not positive, `timeout` is no time to wait for, or a PCCL_
                environment variable is malformed.
        """
        config = replace(Config.from_env(), **self._settings)
        limit = self._connect_timeout
        if limit is None:
            limit = config.connect_timeout_s
        patience = Patience(self._master, n_attempts, limit, timeout)
        configure_logging()
        if self._client is not None and self._client.over is FORKED:
            raise error_of("connect", FORKED)
        if self._client is not None and self._client.over is None:
            why = "this communicator is connected already"
            raise error_for(Result.INVALID_USAGE, "connect", why)
        self._standing.single_threaded()
        self.close()  # of what is over, there are threads left
        security = Security.of(self._security)
        try:
            aside(require_room)  # which has threads and descriptors meanwhile
        except NoRoomError as error:
            raise error_for(Result.INTERNAL_ERROR, "connect", str(error)) from None

        def begin(address: str) -> Client:
            return self._begin(address, config, security)

        join(self._host, self._port, config.link_timeout_s, begin, self._admitted, patience)

    def _begin(self, address: str, config: Config, security: Security | None) -> Client:
        def hello(port: int, ipc: str) -> m.Hello:
            return m.Hello(
                m.PROTOCOL_VERSION,
                __version__,
                self._group,
                config.advertise,
                port,
                ipc,
                machine_id(),
                arithmetic_digest(),
            )

        host, port, lanes = self._host, self._port, self._pool_size
        try:
            return Client(host, port, address, hello, lanes, config, security)
        except OSError as error:
            why = f"for bulk data this peer {error.strerror or error}{_cure(config)}"
            raise error_for(Result.INVALID_USAGE, "connect", why) from None

    def _admitted(self, client: Client) -> None:
        self._ranks.tell(client.plan, client.number)
        self._finalizer = weakref.finalize(self, client.close, "the communicator was deleted")
        self._client = client

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "it is this process's place in a run; make one in each process")

    def close(self) -> None:
        """Leaves the run; collectives in progress fail and are restored. Idempotent."""
        if self._client is not None:
            self._client.close("the communicator was closed")
        if self._finalizer is not None:
            self._finalizer.detach()

    def __enter__(self) -> Communicator:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- who is there ----

    def get_attribute(self, attribute: Attribute) -> int:
        """A world size, of accepted peers, as of now.

        Raises:
            PCCLError: INVALID_USAGE before `connect`.
        """
        client = self._connected("get_attribute")
        self._see_ranks(client)
        world = client.world
        match attribute:
            case Attribute.GLOBAL_WORLD_SIZE:
                return world.global_size
            case Attribute.LOCAL_WORLD_SIZE:
                return world.local_size
            case Attribute.NUM_DISTINCT_PEER_GROUPS:
                return world.groups
            case Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
                return world.largest
        raise ValueError(f"{attribute!r} is no Attribute")

    @property
    def world_size(self) -> int:
        """Accepted peers of this peer's group. Raises PCCLError INVALID_USAGE before `connect`."""
        return self.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    @property
    def rank(self) -> int:
        """This peer's position in the ring; it changes when peers come and go."""
        client = self._connected("rank")
        self._see_ranks(client)
        return self._ranks.of(client.number).rank

    @property
    def peers(self) -> list[str]:
        """The accepted peers of the group, in words, by rank."""
        client = self._connected("peers")
        self._see_ranks(client)
        infos = {info.peer: str(info) for info in client.plan.peers}
        return [infos[number] for number in self._ranks.order if number in infos]

    # ---- rounds of the run ----

    def update_topology(self, *, timeout: float | None = None) -> None:
        """Admits pending peers. Returns when all accepted peers of all groups have called it.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
                this one), PENDING_ASYNC_OPS (a collective is launched and not awaited).
        """
        self._admit(Deadline(timeout))

    def _admit(self, deadline: Deadline) -> int:
        """Admits pending peers; how many the group has then, the same for all."""
        client = self._connected("update_topology")

        def take_part(call: Call) -> Note:
            client.update_topology(call)
            return deadline.next(client, call)

        size = self._stand("update_topology", client, take_part).value
        self._ranks.tell(client.plan, client.number)
        assert isinstance(size, int)
        return size

    def are_peers_pending(self, *, timeout: float | None = None) -> bool:
        """Whether peers wait to be admitted: the same answer for all.

        All accepted peers of all groups must ask. Collectives may run in other threads meanwhile.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
                this one).
        """
        return self._ask(Deadline(timeout), PATIENCE_S if self._asks_again else 0.0)

    def wait_for_peers(self, n: int, *, timeout: float | None = None) -> int:
        """Admits newcomers until this peer's group has at least `n` members.

        Every peer of the run that is there has to call this, or `are_peers_pending` and
        `update_topology`, as a training loop does: newcomers are admitted by all. It waits for
        events and does not poll; after some seconds the log says for whom.

        Args:
            n: members, this one included.
            timeout: seconds to wait for them.

        Returns:
            How many there are: the same on all peers that were in the group when it returned.

        Raises:
            PCCLTimeoutError: the time-out has passed; who has come stays.
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS, as for `update_topology`.
            ValueError: `n` is not positive.
        """
        if n < 1:
            raise ValueError(f"n is {n}: it must be at least 1")
        deadline = Deadline(timeout)
        client = self._connected("wait_for_peers")
        size = client.world.local_size
        try:
            while size < n:
                size = self._await_newcomers(deadline, FOREVER_S) or size
        except PCCLTimeoutError as error:
            why = f"{client.world.local_size} of {n} peers are there after {timeout:g} s"
            raise PCCLTimeoutError(error.result, "wait_for_peers", why) from None
        return size

    def _await_newcomers(self, deadline: Deadline, patience_s: float) -> int:
        """Waits for newcomers and admits them; how many the group has then, the same for all.

        0: none have come within `patience_s`, or before somebody else who is asked lost patience.
        """
        return self._admit(deadline) if self._ask(deadline, patience_s) else 0

    def _ask(self, deadline: Deadline, patience_s: float) -> bool:
        """Whether peers are pending. A no may come that much later, a yes at once."""
        client = self._connected("are_peers_pending")
        stuck = self._standing.single_threaded() and deadline.left_s is None

        def take_part(call: Call) -> Note:
            client.are_peers_pending(call, stuck, patience_s > 0)
            if patience_s > 0:
                note = deadline.next_within(client, call, patience_s)
                if note is not None:
                    return note
                client.hurry(call)
            return deadline.next(client, call)

        pending = bool(self._stand("are_peers_pending", client, take_part).value)
        self._asked_s = -math.inf if pending else time.monotonic()
        return pending

    @property
    def _asks_again(self) -> bool:
        """Whether the program has just been told that nobody is pending: it may be in a loop."""
        return time.monotonic() - self._asked_s < AGAIN_S

    def optimize_topology(self, *, timeout: float | None = None) -> None:
        """Measures the links between the peers, and gives each group the rings that suit them.

        All accepted peers of all groups must call it. Each pair of peers on different machines
        sends to each other as fast as the link takes it for about half a second, or ten round
        trips, several pairs at once: n peers take about n times as long. The order of a ring, and
        with it each `rank`, changes only if an all-reduce of 64 MiB would take at least a fifth
        less time; the new order holds for whoever stays until it is optimised again. A pair that
        cannot connect is no obstacle, as long as there is a ring without it. Where links carry more
        together than each alone, several rings share out the data (3 to 6 peers).

        Args:
            timeout: seconds to wait for the others, and for the measurements.

        Raises:
            PCCLTimeoutError: TOPOLOGY_OPTIMIZATION_FAILED, for all: one of them waited no longer.
            PCCLError: INVALID_USAGE (not connected, fewer than two peers, or others stand in calls
                that can never meet this one), PENDING_ASYNC_OPS.
        """
        deadline = Deadline(timeout)
        client = self._connected("optimize_topology")
        if client.world.global_size < 2:
            why = "this peer is alone in the run: there is no order to optimise"
            raise error_for(Result.INVALID_USAGE, "optimize_topology", why)
        self._stand("optimize_topology", client, lambda call: optimise(client, call, deadline))
        self._ranks.tell(client.plan, client.number)

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        timeout: float | None = None,
        progress: Callable[[SharedStateProgress], None] | None = None,
        raise_on_divergence: bool = False,
        min_peers: int = 1,
    ) -> SharedStateSyncInfo:
        """Makes the shared state of all peers of the group bit-identical.

        Every peer offers digests of its entries, unless it is RECEIVE_ONLY; the content that is
        most common among those with the highest revision wins (a tie goes to the peer that was
        accepted first). Peers that differ fetch exactly the entries that differ, from all peers
        that have them at once, verify them, and only then overwrite their own, so a call that fails
        has changed nothing. Memory: a copy of what differs, meanwhile.

        Args:
            shared_state: must not change during the call; `revision` is set to the elected one.
            strategy: ENFORCE_POPULAR on all peers of the group; or else SEND_ONLY on those that
                have what others lack, and RECEIVE_ONLY on those whose content does not count.
            timeout: seconds to wait for the others.
            progress: called in this thread, up to ten times a second, while this peer receives.
            raise_on_divergence: raise on all peers where content differs at the same revision.
            min_peers: a group begins with so many, or with the most that any of its peers wants.

        Returns:
            Payload bytes sent and received by this peer; (0, 0) everywhere when all were equal. It
            also tells which peers' content had diverged, and how.

        Raises:
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS; NO_SHARED_STATE_AVAILABLE (all are
                RECEIVE_ONLY); INVALID_ARGUMENT (the revisions break the rules: on all peers, or on
                those alone whose revision is too high).
            TooFewPeersError: the group cannot begin yet (`min_peers`); on all peers.
            DivergenceError: INVALID_ARGUMENT: content has diverged, and some peer raises then.
            KickedError: INVALID_ARGUMENT: the entries of this peer are not those of the others, it
                is SEND_ONLY and another content was elected, or it has another strategy than
                ENFORCE_POPULAR where others have that.
        """
        deadline = Deadline(timeout)
        if min_peers < 1:
            raise ValueError(f"min_peers is {min_peers}: it must be at least 1")
        client = self._connected("sync_shared_state")
        call = client.call()
        wish = Wish(strategy.value, raise_on_divergence, progress, deadline, min_peers)
        try:
            self._standing.enter("sync_shared_state", call)
            outcome, regions = self._synchronise(client, call, shared_state, wish)
            self._standing.leave(call)
        except BaseException:
            self._let_go(client, call)
            raise
        end = outcome.end
        if outcome.error is not None:
            raise outcome.error
        if isinstance(end, effects.Fail):
            raise error_of("sync_shared_state", end, call.began_s)
        divergence = tuple(_divergence(end, regions, client))
        for one in divergence:
            log.warning("content has diverged at revision %d: %s", end.revision, one)
        return SharedStateSyncInfo._found(
            end.tx_bytes,
            end.rx_bytes,
            hashed_bytes=outcome.hashed_bytes,
            hash_seconds=outcome.hash_seconds,
            divergence=divergence,
        )

    def _synchronise(
        self, client: Client, call: Call, shared_state: SharedState, wish: Wish
    ) -> tuple[Outcome, list[Region]]:
        memory = HostView(shared_state._buffers)
        regions = shared_state._regions(memory)

        def adopt(synced: effects.Synced, overwritten: tuple[int, ...]) -> None:
            memory.write_back(overwritten)
            shared_state.revision = self._shared_revision = synced.revision

        owner = shared_state, memory
        revision = shared_state.revision
        return synchronise(client, call, regions, revision, wish, owner, adopt), regions

    @property
    def revision(self) -> int:
        """The shared state's revision after the last synchronisation; 0 before."""
        return self._shared_revision

    # ---- helpers ----

    def _connected(self, name: str) -> Client:
        client = self._client
        if client is None:
            why = "this communicator is not connected: call connect() first"
            raise error_for(Result.INVALID_USAGE, name, why)
        if client.over is not None:
            raise error_of(name, client.over)  # in a forked child too, where locks may stay locked
        self._standing.single_threaded()
        return client

    def _stand(
        self, name: str, client: Client, take_part: Callable[[Call], Note]
    ) -> effects.Answer:
        """Takes part in a round of the whole run, to its end."""
        call = client.call()
        try:
            self._standing.enter(name, call)
            end = take_part(call)
            self._standing.leave(call)
        except BaseException:
            self._let_go(client, call)
            raise
        if isinstance(end, effects.Fail):
            raise error_of(name, end, call.began_s)
        assert isinstance(end, effects.Answer)
        return end

    def _let_go(self, client: Client, call: Call) -> None:
        """An exception takes this thread out of a call."""
        try:
            client.let_go(call)
        finally:
            self._standing.leave(call)


def _cure(config: Config) -> str:
    return ": choose a wider PCCL_PORT_RANGE (port_range=)" if config.ports else ""


def _divergence(
    synced: effects.Synced, regions: Sequence[Region], client: Client
) -> Iterator[EntryDivergence]:
    infos = {info.peer: str(info) for info in client.plan.peers}
    for one in synced.divergence:
        for found in one.differences:
            if found.entry < len(regions):
                region = regions[found.entry]
                yield EntryDivergence(
                    infos.get(one.peer, f"peer {one.peer}"),
                    region.name,
                    region.nbytes,
                    found.nbytes,
                    found.ulp,
                    found.nans,
                    found.nans_elected,
                )


def arithmetic_digest() -> bytes:
    """Names this machine's arithmetic: XXH3-128 of what the kernels compute of fixed inputs."""
    size = lib.pccl_self_test(ffi.NULL, 0)
    out = ffi.new("unsigned char[]", size)
    lib.pccl_self_test(out, size)
    return xxhash.xxh3_128_digest(ffi.buffer(out))
