"""`Communicator`: one peer of a run, and all the calls that it makes.

All collectives follow the same rules. Every peer of the group must enter the same call, with the
same tag and the same work; otherwise the minority, or all peers if there is no majority, get an
error that names the calls that differ. A collective succeeds on all peers or on none. When a peer
is lost, the collective fails with `PeerLostError` on all survivors. Input buffers, even of in-place
calls, are then unchanged; the content of arrays that only receive is unspecified. The survivors
just call again.

An array is a numpy array, a torch tensor or an array of another library that shares its memory
through DLPack or the buffer protocol (JAX, CuPy, MLX), of any shape, with a dtype of `DataType`.
Its elements fill one contiguous range of memory, in any order: contiguous, transposed,
torch.channels_last. It is transferred in its memory order, which must be the same on all peers;
otherwise the call fails with an error that says which peer has which order. A call that would write
to a read-only array, such as one of JAX, leaves it unchanged: the `result` of the returned object
has a new array of the same library. A list or dict of arrays is one collective: either all of them
are reduced (or gathered, ...) over the same peers, or none. Dicts need the same keys on all peers,
in any order.

A rank is a position in the first ring, `Communicator.rank`; ranks shift when peers come and go. All
collectives except all-reduce and barrier depend on ranks. They use the ranks that their thread saw
last: when it read `rank`, `world_size` or `peers`, when `PeerLostError` told it of a loss, or when
`connect`, `update_topology` or `optimize_topology` returned in any thread. If the ranks have
changed since then, the collective fails with `PeerLostError` before anything happens.

An exception that leaves a call, such as one from a signal handler, abandons the call; its buffers
are then no longer in use. The other peers may still have succeeded.
"""

from __future__ import annotations

import array
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

from pccl import operands
from pccl.descriptors import ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import (
    DivergenceError,
    NotFiniteError,
    PCCLError,
    PCCLTimeoutError,
    PeerLostError,
    TooFewPeersError,
    error_for,
    not_picklable,
)
from pccl.insight import Explanation, LogMetrics, Stats
from pccl.membership import AsyncReduceHandle, Membership, until_no_peer_leaves
from pccl.operands import A, Arrays, Root
from pccl.runtime import limits
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.connect import RetryPolicy
from pccl.runtime.client.probe import optimize
from pccl.runtime.config import RANGES, Config
from pccl.security import Security
from pccl.shared_state import SharedState, sync_shared_state
from pccl.support import (
    Closing,
    address_text,
    parse_address,
    parse_advertised,
    parse_ports,
    require,
    whole,
)
from pccl.types import (
    Attribute,
    OpName,
    QuantizationName,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedStateProgress,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

log = logging.getLogger("pccl")


class Communicator(Closing):
    """One peer of a run: joins the run at a master and takes part in its collectives.

        with pccl.Communicator("host:48148") as comm:
            comm.all_reduce(x)

    Several threads may use it. Construction does no I/O.

    Args:
        address: `host:port` of the master, with an IPv6 address in brackets; without a port, 48148.
        peer_group: the group of peers with which this one shares collectives and shared state.
        p2p_connection_pool_size: connections (lanes) to each neighbor; 0: automatic.
        security: the directory of keys (see `pccl keys`), which turns encryption on. None:
            PCCL_CURVE_DIR; if that is unset, nothing is encrypted.
        advertise: the host at which other peers reach this one, or several: "a,b". None:
            PCCL_ADVERTISE; if that is unset, the address that the master sees, and the addresses
            from which this machine connects to the internet over IPv4 and IPv6.
        port_range: "FIRST-LAST", a range of TCP ports; this peer listens for bulk data on one of
            them. None: PCCL_PORT_RANGE; if that is unset, any port.
        outgoing_only: other peers cannot connect to this one, which is behind NAT.
            PCCL_OUTGOING_ONLY=1 has the same effect.
        connect_timeout: seconds for which `connect` tries to reach a master that is not up yet.
            None: PCCL_CONNECT_TIMEOUT_S; if that is unset, `n_attempts` of `connect` applies.
        team: a number that identifies the peer's team: peers that are useless without each other,
            such as the processes of one replica of a sharded model. A team joins as a whole, and if
            one member is lost, the others are dropped. `pccl.torch.communicator` chooses a number.
            0: the peer has no team.
        team_size: number of members of the team.
        name: a name for this peer in errors, logs and `pccl status`, of at most 64 printable
            characters. None: PCCL_NAME; if that is unset, `host:process`, and `/LOCAL_RANK` if that
            is set.

    Raises:
        ValueError: `address` is malformed, or an argument is out of range.
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
        outgoing_only: bool = False,
        connect_timeout: float | None = None,
        team: int = 0,
        team_size: int = 0,
        name: str | None = None,
    ) -> None:
        self._host, self._port = parse_address(address)
        self._group = whole("peer_group", peer_group, range(1 << 32))
        lanes = range(RANGES["lanes"].most + 1)
        self._pool_size = whole("p2p_connection_pool_size", p2p_connection_pool_size, lanes)
        team, team_size = whole("team", team), whole("team_size", team_size)
        if not (0 < team < 1 << 64 and 0 < team_size < 1 << 16) and (team, team_size) != (0, 0):
            raise ValueError(
                f"team is {team}, and team_size {team_size}: they must be in 1 to 2**64 - 1 and in "
                "1 to 65535, or both 0"
            )
        self._team = team, team_size
        self._security = security
        self._settings: dict[str, Any] = {}
        if advertise is not None:
            self._settings["advertise"] = parse_advertised(advertise, "advertise")
        if port_range is not None:
            self._settings["ports"] = parse_ports(port_range, "port_range")
        if outgoing_only:
            self._settings["outgoing"] = True
        if name is not None:
            self._settings["name"] = Config(name=name).name
        Deadline(connect_timeout, "connect_timeout")  # raises if it is not a valid time
        self._connect_timeout = connect_timeout
        self._membership = Membership()
        self._astray = False  # an exception has left `run` in the middle

    # ---- joining and leaving ----

    def connect(self, n_attempts: int = 5, *, timeout: float | None = None) -> None:
        """Joins the run; returns when all accepted peers have admitted this one.

        They admit it in `update_topology`; the first peer of a run is accepted at once.

        Args:
            n_attempts: attempts to reach the master, one second apart. If the communicator has a
                `connect_timeout`, or PCCL_CONNECT_TIMEOUT_S is set, that limit applies instead.
            timeout: seconds for the whole call, including the admission. None: the admission has
                no time limit.

        Raises:
            PCCLTimeoutError: the master did not answer, or the peers did not admit this one, within
                `timeout`; this peer has left.
            PCCLError: MASTER_CONNECTION_FAILED: the master did not answer in `n_attempts` or
                within `connect_timeout`. INVALID_USAGE: already connected, refused by the master,
                or keys are missing or unsafe (the message says why). INTERNAL_ERROR: the system
                lacks descriptors or threads.
            ValueError: `n_attempts` is not positive, `timeout` is not a valid time, or a PCCL_
                environment variable is malformed.
        """
        config = replace(Config.from_env(), **self._settings)
        limit = self._connect_timeout
        if limit is None:
            limit = config.connect_timeout_s
        host, port, own = self._host, self._port, (self._group, self._team, self._pool_size)
        policy = RetryPolicy(host, port, n_attempts, limit, timeout)
        security = Security.of(self._security)

        def make(address: str) -> PeerClient:  # it must not refer to this object
            return PeerClient(host, port, address, config, security, *own)

        self._membership.begin(policy, config, make, self)

    def __repr__(self) -> str:
        return f"Communicator({self.address!r}, {self._membership.described(self._group)})"

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "it is this process's place in a run; make one in each process")

    def close(self) -> None:
        """Leaves the run; collectives in progress fail and are restored. Idempotent."""
        self._membership.end()

    def __enter__(self) -> Self:
        self.connect()
        return self

    @property
    def address(self) -> str:
        """`host:port` of the master."""
        return address_text(self._host, self._port)

    # ---- the peers ----

    def get_attribute(self, attribute: Attribute) -> int:
        """One of the world sizes: the current number of accepted peers, or of groups.

        Raises:
            PCCLError: INVALID_USAGE before `connect`.
            KickedError, MasterLostError: this peer is no longer in the run.
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
        raise ValueError(f"{attribute!r} is not an Attribute")

    @property
    def world_size(self) -> int:
        """Number of accepted peers in this group. Raises as `get_attribute`."""
        return self.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    @property
    def rank(self) -> int:
        """This peer's position in the ring, which changes when peers come and go."""
        known = self._membership.seen("rank")
        return self._membership.ranks.of(known.number).rank

    @property
    def peers(self) -> list[str]:
        """Descriptions of the group's accepted peers, by rank."""
        names = self._membership.seen("peers").plan.names
        return [names[number] for number in self._membership.ranks.order if number in names]

    # ---- the cost of calls ----

    def stats(self) -> Stats:
        """The cost of this peer's calls since it joined the run; also available after its end.

            wandb.log(comm.stats().flat())

        Raises:
            PCCLError: INVALID_USAGE before `connect`.
        """
        return self._membership.last("stats").metrics.stats()

    def explain(self) -> Explanation:
        """Explains what limited this peer's last collectives, from measurements.

        `print(comm.explain())` lists what took time (the votes, peers that came late, round trips,
        links, this machine's processor), how much, and how long a collective would take without
        it. Other peers take no part in it.

        Raises:
            PCCLError: INVALID_USAGE before `connect`.
        """
        return self._membership.last("explain").explain()

    # ---- rounds of the run ----

    def update_topology(self, *, timeout: float | None = None) -> None:
        """Admits pending peers. Returns when all accepted peers of all groups have called it.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or other peers are in calls that exclude this
                one), PENDING_ASYNC_OPS (a collective was not awaited).
        """
        self._membership.update_topology(Deadline(timeout))

    def are_peers_pending(self, *, timeout: float | None = None) -> bool:
        """True if peers wait to be admitted; the same answer on all peers.

        All accepted peers of all groups must call it. Collectives may run in other threads
        meanwhile.

        Raises:
            PCCLError: INVALID_USAGE (not connected, or other peers are in calls that exclude this
                one).
        """
        return self._membership.are_peers_pending(Deadline(timeout))

    def wait_for_peers(self, n: int, *, timeout: float | None = None) -> int:
        """Admits newcomers until this peer's group has at least `n` members.

        All accepted peers of the run must call this, or `are_peers_pending` and `update_topology`
        as a training loop does, because only all of them together admit newcomers. The call does
        not poll. After some seconds, the log says which peers it waits for.

        Args:
            n: number of members, including this peer.
            timeout: seconds to wait for them.

        Returns:
            The number of members, the same on all peers of the group.

        Raises:
            PCCLTimeoutError: the time limit has passed; peers that have joined stay.
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS, as for `update_topology`.
            ValueError: `n` is not positive.
        """
        if n < 1:
            raise ValueError(f"n is {n}: it must be at least 1")
        deadline, membership = Deadline(timeout), self._membership
        known = membership.client("wait_for_peers").knowledge
        size = known.world.local_size
        try:
            while size < n:
                aim = f"wait_for_peers({n}): {size} of {n} are there"
                size = membership.await_newcomers(deadline, limits.FOREVER_S, aim) or size
        except PCCLTimeoutError as error:
            why = f"{known.world.local_size} of {n} peers are there after {timeout:g} s"
            raise PCCLTimeoutError(error.result, "wait_for_peers", why) from None
        return size

    def admit(
        self,
        shared_state: SharedState | None = None,
        *,
        timeout: float | None = None,
        min_peers: int = 1,
    ) -> bool:
        """Admits waiting newcomers, if any, and gives them the shared state.

            while state.revision < steps:
                comm.admit(state)
                ...

        The call may be anywhere in a loop that all peers run, even on its first line: a newcomer's
        first call continues where the others are. All accepted peers must call it, either all with
        a shared state or all without. It combines `are_peers_pending` and, if there are newcomers,
        `update_topology` and `sync_shared_state`.

        Args:
            shared_state: synchronized in the first call, and when a peer has joined. None: nothing.
            timeout: seconds to wait for the others.
            min_peers: the number of peers that the run needs to begin, as in `sync_shared_state`.

        Returns:
            True if a peer has joined, or this is the first call.

        Raises:
            PCCLTimeoutError, PCCLError: as `are_peers_pending`, `update_topology` and
                `sync_shared_state`.
        """
        return self._admit(shared_state, min_peers, timeout)

    def _admit(
        self,
        state: SharedState | None,
        min_peers: int,
        timeout: float | None,
        patience_s: float = 0.0,
        repeat: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> bool:
        deadline, membership = Deadline(timeout), self._membership
        fresh = membership.is_fresh
        if not fresh and membership.ask(deadline, patience_s):
            membership.update_topology(deadline)
        elif not fresh and (state is None or membership.synced):
            return False
        membership.client("admit")
        if state is not None and not (fresh and membership.synced):
            left_s = deadline.left_s
            repeat(lambda: self.sync_shared_state(state, timeout=left_s, min_peers=min_peers))
        membership.has_admitted = True
        return True

    def run(
        self,
        step: Callable[[int], object],
        shared_state: SharedState,
        *,
        steps: int,
        min_peers: int = 1,
        log_metrics: LogMetrics | None = None,
    ) -> None:
        """Runs all steps of a run, while peers come and go.

            def step(number: int) -> None:
                gradient = compute(number)
                comm.all_reduce(gradient)
                weights -= gradient

            comm.run(step, state, steps=1000)

        Calls `step(k)` for each k from `shared_state.revision` up to `steps - 1`, and increments
        the revision after each. Between steps it admits newcomers, which receive the shared state
        and continue at the same step. When a peer is lost, it calls the same step again, so a step
        must not change the shared state before its last collective has succeeded. At the end it
        compares the shared state of all peers, and finishes the run.

        Args:
            step: a function of the step's number, which runs this step.
            shared_state: everything that a newcomer needs. A run with a state from a checkpoint
                continues at its revision.
            steps: the revision at which the run ends.
            min_peers: the first step waits for this number of peers. If it is 2 or more, a peer
                that is left alone waits for others. If it is 1, the collectives of such a peer
                raise TooFewPeersError, and the step may continue without them.
            log_metrics: a function such as `wandb.log`, called after each step with
                `stats().flat()` and the number of the step. If it raises, so does `run`.

        If the step, or Ctrl-C, ends it by another exception than a PCCLError, it may be called
        again: the peer leaves the run and joins again, with the shared state of the others.

        Raises:
            DivergenceError: at the end, this peer's shared state differs from the most common one;
                if two are equally common, the lowest rank decides. The others finish.
            PCCLError: a call failed for another reason than a lost peer.
        """
        if self._astray:
            log.warning("an exception has ended run(): this peer leaves the run and joins it again")
            self.close()
            self.connect()
        self._astray = True
        try:
            self._run(step, shared_state, steps, min_peers, log_metrics)
        except PCCLError:
            self._astray = False
            raise
        self._astray = False

    def _run(
        self,
        step: Callable[[int], object],
        shared_state: SharedState,
        steps: int,
        min_peers: int,
        log_metrics: LogMetrics | None,
    ) -> None:
        admit = partial(self._admit, shared_state, min_peers, None, repeat=until_no_peer_leaves)
        admit()
        while (number := shared_state.revision) < steps:
            try:
                step(number)
            except PeerLostError:
                pass
            except TooFewPeersError:
                if min_peers < 2:
                    raise
                while not admit(patience_s=limits.FOREVER_S):
                    pass
                continue  # with the newcomers
            else:
                shared_state.push_revision()
                if log_metrics is not None:
                    log_metrics(self.stats().flat(), number)
            admit()
        self._compare(shared_state)
        self.finish()

    def _compare(self, state: SharedState) -> None:
        """Raises DivergenceError unless most peers have this content."""
        own: Any = array.array("B", state._digest())
        gathered = None
        while gathered is None:
            rank = self.rank
            try:
                gathered = self.all_gather(own)
            except PeerLostError:
                pass
            except TooFewPeersError:
                return
        found = [bytes(row) for row in memoryview(gathered).tolist()]
        elected = max(found, key=found.count)  # max() takes the first of equals
        if found[rank] != elected:
            why = "most peers, or those of lower ranks, ended the run with another shared state"
            raise DivergenceError(Result.INVALID_ARGUMENT, "run", why)
        for other, digest in enumerate(found):
            if digest != elected:
                log.warning("rank %d ended the run with another shared state", other)

    def finish(self, *, timeout: float | None = None) -> None:
        """Finishes the run: all accepted peers must call it after their last step.

        After that, no peer can join: a restarted process gets RunFinishedError from `connect`, so
        it does not begin a new run. With a journal, this also holds after a restart of the master.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            PCCLTimeoutError: the time limit has passed; the run is not finished.
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS, as for `update_topology`.
        """
        client = self._membership.client("finish")
        self._membership.round("finish", client, client.peer.finish, Deadline(timeout).next)

    def optimize_topology(self, *, timeout: float | None = None) -> None:
        """Measures the links between peers, and chooses the fastest rings for each group.

        All accepted peers of all groups must call it. Each pair of peers on different machines
        exchanges data at full speed for about half a second, or ten round trips. Several pairs
        measure at once, so n peers take about n times as long, up to 17 peers. Among more peers,
        only enough pairs are measured to find which peers are near each other, which takes at most
        32 times as long as one pair. The order of a ring, and with it each `rank`, changes only if
        an all-reduce of 64 MiB would take at least a fifth less time. Peers that stay keep the new
        order until the next optimization. The ring avoids a pair that cannot connect, if it can.
        Among 3 to 6 peers, collectives use several rings if a peer's links carry more together than
        each alone.

        Args:
            timeout: seconds to wait for the others, and for the measurements.

        Raises:
            PCCLTimeoutError: the time limit of a peer has passed; raised on all peers.
            PCCLError: INVALID_USAGE (not connected, fewer than two peers, or other peers are in
                calls that exclude this one), PENDING_ASYNC_OPS.
        """
        client = self._membership.client("optimize_topology")
        if client.knowledge.world.global_size < 2:
            why = "this peer is alone in the run: there is no order to optimize"
            raise error_for(Result.INVALID_USAGE, "optimize_topology", why)
        measure = partial(optimize, deadline=Deadline(timeout))
        self._membership.round("optimize_topology", client, None, measure, ranks=True)

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

        Every peer offers digests of its entries, unless it is RECEIVE_ONLY. Among the contents of
        the highest revision, the most common one wins; on a tie, the peer accepted first decides.
        Peers fetch exactly the entries in which they differ, from all holders at once, and verify
        them. A newcomer, or a peer at revision 0 while others are not, receives in place: if the
        call fails, its content may be useless, and `shared_state.torn` is true. Other peers receive
        into additional memory, and a call that fails changes nothing there.

        Args:
            shared_state: must not change during the call, which sets `revision` to the elected one.
            strategy: either ENFORCE_POPULAR on all peers of the group, or SEND_ONLY on peers whose
                content others need and RECEIVE_ONLY on peers whose content is not offered.
            timeout: seconds to wait for the others, and for `min_peers`.
            progress: called in this thread, up to ten times a second, while this peer receives.
            raise_on_divergence: raise on all peers if contents differ at the same revision.
            min_peers: the number of peers that the first synchronization needs; if peers of the
                group give different numbers, the largest counts. While there are fewer, all of them
                admit newcomers. A run that has begun continues with any number.

        Returns:
            Payload bytes sent and received by this peer, (0, 0) everywhere if all were equal; and
            the peers whose content had diverged, and how.

        Raises:
            PCCLError: INVALID_USAGE, PENDING_ASYNC_OPS; NO_SHARED_STATE_AVAILABLE (all are
                RECEIVE_ONLY); INVALID_ARGUMENT (the revisions break the rules: raised on all
                peers, or only on those whose revision is too high).
            DivergenceError: INVALID_ARGUMENT: contents differ, and a peer set
                `raise_on_divergence`.
            KickedError: INVALID_ARGUMENT: this peer's entries differ from those of the others, or
                it is SEND_ONLY and another content was elected, or others use ENFORCE_POPULAR and
                it does not.
        """
        deadline = Deadline(timeout)
        min_peers = whole("min_peers", min_peers, range(1, 1 << 64))
        require("strategy", strategy, SharedStateSyncStrategy)
        options = strategy, raise_on_divergence, min_peers, progress

        def synchronized() -> SharedStateSyncInfo:
            return sync_shared_state(self._membership, shared_state, deadline, *options)

        return self._membership.repeat_until_enough(synchronized, min_peers, timeout)

    @property
    def revision(self) -> int:
        """The shared state's revision after the last synchronization; 0 before the first."""
        return self._membership.revision

    # ---- collectives ----

    def all_reduce(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
        check: Literal["finite"] | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group into `recv`, bit-identical on all of them.

        A ring all-reduce: reduce-scatter, then all-gather.

        Args:
            send: an array, or a list or dict of arrays.
            recv: where the result goes: like `send` in form, dtypes, element counts and memory
                order (as `empty_like` returns). None, or `send` itself: in place.
            op: the operation, or its name: "sum", "max", ... AVG divides the sum by the number of
                contributors; integers are rounded towards 0, so the average of 3 and 4 is 3.
            tag: distinguishes collectives that run at the same time; the same on all peers.
            operand_descriptor: its dtype must be the array's.
            quantization_options: how data is quantized on the wire; only for floats, and not for
                PROD. Every peer's result has the same bits. With up to 128 peers, each contribution
                is rounded once, and the result once more. A NaN or an infinity makes its whole
                block of elements NaN. docs/internals/quantization.md gives the errors of the
                results.
            quantization: a short name instead: "int8" or "int4" (block-wise), "uint8".
            check: with "finite", on all peers: reduces only if all numbers of all peers are finite.
                It costs a round trip to the master.
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            The number of contributors, the payload bytes that this peer sent and received, and the
            arrays that hold the result.

        Raises:
            PCCLTimeoutError: the time limit has passed; the message names the missing peers.
            NotFiniteError: the check has failed, on all peers; the message names a peer that has
                sent a NaN or an infinity.
            PCCLError: TOO_FEW_PEERS (alone in the group; buffers are untouched),
                RANK_CONNECTION_LOST (call again), INVALID_ARGUMENT (the peers ask for different
                work, the tag is in use, or this cannot be quantized), INVALID_USAGE.
            ValueError: the arrays do not match each other; or `quantization` or `check` is unknown,
                or `quantization_options` is given as well.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options, operand_descriptor)
        if check is not None:
            timeout = self._check(check, send, tag, timeout)
        return self._membership.run("all_reduce", work, tag, timeout)

    def _check(self, check: str, send: Arrays, tag: int, timeout: float | None) -> float | None:
        """Returns the time that is left."""
        deadline = Deadline(timeout)
        if check != "finite":
            raise ValueError(f'check is {check!r}: it may be "finite"')
        known = self._membership.client("all_reduce").knowledge
        work, accused = operands.accusation(send, known.number)
        self._membership.run("all_reduce", work, tag, timeout)
        if accused[0] >= 0:
            who = known.plan.names.get(accused[0], f"peer {accused[0]}")
            why = f"{who} has sent numbers that are not finite"
            raise NotFiniteError(Result.INVALID_ARGUMENT, "all_reduce", why)
        return deadline.left_s

    def all_reduce_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
    ) -> AsyncReduceHandle:
        """Launches `all_reduce` and returns at once.

        The arrays must not be touched until `wait()` returns.

        Any number of collectives may be in flight, with different tags; peers may launch them in
        any order.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the tag is in use, or this cannot be
                quantized), INVALID_USAGE. The handle reports later failures.
            ValueError, OverflowError: as for `all_reduce`.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.all_reduce(send, recv, op, options, operand_descriptor)
        return self._membership.launch("all_reduce_async", work, tag)

    def all_reduce_multiple_with_retry(
        self,
        descriptors: Sequence[ReduceOpDescriptor],
        *,
        max_in_flight: int = 4,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Runs several all-reduces, a few at a time, and repeats each until it commits.

        It bundles adjacent descriptors with the same operation, element type and quantization into
        collectives of up to 64 MiB. If a peer is lost in between, collectives may have different
        contributors.

        Args:
            descriptors: the collectives, with different tags. All peers must make this call with
                the same descriptors in the same order.
            max_in_flight: how many collectives run at the same time.
            timeout: seconds for all of them; collectives that have not committed by then fail.

        Returns:
            The contributors of the last collective, and the payload bytes of all, excluding failed
            attempts.

        Raises:
            PCCLTimeoutError: the time limit has passed; some may have committed.
            PCCLError: TOO_FEW_PEERS: all others are lost. INVALID_ARGUMENT, also if there is no
                descriptor or `max_in_flight` is not positive. INVALID_USAGE.
        """
        name = "all_reduce_multiple_with_retry"
        return self._membership.run_with_retry(name, descriptors, max_in_flight, timeout)

    def all_gather(
        self,
        send: A,
        recv: A | None = None,
        *,
        rows: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> A:
        """Gathers the arrays of all peers of the group on all of them.

        Args:
            send: an array, or a list or dict of arrays; dtypes and element counts must be the same
                on all peers, unless there are `rows`.
            recv: for each array, one with `world_size` times its elements; the r-th part is that of
                rank r. `send` may be this peer's part of it. None: new arrays of shape
                (world_size, *send.shape).
            rows: the first dimension of `send` on each peer, by rank, if these differ; it may be 0.
                All peers must pass the same `rows`; if they do not know it, they gather it first.
                Then `recv` has the first dimension sum(rows) and holds the parts by rank, and all
                arrays must be in C's order.
            tag, timeout: as for `all_reduce`.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: the arrays do not match each other, the group's size, or `rows`.
            TypeError: `rows` are not integers.
        """
        work = operands.all_gather(send, recv, self._membership.known_ranks("all_gather"), rows)
        result: A = self._membership.run("all_gather", work, tag, timeout).result
        return result

    def all_gather_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        rows: Sequence[int] | None = None,
        tag: int = 0,
    ) -> AsyncReduceHandle:
        """Launches `all_gather` and returns at once; the handle's `result` is its return value."""
        ranks = self._membership.known_ranks("all_gather_async")
        work = operands.all_gather(send, recv, ranks, rows)
        return self._membership.launch("all_gather_async", work, tag)

    def reduce_scatter(
        self,
        send: A,
        recv: A | None = None,
        *,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduces `send` over all peers of the group; the peer of rank r gets the r-th part.

        Args:
            send: an array, or a list or dict of arrays.
            recv: for each array, one with 1 / `world_size` of its elements, which must be a whole
                number; it may be this peer's part of `send`. None: new arrays, each of the shape of
                `send` with the first dimension divided by `world_size`.
            op, tag, quantization_options, quantization, timeout: as for `all_reduce`.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: the arrays do not match each other, or cannot be divided.
        """
        ranks = self._membership.known_ranks("reduce_scatter")
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce_scatter(send, recv, op, options, ranks)
        result: A = self._membership.run("reduce_scatter", work, tag, timeout).result
        return result

    def reduce_scatter_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
    ) -> AsyncReduceHandle:
        """Launches `reduce_scatter`; the handle's `result` is its return value."""
        ranks = self._membership.known_ranks("reduce_scatter_async")
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce_scatter(send, recv, op, options, ranks)
        return self._membership.launch("reduce_scatter_async", work, tag)

    def broadcast(
        self,
        arrays: Arrays,
        *,
        root: int | Literal["first"] = 0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Copies the content of one peer of the group to all of them, in place.

        `root` is the peer that had this rank when the program last saw the ranks. If that peer, or
        any other, has been lost since then, the call fails with `PeerLostError` and no content has
        changed. The next call uses the new ranks, so read `rank` again first. Losing the root never
        silently makes another peer the source.

        A rank is a position in the current ring. It is not the RANK that torchrun or MPI assigns to
        a process: rank 0 need not be the process that was started first, and it changes.
        `root="first"` is stable: it is the member that joined the run first (with the lowest peer
        number), wherever it is in the ring. Only the loss of that peer changes it: the call then
        fails with `PeerLostError` and changes nothing, and the next call uses the member that is
        then the first.

        Args:
            arrays: an array, or a list or dict of arrays; dtypes and element counts must be the
                same on all peers.
            root: rank of the source, or "first"; the same on all peers.
            tag, timeout: as for `all_reduce`.

        Returns:
            The number of peers, the payload bytes that this peer sent and received, and the arrays.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: no peer has that rank, or a numpy array is read-only; or the elements of an
                array are not contiguous in memory.
            TypeError: `root` is not a rank.
        """
        work = operands.broadcast(arrays, root, self._membership.known_ranks("broadcast"))
        return self._membership.run("broadcast", work, tag, timeout)

    def broadcast_async(
        self, arrays: Arrays, *, root: int | Literal["first"] = 0, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `broadcast` and returns at once."""
        work = operands.broadcast(arrays, root, self._membership.known_ranks("broadcast_async"))
        return self._membership.launch("broadcast_async", work, tag)

    def reduce(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        root: Root = 0,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group; only the root gets the result.

        The data goes along a chain that ends at the root: each peer sends it once.

        Args:
            send: an array, or a list or dict of arrays. It is unchanged, except in place.
            recv: on the root, where the result goes: like `send` in form, dtypes, element counts
                and memory order. None, or `send` itself: in place. Ignored on other peers.
            root: rank of the peer that gets the result, or "first".
            op, tag, quantization_options, quantization, timeout: as for `all_reduce`.

        Returns:
            The number of contributors, and the payload bytes that this peer sent and received.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: no peer has that rank, or as for `all_reduce`; or the arrays do not match
                each other.
            TypeError: `root` is not a rank.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce(
            send, recv, root, op, options, self._membership.known_ranks("reduce")
        )
        return self._membership.run("reduce", work, tag, timeout)

    def reduce_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        root: Root = 0,
        op: ReduceOp | OpName = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: QuantizationName | None = None,
    ) -> AsyncReduceHandle:
        """Launches `reduce`; the handle's `result` is `recv`, or `send` if it is in place."""
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce(
            send, recv, root, op, options, self._membership.known_ranks("reduce_async")
        )
        return self._membership.launch("reduce_async", work, tag)

    def gather(
        self,
        send: A,
        recv: A | None = None,
        *,
        root: Root = 0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> A | None:
        """Gathers the arrays of all peers of the group on the root.

        Args:
            send: an array, or a list or dict of arrays; dtypes and element counts must be the same
                on all peers.
            recv: on the root, for each array, one with `world_size` times its elements; the r-th
                part is that of rank r. `send` may be this peer's part of it. None: new arrays of
                shape (world_size, *send.shape). Ignored on other peers.
            root: rank of the peer that gets everything, or "first".
            tag, timeout: as for `all_reduce`.

        Returns:
            On the root `recv`, or the new arrays in the same form as `send`; None on other peers.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: the arrays do not match each other or the group's size, or no peer has that
                rank.
            TypeError: `root` is not a rank.
        """
        work = operands.gather(send, recv, root, self._membership.known_ranks("gather"))
        result: A | None = self._membership.run("gather", work, tag, timeout).result
        return result

    def gather_async(
        self, send: Arrays, recv: Arrays | None = None, *, root: Root = 0, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `gather` and returns at once; the handle's `result` is its return value."""
        work = operands.gather(send, recv, root, self._membership.known_ranks("gather_async"))
        return self._membership.launch("gather_async", work, tag)

    def scatter(
        self,
        send: Arrays | None = None,
        recv: A | None = None,
        *,
        root: Root = 0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> A | Arrays:
        """Gives each peer of the group its part of an array of the root.

        Args:
            send: on the root, an array, or a list or dict of arrays, whose r-th part is for rank r.
                Ignored on other peers.
            recv: for each array, one with 1 / `world_size` of its elements; on the root it may be
                this peer's part of `send`. None, on the root only: new arrays, each of the shape of
                `send` with the first dimension divided by `world_size`.
            root: rank of the source, or "first".
            tag, timeout: as for `all_reduce`.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: the arrays do not match each other, cannot be divided, or one is missing; or
                no peer has that rank.
            TypeError: `root` is not a rank.
        """
        work = operands.scatter(send, recv, root, self._membership.known_ranks("scatter"))
        result: A | Arrays = self._membership.run("scatter", work, tag, timeout).result
        return result

    def scatter_async(
        self,
        send: Arrays | None = None,
        recv: Arrays | None = None,
        *,
        root: Root = 0,
        tag: int = 0,
    ) -> AsyncReduceHandle:
        """Launches `scatter` and returns at once; the handle's `result` is its return value."""
        work = operands.scatter(send, recv, root, self._membership.known_ranks("scatter_async"))
        return self._membership.launch("scatter_async", work, tag)

    def all_to_all(
        self,
        send: A,
        recv: A | None = None,
        *,
        send_rows: Sequence[int] | None = None,
        recv_rows: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> A:
        """Gives each peer of the group its part of this peer's array, and receives one from each.

        Args:
            send: an array, or a list or dict of arrays, whose first dimension is a multiple of
                `world_size`; the r-th part of it is for rank r.
            recv: like `send` in form, dtypes, element counts and memory order; the r-th part is
                from rank r. It must not overlap `send`. None: new arrays like `send`.
            send_rows: the number of rows of the first dimension for each rank, the same for all
                arrays of a list or dict; they add up to that dimension. The arrays must then be in
                C order. None: the same number for each rank; `recv_rows` must be None too.
            recv_rows: the number of rows from each rank: that rank's `send_rows` for this peer.
            tag, timeout: as for `all_reduce`.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            MismatchError: INVALID_ARGUMENT: a peer expects another number of rows than is sent.
            ValueError: the arrays do not match each other or the numbers of rows, overlap, or
                cannot be divided.
        """
        ranks = self._membership.known_ranks("all_to_all")
        work = operands.all_to_all(send, recv, send_rows, recv_rows, ranks)
        result: A = self._membership.run("all_to_all", work, tag, timeout).result
        return result

    def all_to_all_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        send_rows: Sequence[int] | None = None,
        recv_rows: Sequence[int] | None = None,
        tag: int = 0,
    ) -> AsyncReduceHandle:
        """Launches `all_to_all` and returns at once; the handle's `result` is its return value."""
        ranks = self._membership.known_ranks("all_to_all_async")
        work = operands.all_to_all(send, recv, send_rows, recv_rows, ranks)
        return self._membership.launch("all_to_all_async", work, tag)

    # ---- between two peers ----

    def send(
        self, arrays: Arrays, to: int, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Sends to one peer of the group, which must call `recv`; other peers take no part.

        The data travels directly between the two, over a separate connection. `to` is the peer that
        had this rank when the program last saw the ranks; if that peer is lost, the call fails, and
        no other peer gets the data. The loss of a third peer does not affect the call.

        Args:
            arrays: an array, or a list or dict of arrays: of the same form, dtypes, element counts
                and memory order as in the other peer's call.
            to: rank of the other peer.
            tag: distinguishes concurrent sends from this peer to that one. Sends in the other
                direction or to other peers, and collectives, may use the same tags.
            timeout: seconds after which it fails, on both peers.

        Returns:
            2, and the payload bytes that this peer sent and received.

        Raises:
            PCCLTimeoutError: the time limit has passed; the message names the missing peer.
            PeerLostError: RANK_CONNECTION_LOST: the other peer is lost, or cannot be reached.
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the two ask for different arrays, or the tag
                is in use), INVALID_USAGE (the other peer is in a call that waits for this one).
            ValueError: no other peer has that rank, or the arrays cannot be sent.
            TypeError: `to` is not a rank.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        work = operands.send(arrays, self._membership.pair("send", to, True))
        return self._membership.run("send", work, tag, timeout)

    def send_async(self, arrays: Arrays, to: int, *, tag: int = 0) -> AsyncReduceHandle:
        """Launches `send` and returns at once. The arrays must not be touched until `wait()`."""
        work = operands.send(arrays, self._membership.pair("send_async", to, True))
        return self._membership.launch("send_async", work, tag)

    def recv(
        self, arrays: Arrays, source: int, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Receives from one peer of the group, which must call `send`.

        If the call fails, the content of the arrays is unspecified.

        Args:
            arrays: where the data goes.
            source: rank of the other peer.
            tag: as for `send`.
            timeout: as for `send`.

        Returns:
            2, and the payload bytes that this peer sent and received.

        Raises:
            PCCLError, ValueError, TypeError, OverflowError: as for `send`.
        """
        work = operands.recv(arrays, self._membership.pair("recv", source, False))
        return self._membership.run("recv", work, tag, timeout)

    def recv_async(self, arrays: Arrays, source: int, *, tag: int = 0) -> AsyncReduceHandle:
        """Launches `recv` and returns at once; the handle's `result` is `arrays`."""
        work = operands.recv(arrays, self._membership.pair("recv_async", source, False))
        return self._membership.launch("recv_async", work, tag)

    def send_recv(
        self,
        sends: Mapping[int, Arrays],
        recvs: Mapping[int, Arrays],
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Sends to some peers and receives from some, all at the same time, in any order.

        Each of these succeeds or fails independently of the others, as `send` and `recv` do.

        Args:
            sends: the arrays to send, by the rank of the receiver.
            recvs: the arrays that receive, by the rank of the sender.
            tag: the tag of all of them.
            timeout: seconds for all of them.

        Raises:
            PCCLError: the first failure; the other sends and receives have ended too.
            ValueError, TypeError, OverflowError: as for `send`; nothing has been launched then.
        """
        require("sends", sends, Mapping)
        require("recvs", recvs, Mapping)
        pair, name = self._membership.pair, "send_recv"
        work = [operands.send(arrays, pair(name, rank, True)) for rank, arrays in sends.items()]
        work += [operands.recv(arrays, pair(name, rank, False)) for rank, arrays in recvs.items()]
        self._membership.run_all(name, work, tag, timeout)

    # ---- agreements ----

    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> None:
        """Returns when all peers of the group have entered it; at once if this peer is alone.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`, but never TOO_FEW_PEERS.
        """
        if not self._membership.is_alone("barrier"):
            self._membership.run("barrier", operands.barrier(), tag, timeout)

    def commit(self, ok: bool = True, *, tag: int = 0, timeout: float | None = None) -> bool:
        """True if all peers of the group pass `ok=True`; the same answer on all of them.

        This is a vote at the end of a step: each peer says whether the step succeeded there, and
        either all of them keep the step, or none. If a peer is lost during the vote, the answer is
        False.

        Args:
            ok: this peer's vote.
            timeout: seconds after which the vote fails, on all peers.
            tag: as for `all_reduce`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`, but never TOO_FEW_PEERS or
                RANK_CONNECTION_LOST.
        """
        work, votes = operands.vote(ok)
        try:
            self._membership.run("commit", work, tag, timeout)
        except PeerLostError:
            return False
        except TooFewPeersError:
            return ok
        return bool(votes[0])

    def barrier_async(self, *, tag: int = 0) -> AsyncReduceHandle:
        """Enters `barrier`; the handle's `wait()` returns when all peers have entered it."""
        if self._membership.is_alone("barrier"):
            return AsyncReduceHandle(None)
        return self._membership.launch("barrier", operands.barrier(), tag)
