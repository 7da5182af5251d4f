"""The collectives of a torch process group: torch's calls, turned into tasks and launched."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from pccl import Communicator
from pccl.torch.members import Members
from pccl.torch.p2p import MonitoredBarrier, Sends
from pccl.torch.tasks import ExchangeTasks, Reduction, Tasks
from pccl.torch.work import CoalescedWork, Operation, Task, Work

FIRST_TAG = 1 << 32  # those below are for what the integration itself does, and for the user


class Collectives:
    """The calls of a process group. torch has two names for some, and two forms of arguments.

    All members make the same calls in the same order; several may be under way.
    """

    _comm: Communicator
    members: Members

    def _setup(self, comm: Communicator, members: Members, timeout: timedelta) -> None:
        self._comm = comm
        self.members = members
        self.tasks = Tasks(comm, members)
        self._exchanges = ExchangeTasks(comm, members)
        self._sends = Sends(comm, members)
        self.timeout = timeout
        self._launching = threading.Lock()
        self._next_tag = FIRST_TAG
        self._coalescing: list[Work] | None = None
        self._under_way: set[Operation] = set()

    def _drain(self) -> None:
        """Returns when all collectives have ended, however they do."""
        for operation in list(self._under_way):
            operation.drive()
        self._sends.give_up()

    def _restart(self) -> None:
        """All members have nothing under way: their next calls match."""
        with self._launching:
            self._next_tag = FIRST_TAG

    def run(self, task: Task, options: Any = None) -> Work:
        """Launches a task; one that its caller does not wait for at once ends by itself."""
        given = getattr(options, "timeout", None)
        if isinstance(given, timedelta) and given > timedelta(0):
            timeout = given
        else:
            timeout = self.timeout
        with self._launching:
            operation = Operation(task, self._next_tag, self.members, timeout.total_seconds())
            operation.begin(self._under_way)
            self._next_tag += task.counts
        if getattr(options, "asyncOp", True):
            operation.follow()
        work = Work(operation)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """all_reduce, in place, of one tensor."""
        reduction = Reduction.of(getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts))
        return self.run(self.tasks.all_reduce(_list(tensors), reduction), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """all_reduce of several tensors as one collective."""
        reduction = Reduction.of(getattr(opts, "reduceOp", ReduceOp.SUM))
        return self.run(self.tasks.all_reduce(tensors, reduction), opts)

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: timedelta | None = None) -> Work:
        """Copies the tensors of the root."""
        root = getattr(opts, "rootRank", opts)
        return self.run(self.tasks.broadcast(_list(tensors), root), opts)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """all_gather in a list of tensors for each input."""
        inputs = _list(input_tensors)
        outputs = [output_tensors] if isinstance(input_tensors, Tensor) else output_tensors
        return self.run(self.tasks.all_gather(outputs, inputs), opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """all_gather of several inputs: the r-th list has what rank r gave."""
        by_input = [list(group) for group in zip(*output_lists, strict=True)]
        return self.run(self.tasks.all_gather(by_input, input_list), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """all_gather in one tensor."""
        return self.run(self.tasks.all_gather_single([output], [input]), opts)

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        """all_gather of several inputs, each in one tensor, as one collective."""
        return self.run(self.tasks.all_gather_single(output_lists, input_list), opts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """reduce_scatter of a list of tensors for each output."""
        inputs = [input_tensors] if isinstance(output_tensors, Tensor) else input_tensors
        reduction = Reduction.of(getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts))
        return self.run(self.tasks.reduce_scatter(_list(output_tensors), inputs, reduction), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """reduce_scatter of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """reduce_scatter of several tensors as one collective."""
        reduction = Reduction.of(getattr(opts, "reduceOp", ReduceOp.SUM))
        return self.run(self.tasks.reduce_scatter_single(outputs, inputs, reduction), opts)

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = ReduceOp.SUM) -> Work:
        """Reduces a tensor; the root gets the result, those of others are unchanged."""
        (tensor,), root = _list(tensors), getattr(opts, "rootRank", opts)
        reduction = Reduction.of(getattr(opts, "reduceOp", op))
        return self.run(self._exchanges.reduce(tensor, root, reduction), opts)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = 0, timeout: Any = None
    ) -> Work:
        """Gathers a tensor on the root."""
        (tensor,), root = _list(input_tensors), getattr(opts, "rootRank", opts)
        outputs = output_tensors
        if outputs and not isinstance(outputs[0], Tensor):
            (outputs,) = outputs
        return self.run(self._exchanges.gather(outputs, tensor, root), opts)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = 0, timeout: Any = None
    ) -> Work:
        """Gives each member one of the root's tensors."""
        (tensor,), root = _list(output_tensors), getattr(opts, "rootRank", opts)
        inputs = input_tensors
        if inputs and not isinstance(inputs[0], Tensor):
            (inputs,) = inputs
        return self.run(self._exchanges.scatter(tensor, inputs, root), opts)

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Gives each member one tensor, and takes one from each; sizes may differ."""
        task = self._exchanges.all_to_all(output_tensors, input_tensors)
        return self.run(task, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """all_to_all of parts of one tensor; without sizes, of equal ones."""
        outputs = _parts(output, output_split_sizes, self.members.size)
        inputs = _parts(input, input_split_sizes, self.members.size)
        return self.run(self._exchanges.all_to_all(outputs, inputs), opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Waits for all."""
        return self.run(self.tasks.barrier(), opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a member."""
        (tensor,) = tensors
        return self.run(self._sends.send(tensor, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Receives a tensor from a member."""
        (tensor,) = tensors
        return self.run(self._sends.recv(tensor, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receives a tensor from whoever sends one first."""
        (tensor,) = tensors
        return self.run(self._sends.recv_any(tensor, tag))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Waits for all. After `timeout`, an error on rank 0 names the first that is missing.

        With `wait_all_ranks`, it names all of them.
        """
        limit = self.timeout if timeout is None else timeout
        MonitoredBarrier(self.members, self._sends, self.run).meet(limit, wait_all_ranks)

    # the names before torch 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # several calls as one

    def _start_coalescing(self, device: torch.device) -> None:
        """Remembers the calls that follow."""
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        """The calls since then, as one Work."""
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _parts(tensor: Tensor, sizes: list[int], members: int) -> list[Tensor]:
    """The parts of a tensor along its first dimension, one for each member."""
    if not sizes:
        if tensor.shape[0] % members:
            raise ValueError(
                f"the first dimension is {tensor.shape[0]}: it must be a multiple of {members}, or "
                "sizes must be given"
            )
        sizes = [tensor.shape[0] // members] * members
    if len(sizes) != members or sum(sizes) != tensor.shape[0]:
        raise ValueError(
            f"the sizes {sizes} must be {members} numbers, whose sum is {tensor.shape[0]}"
        )
    return list(tensor.split(sizes))  # type: ignore[no-untyped-call]
