"""How a collective travels: the one place that decides it, for C and Python to carry out.

`choose` is a pure function of what is asked for (the spec, which the votes compare), of what is
known of the group, and of this peer's settings. What all members must do alike follows from the
spec and the plan, which they know alike; the size of chunks and of steps concerns their sender
alone. `pccl bench --explain` prints what is chosen, and docs/internals/architecture.md has a table
of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from pccl.protocol import reach
from pccl.protocol.messages import (
    EXCHANGES,
    INLINE,
    INLINE_BYTES_MAX,
    REDUCING,
    CollectiveKind,
    Plan,
    Ring,
    Spec,
)
from pccl.protocol.ring import checksum, span
from pccl.types import DataType, ReduceOp

KIB, MIB = 1 << 10, 1 << 20

INLINE_ALWAYS_BYTES = 64 * KIB  # of a contribution, however many members there are
INLINE_TOTAL_BYTES = 512 * KIB  # of all contributions, which the master handles one by one
# Elements that two members on one machine send each other without a ring: of more, the additional
# work of the processors costs more time than the second hop.
ONE_SHOT_LOCAL_MAX = 1 << 18
# Elements of a step, in whole alignment blocks: 4 MiB of float32. More than travel with a vote,
# which may be sent when the first step is on the host.
STEP = 1 << 20
TRANSFER_BYTES = 4 * MIB  # a transfer of state uses the chunks of a segment of this size

_ITEM_BYTES = {dtype.value: dtype.itemsize for dtype in DataType}
_INTEGERS = {dtype.value for dtype in DataType if dtype.is_integer}


class Algorithm(StrEnum):
    """The way of a collective's data; the same on all members."""

    INLINE = "inline"  # with the votes; the master reduces it
    ONE_SHOT = "one-shot"  # two members send each other everything
    RING = "ring"
    RINGS = "rings"  # several, each with a share of the data
    EXCHANGE = "exchange"  # rows, along the ring with the fewest hops
    PAIR = "pair"  # from one member to another one, on a stream of their own


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings.

    Attributes:
        inline_bytes: the largest contribution that travels with its vote; None: by the members.
        pool_size: connections (lanes) to each neighbour; 0: not set.
        lanes: the same, to neighbours on other machines.
    """

    inline_bytes: int | None = None
    pool_size: int = 0
    lanes: int = 0


DEFAULTS = Settings()


@dataclass(frozen=True, eq=False)  # compared by identity: one is made for each plan
class Conditions:
    """One member's knowledge of its group.

    Attributes:
        number: the member's.
        members: how many there are.
        rings: of the plan.
        together: whether all have one host and machine, as all members know alike.
        local: whether this one reaches all others without a network.
        settings: this peer's.
    """

    number: int
    members: int
    rings: tuple[Ring, ...]
    together: bool
    local: bool
    settings: Settings = DEFAULTS

    @classmethod
    def of(cls, plan: Plan, number: int, settings: Settings) -> Conditions:
        """Those of a plan."""
        own = next((info for info in plan.peers if info.peer == number), None)
        together = len({(info.machine, info.host) for info in plan.peers}) < 2
        local = own is None or all(reach.local(own, info) for info in plan.peers)
        return cls(number, len(plan.peers), plan.rings, together, local, settings)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one collective travels.

    Attributes:
        spec: for which the peer votes.
        nbytes: that are reduced, or gathered, as they go over the wire.
        inline: whether the contribution travels with the vote; if so, the rest does not matter.
        algorithm: if it does not.
        eager: whether members may send before the master has answered their votes, once another
            collective has committed on the same rings.
        chunk_bytes: of a message.
        lanes: connections to the next member; 0: by the round trip.
        step: elements that are copied from and to a device while the others travel; 0: all are
            copied before, and after.
        wide: whether sums would not fit the type of the elements: it averages integers.
    """

    spec: Spec
    nbytes: int
    inline: bool
    algorithm: Algorithm
    eager: bool
    chunk_bytes: int
    lanes: int
    step: int
    wide: bool

    def __str__(self) -> str:
        if self.inline:
            return Algorithm.INLINE
        size, unit = divmod(self.chunk_bytes, MIB)
        chunk = f"{size} MiB" if not unit else f"{self.chunk_bytes // KIB} KiB"
        words = [self.algorithm, *(["eager"] if self.eager else []), f"chunks of {chunk}"]
        known = {0: "lanes by the round trip", 1: "1 lane"}
        words.append(known.get(self.lanes, f"{self.lanes} lanes"))
        return ", ".join(words)


@functools.lru_cache(maxsize=256)  # the same work comes again and again under a plan
def choose(spec: Spec, nbytes: int, conditions: Conditions) -> Strategy:
    """How a collective travels.

    Args:
        spec: what is asked for.
        nbytes: as in `Strategy`.
        conditions: under which it is.
    """
    voted, inline = _inline(spec, conditions)
    algorithm = _algorithm(spec, conditions)
    members = 2 if algorithm is Algorithm.PAIR else max(1, conditions.members)
    wide = _sums_wide(spec)
    in_steps = spec.what == CollectiveKind.ALL_REDUCE and span(spec) > STEP and not wide
    return Strategy(
        voted,
        nbytes,
        inline,
        algorithm,
        _may_be_eager(spec, conditions.rings),
        chunk_bytes(nbytes, members, conditions.local, bool(spec.algorithm)),
        lanes(conditions.local, conditions.settings),
        STEP if in_steps else 0,
        wide,
    )


def _inline(spec: Spec, conditions: Conditions) -> tuple[Spec, bool]:
    """The spec as a vote has it, and whether the contribution travels with the vote.

    Where that depends on the number of members, as far as the size leaves a choice, the vote says
    the number that the voter knows: so voters who know different ones do not meet, and try again.
    """
    if spec.what not in INLINE or spec.parts:
        return spec, False
    nbytes, most = spec.count * _ITEM_BYTES.get(spec.dtype, 1), conditions.settings.inline_bytes
    if most is not None:
        return spec, nbytes <= most
    if spec.algorithm or not INLINE_ALWAYS_BYTES < nbytes <= INLINE_BYTES_MAX:
        return spec, nbytes <= INLINE_ALWAYS_BYTES
    members = conditions.members
    return replace(spec, members=members), nbytes <= INLINE_TOTAL_BYTES // max(1, members)


def _algorithm(spec: Spec, conditions: Conditions) -> Algorithm:
    if spec.what == CollectiveKind.SEND:
        return Algorithm.PAIR
    if spec.what in EXCHANGES:
        return Algorithm.EXCHANGE
    if _is_one_shot(spec, conditions):
        return Algorithm.ONE_SHOT
    return Algorithm.RINGS if len(conditions.rings) > 1 else Algorithm.RING


def _is_one_shot(spec: Spec, conditions: Conditions) -> bool:
    """True if two members send each other everything: as many bytes as around a ring, in one hop.

    That costs memory bandwidth, which is the limit on one machine, and saves half a round trip, and
    another one where one peer is ahead of the other; on one machine, three thread switches on each
    side. What is quantized is then quantized once, and not once more after it was reduced.
    """
    if conditions.members != 2 or not conditions.rings or spec.what != CollectiveKind.ALL_REDUCE:
        return False
    return not conditions.together or (not spec.algorithm and span(spec) <= ONE_SHOT_LOCAL_MAX)


def _may_be_eager(spec: Spec, rings: tuple[Ring, ...]) -> bool:
    """True if each member has data of its own for its successor, and its caller knows the ranks."""
    if not rings or spec.what in EXCHANGES or spec.what == CollectiveKind.BARRIER:
        return False
    order = rings[0].order
    return spec.members in (0, len(order)) and spec.ring in (0, checksum(order))


def _sums_wide(spec: Spec) -> bool:
    if spec.redop != ReduceOp.AVG.value or spec.what not in REDUCING:
        return False
    return any(part.dtype in _INTEGERS for part in spec.parts or (spec,))


def chunk_bytes(total: int, members: int, local: bool, quantized: bool) -> int:
    """The size of a message with a chunk of an all-reduce of `total` bytes.

    With several chunks to a segment, the hops of a ring overlap. Chunks above 1 MiB do not fit the
    caches (measured: half the speed at 4 MiB), and on slow links the last chunks on slow lanes
    delay everyone. On one machine each chunk costs several thread switches, and 256 KiB is fastest
    (measured: with 64 KiB, 1 MiB takes four peers 1.5 times as long). A quantized chunk has about
    four times as many bytes in memory as on the wire.
    """
    segment = total // max(1, members)
    if quantized:
        return max(32 * KIB, min(segment // 16, MIB // 4))
    least, most = (MIB // 4, MIB) if local else (32 * KIB, MIB // 4)
    return max(least, min(segment // 4, most))


def lanes(local: bool, settings: Settings) -> int:
    """Connections to a neighbour: as the user wants, else one on this machine; 0: the engine
    chooses by the round trip."""
    return settings.pool_size or (1 if local else settings.lanes)


def high_water_mark(local: bool) -> int:
    """Messages queued for one lane.

    Four keep a lane on this machine busy and fit the caches. On other lanes the kernel queues more,
    and the end of a collective waits for everything that is queued on a slow lane.
    """
    return 4 if local else 2
