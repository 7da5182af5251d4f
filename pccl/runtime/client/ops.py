"""Turns the protocol's effects on ops, with the memory they concern, into orders to the engine."""

from __future__ import annotations

from pccl.protocol.messages import EXCHANGES, CollectiveKind
from pccl.protocol.peer import effects
from pccl.protocol.ring import RingPlace
from pccl.runtime.client.engine import Engine, Part
from pccl.runtime.client.memory import Operands, Pool
from pccl.runtime.config import MIB, chunk_bytes
from pccl.runtime.digest import LEAF_BYTES
from pccl.runtime.quantization import wire_format

TRANSFER_BYTES = 4 * MIB  # a transfer uses the chunk size of a segment of this size


def register(engine: Engine, effect: effects.RegisterOp, memory: Operands | Pool) -> None:
    """Registers an op, whose memory belongs to the engine until it is settled."""
    ids = {"run": effect.run, "tag": effect.tag, "min_seq": effect.min_seq}
    if isinstance(memory, Pool):
        ids["first_counted"] = memory.first_counted
    if isinstance(memory, Operands) and memory.work.what in EXCHANGES:
        rows = memory.send_rows, memory.recv_rows
        members = max(map(len, rows))
        parts = _parts(memory)
        engine.register_exchange(effect.op, members=members, parts=parts, rows=rows, **ids)
    elif isinstance(memory, Operands):
        engine.register_collective(
            effect.op,
            what=memory.work.what,
            redop=memory.work.redop,
            members=memory.work.members,
            parts=_parts(memory),
            format=wire_format(memory.work),
            rows=memory.work.rows,
            step=memory.gradual.step if memory.gradual is not None else 0,
            **ids,
        )
    elif memory.reader is None:
        engine.register_serve(effect.op, pieces=memory.pieces, limit=memory.limit, **ids)
    else:
        engine.register_fetch(effect.op, pieces=memory.pieces, leaf_bytes=LEAF_BYTES, **ids)


def _parts(memory: Operands) -> list[Part]:
    if memory.wide is not None:
        memory.wide.is_used = True
        wide = memory.wide.parts
    else:
        wide = [None] * len(memory.each)
    # the engine writes to the root's alone what is reduced, but wants all to have an address
    unused = memory.work.what is CollectiveKind.REDUCE
    return [
        Part(
            each.send.address,
            each.recv.address or (each.send.address if unused else 0),
            each.count,
            each.send.dtype.value,
        )
        if copied is None
        else Part(*copied)
        for each, copied in zip(memory.each, wide, strict=True)
    ]


def start(
    engine: Engine,
    effect: effects.StartOp | effects.StartTransfer,
    memory: Operands | Pool,
    local: bool,
) -> None:
    """Starts a registered op. `local`: all its members are on this machine."""
    if isinstance(effect, effects.StartTransfer):
        engine.start_transfer(
            effect.op,
            seq=effect.seq,
            nonce=effect.nonce,
            chunk_bytes=chunk_bytes(TRANSFER_BYTES, 1, local, False),
            ends=effect.ends,
        )
        return
    engine.start(
        effect.op,
        seq=effect.seq,
        nonce=effect.nonce,
        chunk_bytes=_chunk_bytes(effect.rings, memory, local),
        rings=effect.rings,
        direct=effect.direct,
        calls=effect.calls,
    )


def begin(engine: Engine, effect: effects.BeginOp, memory: Operands | Pool, local: bool) -> None:
    """Lets a registered op send before it starts. `local`: as above."""
    size = _chunk_bytes(effect.rings, memory, local)
    engine.begin(effect.op, chunk_bytes=size, rings=effect.rings, direct=effect.direct)


def _chunk_bytes(rings: tuple[RingPlace, ...], memory: Operands | Pool, local: bool) -> int:
    assert isinstance(memory, Operands), "a ring moves the operands of a collective"
    members = rings[0].members if rings else 1
    return chunk_bytes(memory.nbytes, members, local, bool(memory.work.algorithm))
