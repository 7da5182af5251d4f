"""Chooses how the data of a collective travels; C and Python carry it out.

`choose` is a pure function of the spec (which the votes compare), the group, and this peer's
settings. Some choices must be the same on all members; these follow from the spec and the plan,
which are the same on all members. The sizes of chunks and steps matter only to their sender. `pccl
bench --explain` prints the choice, and docs/internals/architecture.md has a table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from pccl.protocol import reach
from pccl.protocol.messages import (
    INLINE_BYTES_MAX,
    Plan,
    Ring,
    Spec,
)
from pccl.protocol.ring import checksum, span
from pccl.types import TRAITS, CollectiveKind, DataType, ReduceOp

KIB, MIB = 1 << 10, 1 << 20

INLINE_ALWAYS_BYTES = 64 * KIB  # a contribution's size, for any number of members
# The size of all contributions, which the master handles one by one; and on one machine, where a
# ring takes longer for its switches between threads (on two cores: 1.4 to 2.3 times as long).
INLINE_TOTAL_BYTES, INLINE_TOTAL_LOCAL_BYTES = 512 * KIB, MIB
# Two members on one machine send each other everything, up to this number of elements. Beyond it,
# the additional work of the processors takes longer than the second hop of a ring.
ONE_SHOT_LOCAL_MAX = 1 << 18
# Elements of a step, in whole alignment blocks: 4 MiB of float32. A step exceeds any contribution
# that travels with a vote, because a vote may be sent when the first step is on the host.
STEP = 1 << 20
# The most members that send each other data directly. Each has a stream to every other member,
# which takes about 5 descriptors at the sender and 1 at the receiver.
DIRECT_MAX = 128

_ITEM_BYTES = {dtype.value: dtype.itemsize for dtype in DataType}
_INTEGERS = {dtype.value for dtype in DataType if dtype.is_integer}


class Algorithm(StrEnum):
    """How the data of a collective travels; the same on all members."""

    INLINE = "inline"  # with the votes; the master reduces it
    ONE_SHOT = "one-shot"  # two members send each other everything
    RING = "ring"
    RINGS = "rings"  # several rings, each with a share of the data
    TWO_STAGE = "two-stage"  # quantized contributions to the owners of segments, results around
    EXCHANGE = "exchange"  # rows, directly to their receivers where `Tuning.direct`
    PAIR = "pair"  # from one member to another one, on a separate stream


@dataclass(frozen=True, slots=True)
class Settings:
    # the largest contribution that travels with its vote; None: it depends on the number of members
    inline_bytes: int | None = None
    pool_size: int = 0  # connections (lanes) to each neighbor; 0: not set
    lanes: int = 0  # connections to each neighbor on another machine; 0: not set
    # the largest number of members to which this peer can have streams at once
    direct_max: int = DIRECT_MAX


DEFAULTS = Settings()


@dataclass(frozen=True, eq=False)  # compared by identity: one is made for each plan
class Conditions:
    """One member's knowledge of its group."""

    number: int  # the member's number
    members: int  # the number of members
    rings: tuple[Ring, ...]  # the rings of the plan
    together: bool  # whether all members have the same host and machine; the same on all members
    local: bool  # whether this member reaches all others without a network
    settings: Settings = DEFAULTS  # this peer's settings

    @classmethod
    def of(cls, plan: Plan, number: int, settings: Settings) -> Conditions:
        own = next((info for info in plan.peers if info.peer == number), None)
        together = len({(info.machine, info.host) for info in plan.peers}) < 2
        local = own is None or all(reach.local(own, info) for info in plan.peers)
        return cls(number, len(plan.peers), plan.rings, together, local, settings)


@dataclass(frozen=True, slots=True)
class Tuning:
    spec: Spec  # the spec in the peer's vote
    nbytes: int  # bytes that are reduced, or gathered, as they go over the wire
    inline: bool  # whether the contribution travels with the vote; if so, the rest does not matter
    algorithm: Algorithm  # how the data travels otherwise
    # whether members may send before the master has answered their votes, once another collective
    # has committed on the same rings
    eager: bool
    chunk_bytes: int  # the size of a message
    lanes: int  # connections to the next member; 0: chosen by the round trip
    # the elements of a step, which is copied from or to a device while others travel; 0: all
    # elements are copied before and after the collective
    step: int
    wide: bool  # whether it averages integers, whose sums need a wider type
    # whether this member sends rows, or contributions in two stages, directly to their receivers,
    # not around the rings
    direct: bool

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
def choose(spec: Spec, nbytes: int, conditions: Conditions) -> Tuning:
    voted, inline = _inline(spec, conditions)
    algorithm = _algorithm(spec, conditions)
    members = 2 if algorithm is Algorithm.PAIR else max(1, conditions.members)
    wide = _sums_wide(spec)
    in_steps = spec.what == CollectiveKind.ALL_REDUCE and span(spec) > STEP and not wide
    chunk = chunk_bytes(nbytes, members, conditions.local, bool(spec.algorithm))
    if conditions.together and algorithm is Algorithm.ONE_SHOT:
        chunk = max(chunk, min(nbytes // 2, MIB // 2))  # no second hop waits for the first chunk
    return Tuning(
        voted,
        nbytes,
        inline,
        algorithm,
        algorithm is not Algorithm.TWO_STAGE and _may_be_eager(spec, conditions.rings),
        chunk,
        lanes(conditions.local, conditions.settings),
        STEP if in_steps else 0,
        wide,
        algorithm in (Algorithm.EXCHANGE, Algorithm.TWO_STAGE)
        and 2 < members <= min(DIRECT_MAX, conditions.settings.direct_max),
    )


def _inline(spec: Spec, conditions: Conditions) -> tuple[Spec, bool]:
    """The spec for the vote, and whether the contribution travels with the vote.

    If this depends on the number of members, the spec has the number that the voter knows. So votes
    with different numbers do not match, and the voters try again.
    """
    if not TRAITS[spec.what].inline or spec.parts:
        return spec, False
    nbytes, most = spec.count * _ITEM_BYTES.get(spec.dtype, 1), conditions.settings.inline_bytes
    if most is not None:
        return spec, nbytes <= most
    if spec.algorithm or not INLINE_ALWAYS_BYTES < nbytes <= INLINE_BYTES_MAX:
        return spec, nbytes <= INLINE_ALWAYS_BYTES
    members = conditions.members
    total = INLINE_TOTAL_LOCAL_BYTES if conditions.together else INLINE_TOTAL_BYTES
    return replace(spec, members=members), nbytes <= total // max(1, members)


def _algorithm(spec: Spec, conditions: Conditions) -> Algorithm:
    if spec.what == CollectiveKind.SEND:
        return Algorithm.PAIR
    if TRAITS[spec.what].exchange:
        return Algorithm.EXCHANGE
    if _is_one_shot(spec, conditions):
        return Algorithm.ONE_SHOT
    if _is_two_stage(spec, conditions):
        return Algorithm.TWO_STAGE
    return Algorithm.RINGS if len(conditions.rings) > 1 else Algorithm.RING


def _is_one_shot(spec: Spec, conditions: Conditions) -> bool:
    """True if two members send each other everything: as many bytes as around a ring, in one hop.

    This saves half a round trip, and another one if one peer is ahead of the other; on one machine,
    three thread switches on each side. It needs more memory bandwidth, which is the limit on one
    machine. Data is then quantized only once, not again after the reduction.
    """
    if conditions.members != 2 or not conditions.rings or spec.what != CollectiveKind.ALL_REDUCE:
        return False
    return not conditions.together or (not spec.algorithm and span(spec) <= ONE_SHOT_LOCAL_MAX)


def _is_two_stage(spec: Spec, conditions: Conditions) -> bool:
    """True if contributions go directly to the owners of segments, which reduce them.

    A ring quantizes a partial result again at each hop, so the error grows with the members. Two
    stages quantize each contribution once, and the result once, with as many bytes and fewer hops.
    Each member needs a stream to every other member.
    """
    quantized = spec.what == CollectiveKind.ALL_REDUCE and bool(spec.algorithm)
    return quantized and 2 < conditions.members <= DIRECT_MAX


def _may_be_eager(spec: Spec, rings: tuple[Ring, ...]) -> bool:
    """True if each member has data of its own for its successor, and the caller knows the ranks."""
    if not rings or TRAITS[spec.what].exchange or spec.what == CollectiveKind.BARRIER:
        return False
    order = rings[0].order
    return spec.members in (0, len(order)) and spec.ring in (0, checksum(order))


def _sums_wide(spec: Spec) -> bool:
    if spec.redop != ReduceOp.AVG.value or not TRAITS[spec.what].reduces:
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


def transfer_chunk(local: bool = False) -> int:
    """The size of a message of a transfer of state, in which no chunk waits for another."""
    return MIB if local else MIB // 4


def lanes(local: bool, settings: Settings) -> int:
    """Connections to a neighbor: the user's setting, or one on this machine.

    0: the engine chooses by the round trip.
    """
    return settings.pool_size or (1 if local else settings.lanes)


def high_water_mark(local: bool) -> int:
    """Messages queued for one lane.

    Four keep a lane on this machine busy and fit the caches. On other lanes the kernel queues more,
    and the end of a collective waits for everything that is queued on a slow lane.
    """
    return 4 if local else 2
