"""Launches the collectives of one peer, and awaits them or returns handles for them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from pccl import operands
from pccl.calls.collective import AsyncReduceHandle, Launch, info
from pccl.calls.membership import Membership
from pccl.descriptors import ReduceOpDescriptor
from pccl.errors import error_for
from pccl.operands import Ranks, bundles
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Deadline
from pccl.runtime.client.memory import Operands
from pccl.types import ReduceInfo, Result


class Launcher:
    """Launches collectives; the operands say everything about a collective except its tag."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def ranks(self, name: str) -> Ranks:
        """The ranks as this thread knows them, for the API call `name`.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_USAGE.
        """
        client = self._membership.one_of_several(name)
        return self._membership.ranks.of(client.number)

    def pair(self, name: str, rank: int, sends: bool) -> tuple[int, int]:
        """This peer and the one of that rank, the one that sends first.

        Raises:
            PCCLError: TOO_FEW_PEERS, INVALID_USAGE.
            ValueError: no other peer has that rank.
            TypeError: it is not a rank.
        """
        number = self._membership.one_of_several(name).number
        order = self._membership.ranks.order
        rank = operator.index(rank)
        if not 0 <= rank < len(order) or order[rank] == number:
            own = order.index(number)
            raise ValueError(
                f"{rank} is not another peer's rank: they are 0 to {len(order) - 1}, "
                f"and this peer's is {own}"
            )
        return (number, order[rank]) if sends else (order[rank], number)

    def is_alone(self, name: str) -> bool:
        """Whether this peer is the only one in its group."""
        return self._membership.client(name).world.local_size < 2

    def launch(
        self, name: str, work: Operands, tag: int, target: object = None
    ) -> AsyncReduceHandle:
        """Launches a collective; the handle's `result` is `target`."""
        launch = self._prepare(name, tag)
        try:
            launch.begin(work)
            return AsyncReduceHandle(launch, target)
        except BaseException:
            launch.let_go()
            raise

    def run(self, name: str, work: Operands, tag: int, timeout: float | None) -> ReduceInfo:
        """Launches a collective and waits; raises the exception if it fails."""
        deadline = Deadline(timeout)
        launch = self._prepare(name, tag)
        try:
            stuck = timeout is None and self._membership.standing.single_threaded()
            launch.begin(work, stuck)
            end = launch.finish(deadline)
        except BaseException:
            launch.let_go()
            raise
        if isinstance(end, effects.Fail):
            raise launch.error(end)
        return info(end)

    def run_all(
        self,
        name: str,
        descriptors: Sequence[ReduceOpDescriptor],
        max_in_flight: int,
        timeout: float | None,
    ) -> ReduceInfo:
        """Runs several all-reduces, in bundles, and repeats each bundle until it commits."""
        deadline = Deadline(timeout)
        if not descriptors:
            raise error_for(Result.INVALID_ARGUMENT, name, "the list of descriptors is empty")
        if max_in_flight < 1:
            why = f"max_in_flight is {max_in_flight}: it must be at least 1"
            raise error_for(Result.INVALID_ARGUMENT, name, why)
        parts = bundles(descriptors)
        waiting = list(range(len(parts)))
        in_flight: list[tuple[int, Launch]] = []
        world_size = tx_bytes = rx_bytes = 0
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < max_in_flight:
                    index = waiting.pop(0)
                    tags = [each.reduce_descriptor.tag for each in parts[index]]
                    launch = self._prepare(name, *tags)
                    in_flight.append((index, launch))
                    launch.begin(operands.of_descriptors(parts[index]))
                index, launch = in_flight[0]
                end = launch.finish(deadline)
                del in_flight[0]
                if isinstance(end, effects.Answer):
                    one = info(end)
                    world_size = one.local_world_size
                    tx_bytes += one.tx_bytes
                    rx_bytes += one.rx_bytes
                elif end.again:
                    # in the order of the list, so that the windows of all peers overlap
                    waiting = sorted([*waiting, index])
                else:
                    for _, other in in_flight:
                        other.finish(Deadline(0.0))
                    raise launch.error(end)
        except BaseException:
            for _, launch in in_flight:
                launch.let_go()
            raise
        return ReduceInfo(world_size, tx_bytes, rx_bytes)

    def run_at_once(
        self, name: str, work: Sequence[Operands], tag: int, timeout: float | None
    ) -> None:
        """Launches several collectives, waits for all, and raises the exception of the first that
        has failed."""
        deadline = Deadline(timeout)
        launches: list[Launch] = []
        try:
            for one in work:
                launches.append(self._prepare(name, tag))
                launches[-1].begin(one)
            ends = [(launch, launch.finish(deadline)) for launch in launches]
        except BaseException:
            for launch in launches:
                launch.let_go()
            raise
        for launch, end in ends:
            if isinstance(end, effects.Fail):
                raise launch.error(end)

    def _prepare(self, name: str, *tags: int) -> Launch:
        for tag in tags:
            if not 0 <= tag < 1 << 64:
                raise OverflowError(f"tag is {tag}: it must be in 0 to 2**64 - 1")
        membership = self._membership
        client = membership.one_of_several(name)
        return Launch(name, tags, client, membership.standing, membership.ranks)
