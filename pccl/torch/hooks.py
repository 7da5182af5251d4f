"""Hooks for `register_comm_hook` of DistributedDataParallel, which average a bucket of gradients.

All of them divide by the number of contributors: a peer that is lost in the call is not counted.

    ddp.register_comm_hook(None, pccl.torch.hooks.avg)
    ddp.register_comm_hook(hooks.Quantized("int8"), hooks.quantized)
"""

# no `from __future__ import annotations`: torch needs types in the annotations of a hook

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pccl import kernels
from pccl.torch.collectives import Collectives
from pccl.torch.tensors import flat, put
from pccl.torch.work import Work


def _group(group: Any) -> Collectives:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, Collectives):
        raise ValueError("the hooks of pccl.torch need a group of pccl")
    return found


def _first(future: Future[Any]) -> torch.Tensor:
    found: torch.Tensor = future.value()[0]
    return found


def avg(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, around the ring. `state` is the group; None: the default group."""
    work = _group(state).allreduce([bucket.buffer()], dist.ReduceOp.AVG)
    return work.get_future().then(_first)


class Quantized:
    """The state of the hook `quantized`: how gradients are quantized, and the errors of that.

    A contribution is quantized once, gathered, and summed in float32 in the same order on all
    peers: their means have the same bits. The error of quantizing a gradient is added to the
    gradient of the next step (error feedback).

    Args:
        format: "int8", "int4", "e3m0", "2bit" or "sparse"; see `pccl.kernels.quantize`.
        group: None: the default group.
        error_feedback: whether errors are added to the next gradients.
    """

    def __init__(
        self, format: kernels.Format, group: Any = None, *, error_feedback: bool = True
    ) -> None:
        kernels.quantized_size(format, 1)  # raises if there is no such format
        self.format: kernels.Format = format
        self._group = group
        # by the parameters of a bucket: the quantized gradients minus the true ones.
        # DistributedDataParallel builds new buckets after the first step.
        self._errors: dict[tuple[torch.Tensor, ...], torch.Tensor] | None = None
        if error_feedback:
            self._errors = {}

    def launch(self, bucket: GradBucket) -> Work:
        """Gathers the quantized bucket, and writes the mean over it."""
        gradient = bucket.buffer()
        given = gradient.detach().to("cpu", torch.float32)
        payload = torch.empty(kernels.quantized_size(self.format, given.numel()), dtype=torch.uint8)
        if self._errors is None:
            kernels.quantize(payload, given, self.format)
        else:
            error = self._error(self._errors, tuple(bucket.parameters()), given)
            kernels.quantize_with_feedback(payload, error, given, self.format)

        def combine(gathered: Sequence[torch.Tensor]) -> None:
            whole = flat(gradient)
            straight = whole.is_cpu and whole.dtype == torch.float32
            straight &= self.format != "sparse"  # may be invalid, and must change nothing then
            mean = whole if straight else torch.empty(whole.numel(), dtype=torch.float32)
            kernels.mean(mean, list(gathered[0]), self.format)
            put(gradient, mean if straight else mean.to(gradient.device, gradient.dtype))

        group = _group(self._group)
        return group.run(
            group.gather_and_combine("all_gather", [gradient], lambda: [payload], combine)
        )

    @staticmethod
    def _error(
        errors: dict[tuple[torch.Tensor, ...], torch.Tensor],
        parameters: tuple[torch.Tensor, ...],
        given: torch.Tensor,
    ) -> torch.Tensor:
        """The error of a bucket; a new bucket takes over those of its parameters."""
        if parameters not in errors:
            error, at = torch.zeros_like(given), 0
            known: dict[torch.Tensor, torch.Tensor] = {}
            for bucket in [each for each in errors if not set(each).isdisjoint(parameters)]:
                sizes = [parameter.numel() for parameter in bucket]
                known.update(zip(bucket, torch.split(errors.pop(bucket), sizes), strict=True))
            for parameter in parameters:
                if parameter in known:
                    error[at : at + parameter.numel()] = known.pop(parameter)
                at += parameter.numel()
            errors.update({(parameter,): part.clone() for parameter, part in known.items()})
            errors[parameters] = error
        return errors[parameters]


def quantized(state: Quantized, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.launch(bucket).get_future().then(_first)
