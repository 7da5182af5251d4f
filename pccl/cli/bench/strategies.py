"""How collectives of the measured sizes travel, as `pccl.protocol.strategy` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pccl.cli.bench.trials import Job, blocks
from pccl.protocol.messages import CollectiveKind, Ring, Spec
from pccl.protocol.strategy import Conditions, Settings, Strategy, choose
from pccl.runtime.config import Config
from pccl.runtime.quantization import fingerprint, wire_bytes
from pccl.types import DataType, QuantizationName, QuantizationOptions, ReduceOp


def chosen(
    what: str,
    nbytes: int,
    peers: int,
    *,
    together: bool,
    dtype: DataType = DataType.FLOAT,
    op: ReduceOp = ReduceOp.SUM,
    quantization: QuantizationName | None = None,
    settings: Settings | None = None,
) -> Strategy:
    """How a collective of `nbytes` travels among peers on one machine, or on several."""
    kind = CollectiveKind(what)
    options = QuantizationOptions.of(quantization) if quantization else None
    count = nbytes // dtype.itemsize // blocks(what, peers)
    spec = Spec(kind, op.value, dtype.value, count, *fingerprint(options, dtype, op))
    order = tuple(range(1, peers + 1))
    rings = (Ring(order, 1),)
    known = Conditions(1, peers, rings, together, together, settings or Settings())
    return choose(spec, wire_bytes(spec, dtype, count * blocks(what, peers)), known)


def explained(job: Job, sizes: Sequence[int]) -> Iterator[str]:
    """The lines of `pccl bench WHAT --explain`: each size, with one machine and with several."""
    config = Config.from_env()
    how = partial(
        chosen,
        job.what,
        peers=job.peers,
        dtype=job.dtype,
        op=job.op,
        quantization=job.quantization,
        settings=Settings(config.inline_bytes, job.lanes, config.lanes),
    )
    wire = f" as {job.quantization}" if job.quantization else ""
    yield f"# {job.what}: {job.peers} peers, {job.dtype.common_name}{wire}"
    yield f"# {'size (B)':>10}  {'all on one machine':<48}on several machines"
    for nbytes in sizes:
        here, apart = (how(nbytes, together=together) for together in (True, False))
        yield f"{nbytes:>12}  {here!s:<48}{apart}"
