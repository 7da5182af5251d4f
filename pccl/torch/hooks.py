"""Hooks for `register_comm_hook` of DistributedDataParallel, which average a bucket of gradients.

They divide by the number of contributors, which excludes a peer that is lost in the call.

    ddp.register_comm_hook(None, pccl.torch.hooks.avg)
    ddp.register_comm_hook(hooks.Quantized("int8"), hooks.quantized)
"""

# no `from __future__ import annotations`: torch needs types in the annotations of a hook

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pccl import QuantizationOptions, ReduceOp, kernels, operands
from pccl.torch.collectives import Collectives
from pccl.torch.tensors import flat, put
from pccl.torch.work import Work


def _group(group: Any) -> Collectives:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, Collectives):
        raise ValueError("the hooks of pccl.torch need a pccl group")
    return found


def _first(future: Future[Any]) -> Tensor:
    found: Tensor = future.value()[0]
    return found


def avg(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, around the ring. `state` is the group; None: the default group."""
    work = _group(state).allreduce([bucket.buffer()], dist.ReduceOp.AVG)
    return work.get_future().then(_first)


@dataclass(slots=True)
class _Feedback:
    """Memory for the error feedback of a bucket, kept because fresh memory in each step is slow."""

    error: Tensor  # added to the next gradient
    sent: Tensor
    lost: Tensor  # becomes the error if the call succeeds


class Quantized:
    """The state of the hook `quantized`: the format of gradients, and their quantization errors.

    With "int8" and "int4", a quantized all-reduce takes two stages, in which each of R peers sends
    2 (R - 1) / R quantized buckets. The other formats gather, so each sends R - 1. All peers' means
    have the same bits. A peer adds the errors that it made in its contribution and in a mean to its
    next gradient (error feedback).

    Args:
        format: see `pccl.kernels.quantize`.
        group: None: the default group.
        error_feedback: whether errors are added to the next gradients.
    """

    def __init__(
        self, format: kernels.Format, group: Any = None, *, error_feedback: bool = True
    ) -> None:
        kernels.quantized_size(format, 1)  # raises for an unknown format
        self.format: kernels.Format = format
        self._group = group
        # by the parameters of a bucket: DistributedDataParallel builds new buckets after a step
        self._kept: dict[tuple[Tensor, ...], _Feedback] | None = {} if error_feedback else None

    def launch(self, bucket: GradBucket) -> Work:
        """Replaces the bucket with its mean."""
        gradient, group = bucket.buffer(), _group(self._group)
        given = flat(gradient).to("cpu", torch.float32)
        kept, sent, lost = None, given, torch.empty(0)
        if self._kept is not None:
            kept = self._feedback(self._kept, tuple(bucket.parameters()), given)
            torch.add(given, kept.error, out=kept.sent)
            sent, lost = kept.sent, kept.lost

        def settle(mean: Tensor) -> None:
            put(gradient, mean.to(gradient.device, gradient.dtype))
            if kept is not None:
                kept.error, kept.lost = kept.lost, kept.error

        if self.format == "int8" or self.format == "int4":
            task = group.task(
                "all_reduce", [gradient], [sent], [sent], operands.all_reduce, op=ReduceOp.AVG,
                options=QuantizationOptions.of(self.format), error=kept and lost, again=True,
                prepare=lost.zero_, then=lambda: settle(sent),
            )  # fmt: skip
            return group.run(task)
        return group.run(self._gather(group, gradient, sent, lost, settle))

    def _gather(
        self,
        group: Collectives,
        gradient: Tensor,
        sent: Tensor,
        lost: Tensor,
        settle: Callable[[Tensor], None],
    ) -> Any:
        payload = torch.empty(kernels.quantized_size(self.format, sent.numel()), dtype=torch.uint8)
        kernels.quantize(payload, sent, self.format)
        if lost.numel():
            kernels.dequantize(lost, payload, self.format)
            kernels.subtract(lost, sent, lost)
            lost.nan_to_num_(0.0, 0.0, 0.0)

        def combine(gathered: Sequence[Tensor]) -> None:
            mean = torch.empty(sent.numel())
            for number, row in enumerate(gathered[0]):
                (kernels.accumulate if number else kernels.dequantize)(mean, row, self.format)
            kernels.divide(mean, len(gathered[0]))
            settle(mean)

        return group.gather_and_combine("all_gather", [gradient], lambda tag: [payload], combine)

    @staticmethod
    def _feedback(
        kept: dict[tuple[Tensor, ...], _Feedback], parameters: tuple[Tensor, ...], given: Tensor
    ) -> _Feedback:
        """The memory of a bucket. A new bucket inherits the errors of its parameters."""
        if parameters not in kept:
            error, at = torch.zeros_like(given), 0
            known: dict[Tensor, Tensor] = {}
            for bucket in [each for each in kept if not set(each).isdisjoint(parameters)]:
                sizes = [parameter.numel() for parameter in bucket]
                parts = torch.split(kept.pop(bucket).error, sizes)
                known.update(zip(bucket, parts, strict=True))
            for parameter in parameters:
                if parameter in known:
                    error[at : at + parameter.numel()] = known.pop(parameter)
                at += parameter.numel()
            for parameter, part in known.items():
                kept[(parameter,)] = _Feedback(part.clone(), *torch.empty(2, part.numel()))
            kept[parameters] = _Feedback(error, *torch.empty(2, error.numel()))
        return kept[parameters]


def quantized(state: Quantized, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.launch(bucket).get_future().then(_first)
