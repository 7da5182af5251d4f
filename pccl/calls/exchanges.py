"""`Exchanges`: the collectives in which one peer gives or gets more than the others, or all give
each other different rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pccl import operands
from pccl.calls.collective import AsyncReduceHandle
from pccl.calls.launcher import Launcher
from pccl.operands import A, Arrays
from pccl.types import QuantizationOptions, ReduceInfo, ReduceOp

Root = int | Literal["first"]


class Exchanges:
    """Collectives with a root, and exchanges of rows. `Communicator` has them.

    What holds for all collectives holds for these. `root` is a rank, or "first", as in `broadcast`;
    it is the same on all peers.
    """

    _launcher: Launcher

    def reduce(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        root: Root = 0,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all peers of the group; only the root gets the result.

        The data goes along a chain that ends at the root: each peer sends it once.

        Args:
            send: an array, or a list or dict of arrays. It is unchanged, except in place.
            recv: on the root, where the result goes: like `send` in form, dtypes, element counts
                and memory order. None, or `send` itself: in place. Ignored on other peers.
            root: rank of the peer that gets the result, or "first".
            op: as for `all_reduce`.
            tag: as for `all_reduce`.
            quantization_options: as for `all_reduce`.
            quantization: as for `all_reduce`.
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            The number of contributors, and the payload bytes that this peer sent and received.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError: no peer has that rank, or as for `all_reduce`.
            TypeError: `root` is not a rank.
            AssertionError: the arrays do not match each other.
        """
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce(send, recv, root, op, options, self._launcher.ranks("reduce"))
        return self._launcher.run("reduce", work, tag, timeout)

    def reduce_async(
        self,
        send: Arrays,
        recv: Arrays | None = None,
        *,
        root: Root = 0,
        op: ReduceOp | str = ReduceOp.AVG,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        quantization: str | None = None,
    ) -> AsyncReduceHandle:
        """Launches `reduce`; the handle's `result` is `recv`, or `send` if it is in place."""
        options = operands.quantization_of(quantization_options, quantization)
        work = operands.reduce(send, recv, root, op, options, self._launcher.ranks("reduce_async"))
        target = send if recv is None else recv
        return self._launcher.launch("reduce_async", work, tag, target)

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
            tag: as for `all_reduce`.
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            On the root `recv`, or the new arrays in the same form as `send`; None on other peers.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not match each other or the group's size, or
                no peer has that rank.
            TypeError: `root` is not a rank.
        """
        work, result = operands.gather(send, recv, root, self._launcher.ranks("gather"))
        self._launcher.run("gather", work, tag, timeout)
        return result

    def gather_async(
        self, send: Arrays, recv: Arrays | None = None, *, root: Root = 0, tag: int = 0
    ) -> AsyncReduceHandle:
        """Launches `gather` and returns at once; the handle's `result` is its return value."""
        work, result = operands.gather(send, recv, root, self._launcher.ranks("gather_async"))
        return self._launcher.launch("gather_async", work, tag, result)

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
            tag: as for `all_reduce`.
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            ValueError, AssertionError: the arrays do not match each other, cannot be divided, or
                one is missing; or no peer has that rank.
            TypeError: `root` is not a rank.
        """
        work, result = operands.scatter(send, recv, root, self._launcher.ranks("scatter"))
        self._launcher.run("scatter", work, tag, timeout)
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
        work, result = operands.scatter(send, recv, root, self._launcher.ranks("scatter_async"))
        return self._launcher.launch("scatter_async", work, tag, result)

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
        """Gives each peer of the group its part of this peer's array, and takes one from each.

        Args:
            send: an array, or a list or dict of arrays, whose first dimension is a multiple of
                `world_size`; the r-th part of it is for rank r.
            recv: like `send` in form, dtypes, element counts and memory order; the r-th part is
                from rank r. It must not overlap `send`. None: new arrays like `send`.
            send_rows: how many rows of the first dimension are for each rank, the same for all
                arrays of a list or dict; they add up to that dimension. The arrays must lie in C's
                order then. None, together with `recv_rows`: equally many for each.
            recv_rows: how many are from each rank: what that peer says in its `send_rows`.
            tag: as for `all_reduce`.
            timeout: seconds after which the collective fails, on all peers.

        Returns:
            `recv`, or the new arrays in the same form as `send`.

        Raises:
            PCCLError, OverflowError: as for `all_reduce`.
            MismatchError: INVALID_ARGUMENT: a peer takes another number of rows than one gives.
            ValueError, AssertionError: the arrays do not match each other or the numbers of rows,
                overlap, or cannot be divided.
        """
        ranks = self._launcher.ranks("all_to_all")
        work, result = operands.all_to_all(send, recv, send_rows, recv_rows, ranks)
        self._launcher.run("all_to_all", work, tag, timeout)
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
        ranks = self._launcher.ranks("all_to_all_async")
        work, result = operands.all_to_all(send, recv, send_rows, recv_rows, ranks)
        return self._launcher.launch("all_to_all_async", work, tag, result)

    # ---- between two peers ----

    def send(
        self, arrays: Arrays, to: int, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Sends to one peer of the group, which must call `recv`; no other peer has a part in it.

        The data travels directly between the two, over a connection of its own. `to` is the peer
        that had this rank when the program last saw the ranks; if it is lost, the call fails, and
        never reaches another one. If a third peer is lost, nothing happens to it.

        Args:
            arrays: an array, or a list or dict of arrays: of the same form, dtypes, element counts
                and memory order as in the other peer's call.
            to: rank of the other peer.
            tag: distinguishes sends from this peer to that one that are under way at the same time.
                Sends in the other direction or to others, and collectives, have tags of their own.
            timeout: seconds after which it fails, on both peers.

        Returns:
            2, and the payload bytes that this peer sent and received.

        Raises:
            PCCLTimeoutError: the time limit has passed; the message names the missing peer.
            PeerLostError: RANK_CONNECTION_LOST: the other peer is lost, or cannot be reached.
            PCCLError: TOO_FEW_PEERS, INVALID_ARGUMENT (the two ask for different arrays, or the tag
                is in use), INVALID_USAGE (the other peer stands in a call that waits for this one).
            ValueError: no other peer has that rank, or the arrays cannot be sent.
            TypeError: `to` is not a rank.
            OverflowError: `tag` is negative or above 2**64 - 1.
        """
        work = operands.send(arrays, self._launcher.pair("send", to, True))
        return self._launcher.run("send", work, tag, timeout)

    def send_async(self, arrays: Arrays, to: int, *, tag: int = 0) -> AsyncReduceHandle:
        """Launches `send` and returns at once. The arrays must not be touched until `wait()`."""
        work = operands.send(arrays, self._launcher.pair("send_async", to, True))
        return self._launcher.launch("send_async", work, tag, arrays)

    def recv(
        self, arrays: Arrays, source: int, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Receives from one peer of the group, which must call `send`: see there.

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
        work = operands.recv(arrays, self._launcher.pair("recv", source, False))
        return self._launcher.run("recv", work, tag, timeout)

    def recv_async(self, arrays: Arrays, source: int, *, tag: int = 0) -> AsyncReduceHandle:
        """Launches `recv` and returns at once; the handle's `result` is `arrays`."""
        work = operands.recv(arrays, self._launcher.pair("recv_async", source, False))
        return self._launcher.launch("recv_async", work, tag, arrays)

    def send_recv(
        self,
        sends: Mapping[int, Arrays],
        recvs: Mapping[int, Arrays],
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Sends to some peers and receives from some, all at the same time, in any order.

        Each of these succeeds or fails for itself, as `send` and `recv` do.

        Args:
            sends: arrays to be sent, by the rank of the peer to which they go.
            recvs: where the data goes, by the rank of the peer from which it comes.
            tag: of all of them.
            timeout: seconds for all of them.

        Raises:
            PCCLError: the first failure; all others have ended, too.
            ValueError, TypeError, OverflowError: as for `send`; nothing has been launched then.
        """
        pair, name = self._launcher.pair, "send_recv"
        work = [operands.send(arrays, pair(name, rank, True)) for rank, arrays in sends.items()]
        work += [operands.recv(arrays, pair(name, rank, False)) for rank, arrays in recvs.items()]
        self._launcher.run_at_once(name, work, tag, timeout)
