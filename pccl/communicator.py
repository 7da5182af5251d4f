"""`Communicator`: one peer of a run, and all the calls that it makes.

All collectives follow the same rules. Every peer of the group must enter the same call, with the
same tag and the same work; who asks for something else is named in an error on all peers. A
collective succeeds on all of them or on none: when a peer is lost it fails with `PeerLostError` on
all survivors, every buffer that was given, in place too, holds what it held before, and calling
again is enough. An array that only receives is unspecified then.

One array is a numpy array or torch tensor of any shape, of a dtype of `DataType`. Its elements fill
one stretch of memory, in any order: contiguous, transposed, torch.channels_last. It is moved as it
lies, so it must lie in the same order on all peers; where it does not, all are told who has which.
A list or dict of arrays is one collective: all of them are reduced (or gathered, ...) over the same
peers, or none is. Dicts need the same keys on all peers, in any order.

Ranks are the positions of the first ring, `Communicator.rank`: they shift when peers come and go.
Where they matter (all but all-reduce and barrier), a collective counts on the ranks that its thread
has seen last: when it read `rank`, `world_size` or `peers`, when `PeerLostError` told it of a loss,
or when `connect`, `update_topology` or `optimize_topology` returned, in whichever thread. If they
are not those any more the collective fails with `PeerLostError`, before anything happens.

An exception that leaves a call, of a signal handler for instance, gives the call up: when it is
raised, no buffer is used any more. The other peers may have succeeded all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn

from pccl.calls import operands
from pccl.calls.admission import Admission
from pccl.calls.handle import AsyncReduceHandle
from pccl.calls.joining import Patience, introduced
from pccl.calls.launcher import Launcher
from pccl.calls.membership import Membership
from pccl.calls.operands import A, Arrays
from pccl.calls.synchronising import sync_shared_state
from pccl.descriptors import ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import not_picklable
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.client import Client
from pccl.runtime.client.sync import SyncOptions
from pccl.runtime.config import RANGES, Config
from pccl.security import Security
from pccl.shared_state import SharedState
from pccl.support.logs import configure_logging
from pccl.support.text import address_text, parse_address, parse_advertised, parse_ports
from pccl.types import (
    Attribute,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    SharedStateProgress,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)


class Communicator:
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
        most = RANGES["lanes"].most
        if not 0 <= p2p_connection_pool_size <= most:
            raise ValueError(
                f"p2p_connection_pool_size is {p2p_connection_pool_size}: it must be in 0 to {most}"
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
        self._membership = Membership()
        self._admission = Admission(self._membership)
        self._launcher = Launcher(self._membership)

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
        host, port, lanes = self._host, self._port, self._pool_size
        patience = Patience(address_text(host, port), n_attempts, limit, timeout)
        configure_logging()
        security = Security.of(self._security)

        def make(address: str) -> Client:
            hello = introduced(self._group, config)
            return Client(host, port, address, hello, lanes, config, security)

        self._membership.begin(host, port, config, make, patience, self)

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "it is this process's place in a run; make one in each process")

    def close(self) -> None:
        """Leaves the run; collectives in progress fail and are restored. Idempotent."""
        self._membership.end()

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
        world = self._membership.seen("get_attribute").world
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
        client = self._membership.seen("rank")
        return self._membership.ranks.of(client.number).rank

    @property
    def peers(self) -> list[str]:
        """The accepted peers of the group, in words, by rank."""
        client = self._membership.seen("peers")
        infos = {info.peer: str(info) for info in client.plan.peers}
        return [infos[number] for number in self._membership.ranks.order if number in infos]

    # ---- rounds of the run ----

    def update_topology(self, *, timeout: float | None = None) -> None:
        """Admits pending peers. Returns when all accepted peers of all groups have called it.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
                this one), PENDING_ASYNC_OPS (a collective is launched and not awaited).
        """
        self._admission.update_topology(Deadline(timeout))

    def are_peers_pending(self, *, timeout: float | None = None) -> bool:
        """Whether peers wait to be admitted: the same answer for all.

        All accepted peers of all groups must ask. Collectives may run in other threads meanwhile.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or others stand in calls that can never meet
                this one).
        """
        return self._admission.are_peers_pending(Deadline(timeout))

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
        return self._admission.wait_for_peers(n, timeout)

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
        self._admission.optimize_topology(Deadline(timeout))

    # ---- shared state ----

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
        options = SyncOptions(strategy.value, raise_on_divergence, progress, deadline, min_peers)
        return sync_shared_state(self._membership, shared_state, options)

    @property
    def revision(self) -> int:
        """The shared state's revision after the last synchronisation; 0 before."""
        return self._membership.revision

    # ---- collectives ----

    def all_reduce(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group into `recv`, bit-identical on all of them.

        A ring all-reduce: reduce-scatter, then all-gather.

        Args:
            send: an array, or a list or dict of them.
            recv: the same kind, dtypes, element counts and order in memory, as that of empty_like;
                None, or `send` itself, is in place.
            op: AVG is SUM divided by the number of contributors; of integers, rounded towards 0, so
                that the average of 3 and 4 is 3. Or its name: "sum", "max", ...
            tag: tells apart collectives that run at the same time; the same on all peers.
            operand_descriptor: its dtype must be the array's.
            quantization_options: what goes over the wire is quantized like this: floats only, and
                no PROD. Every peer's result has the same bits; docs/quantization.md has the
                errors. A NaN or an infinity makes its block of elements NaN.
            quantization: the same by a short name: "int8" or "int4" (block-wise), "uint8".
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            The number of contributors, payload bytes sent and received by this peer.

        Raises:
            PCCLTimeoutError: the time-out has passed; the message names who was waited for.
            PCCLError: TOO_FEW_PEERS (alone in the group; buffers are untouched),
                RANK_CONNECTION_LOST (call again), INVALID_ARGUMENT (the peers ask for different
                work, the tag is in use, or this cannot be quantized), INVALID_USAGE.
            ValueError, AssertionError: the arrays do not fit each other.
            ValueError: an unknown `quantization`, or `quantization_options` as well.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options, operand_descriptor)
        return self._launcher.run("all_reduce", work, tag, timeout)

    def all_reduce_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
    ) -> AsyncReduceHandle:
        """Launches `all_reduce` and returns at once.

        The arrays must not be touched until `wait()` returns.

        Any number may be outstanding, launched in any order on different peers; their tags differ.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the tag is in use, or this cannot be
                quantized), INVALID_USAGE. What happens later is the handle's to tell.
            ValueError, AssertionError, OverflowError: as for `all_reduce`.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options, operand_descriptor)
        target = send if recv is None else recv
        return self._launcher.launch("all_reduce_async", work, tag, target)

    def all_reduce_multiple_with_retry(
        self,
        descriptors: Sequence[ReduceOpDescriptor],
        *,
        max_in_flight: int = 4,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Runs several all-reduces, a few at a time, each again and again until it commits.

        Each collective is averaged over those who contributed to it, which may differ between
        collectives when a peer is lost in between.

        Args:
            descriptors: in the same order on all peers; their tags differ.
            max_in_flight: collectives under way at the same time.
            timeout: seconds for all of them; those that have not committed then are given up.

        Returns:
            Contributors of the last one, payload bytes of all, failed attempts not counted.

        Raises:
            PCCLTimeoutError: the time-out has passed; some may have committed.
            PCCLError: TOO_FEW_PEERS when all others are lost; INVALID_ARGUMENT, also when there is
                no descriptor or `max_in_flight` is not positive; INVALID_USAGE.
        """
        name = "all_reduce_multiple_with_retry"
        return self._launcher.run_all(name, descriptors, max_in_flight, timeout)

    def all_gather(
        self, send: A, recv: A | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> A:
        """Gathers what every peer of the group sends, the same on all of them.

        Args:
            send: an array, or a list or dict of them; the same dtypes and element counts on all
                peers.
            recv: for each array one with `world_size` times its elements, in which those of rank r
                are the r-th part; `send` may be this peer's part of it. None: new arrays of the
                shape (world_size, *send.shape).
            tag: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not fit each other or the group's size.
        """
        work, result = operands.all_gather(send, recv, self._launcher.ranks("all_gather"))
        self._launcher.run("all_gather", work, tag, timeout)
        return result

    def all_gather_async(
        self, send: Arrays, recv: Arrays | None = None, *, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `all_gather` and returns at once; the handle's `result` is what it returns."""
        work, result = operands.all_gather(send, recv, self._launcher.ranks("all_gather_async"))
        return self._launcher.launch("all_gather_async", work, tag, result)

    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduces `send` over all peers of the group; the peer of rank r gets the r-th part.

        Args:
            send: an array, or a list or dict of them.
            recv: for each array one with the `world_size`-th part of its elements, which must be a
                whole number; it may be this peer's part of `send`. None: new arrays, each of the
                shape of `send` with the first dimension divided by `world_size`.
            op: as for `all_reduce`.
            tag: as for `all_reduce`.
            quantization_options: as for `all_reduce`.
            quantization: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not fit each other, or cannot be divided.
        """
        ranks = self._launcher.ranks("reduce_scatter")
        options = operands.quantization_of(quantization_options, quantization)
        work, result = operands.reduce_scatter(send, recv, op, options, ranks)
        self._launcher.run("reduce_scatter", work, tag, timeout)
        return result

    def reduce_scatter_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
    ) -> AsyncReduceHandle:
        """Launches `reduce_scatter`; the handle's `result` is what it returns."""
        ranks = self._launcher.ranks("reduce_scatter_async")
        options = operands.quantization_of(quantization_options, quantization)
        work, result = operands.reduce_scatter(send, recv, op, options, ranks)
        return self._launcher.launch("reduce_scatter_async", work, tag, result)

    def broadcast(
        self,
        arrays: Arrays,
        *,
        root: int | Literal["first"] = 0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Gives all peers of the group the content of one of them, in place.

        `root` means the peer that had this rank when the program last saw ranks. If that peer, or
        any other, has been lost since, the call fails with `PeerLostError`, and nobody's content
        has changed: the next call goes by the ranks as they are then, so look at `rank` again to
        know who is who. A lost root never makes another peer the source unnoticed.

        A rank is a position in the ring as it is now, and not the RANK that torchrun or MPI give to
        a process: rank 0 is not the process that was started first, nor the same one for ever.
        `root="first"` means a peer that lasts: of the members, the one that is longest in the run
        (whose peer number is the lowest), wherever it is in the ring. It changes only when that
        peer is lost; the call that is told so by `PeerLostError` has changed nothing, and the next
        one goes by who is longest in the run then.

        Args:
            arrays: an array, or a list or dict of them; the same dtypes and element counts on all
                peers.
            root: rank of the peer whose content it is, or "first"; the same on all peers.
            tag: as for `all_reduce`.
            timeout: seconds after which the collective is given up, for all peers.

        Returns:
            The number of peers, payload bytes sent and received by this one.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: no peer has that rank, or an array cannot be written.
            TypeError: `root` is no rank.
            AssertionError: the elements of an array do not follow each other in memory.
        """
        work = operands.broadcast(arrays, root, self._launcher.ranks("broadcast"))
        return self._launcher.run("broadcast", work, tag, timeout)

    def broadcast_async(
        self, arrays: Arrays, *, root: int | Literal["first"] = 0, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `broadcast` and returns at once."""
        work = operands.broadcast(arrays, root, self._launcher.ranks("broadcast_async"))
        return self._launcher.launch("broadcast_async", work, tag, arrays)

    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> None:
        """Returns when all peers of the group have entered it; at once for a peer that is alone.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`, but never TOO_FEW_PEERS.
        """
        if not self._launcher.is_alone("barrier"):
            self._launcher.run("barrier", operands.barrier(), tag, timeout)

    def barrier_async(self, *, tag: int = 0) -> AsyncReduceHandle:
        """Enters `barrier`; the handle's `wait()` returns when all have."""
        if self._launcher.is_alone("barrier"):
            return AsyncReduceHandle(None, None)
        return self._launcher.launch("barrier", operands.barrier(), tag)
