"""The collectives of a torch process group.

Each method that `_collective` decorates is one call of torch. It gives the flat tensors to send and
to receive, in order, and the operands of pccl that they become. The decorator and `_task` handle
the rest: torch's two forms of arguments, the launch, a group of one, profiling.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import (  # type: ignore[attr-defined]
    _record_function_with_args_enter,
    _record_function_with_args_exit,
    profiler,
)
from torch.distributed import ReduceOp

from pccl import Communicator, PCCLError, extension, operands
from pccl import ReduceOp as Op
from pccl.extension import Deadline, Operands, Ranks
from pccl.torch import recorder
from pccl.torch.members import Members
from pccl.torch.p2p import BARRIER_TAG, Sends
from pccl.torch.tensors import Reduction, flat, movable, moved_size, put, reducible
from pccl.torch.work import CoalescedWork, Handle, Task, Work, eager, in_pool, nothing

_LEAST_S = 0.001  # the minimum time limit, for messages that have already arrived
FIRST_TAG = 1 << 32  # lower tags are for the user and for this integration's own calls

Tensors: TypeAlias = Sequence[Tensor]
Order: TypeAlias = Sequence[int]  # torch's ranks, by the position in the ring
NOTHING: Mapping[str, Sequence[int]] = MappingProxyType({})


class Options(NamedTuple):
    """The arguments of a collective except its tensors."""

    root: int = 0
    op: Any = ReduceOp.SUM
    timeout: timedelta | None = None
    is_async: bool = True

    @classmethod
    def of(cls, *given: Any) -> Options:
        options = cls()
        for each in given:
            if isinstance(each, timedelta):
                options = options._replace(timeout=each)
            elif isinstance(each, int):
                options = options._replace(root=each)
            elif isinstance(each, ReduceOp | ReduceOp.RedOpType):
                options = options._replace(op=each)
            elif each is not None:
                root, op = getattr(each, "rootRank", 0), getattr(each, "reduceOp", ReduceOp.SUM)
                is_async = getattr(each, "asyncOp", True)
                options = cls(root, op, getattr(each, "timeout", None), is_async)
        return options


def _collective(build: Callable[..., Task]) -> Callable[..., Work]:
    """Makes a call of torch from a method that returns its task for tensors and `Options`."""
    *names, last = list(inspect.signature(build).parameters)[1:]
    assert last == "options"

    @eager
    @functools.wraps(build)
    def call(self: Collectives, *given: Any, **named: Any) -> Work:
        tensors = {name: named.pop(name) for name in names if name in named}
        count = len(names) - len(tensors)
        options = Options.of(*given[count:], *named.values())
        tensors.update(zip([name for name in names if name not in tensors], given, strict=False))
        inputs = [each for name, each in tensors.items() if not name.startswith("output")]
        return self.run(build(self, **tensors, options=options), options, inputs)

    return call


class Collectives:
    """The calls of a process group.

    All members make the same calls in the same order. Several may be in progress at a time.
    """

    _comm: Communicator
    members: Members

    def _setup(self, comm: Communicator, members: Members, timeout: timedelta) -> None:
        self._comm = comm
        self.members = members
        self._sends = Sends(comm, members)
        self.timeout = timeout
        self._launching = threading.Lock()
        self._next_tag = FIRST_TAG
        self._coalescing: list[Work] | None = None
        self._under_way: set[Work] = set()

    def _drain(self) -> None:
        """Waits until all collectives have succeeded or failed.

        After a failure it abandons the others, which another member may never launch.
        """
        for work in list(self._under_way):
            work.drive(0.0 if self.members.failed else None)
        self._sends.give_up()

    def _restart(self) -> None:
        """Resets the tags, so that the members' next calls match; no call may be in progress."""
        with self._launching:
            self._next_tag = FIRST_TAG
            self.members.failed = False

    def run(
        self,
        task: Task,
        options: Options = Options(),  # noqa: B008 - immutable
        inputs: Any = (),
    ) -> Work:
        """Launches a task. An asynchronous one ends even if its caller does not wait for it.

        A profile shows the task until its end, with the shapes of `inputs`, which may be nested
        lists.
        """
        limit = options.timeout
        timeout = limit if limit is not None and limit > timedelta(0) else self.timeout
        if profiler._is_profiler_enabled or recorder.SIZE:
            task = self._traced(task, _flat(inputs), timeout.total_seconds())
        with self._launching:
            work = Work(task, self._next_tag, self.members, timeout.total_seconds())
            work.begin(self._under_way)
            self._next_tag += task.counts
        if options.is_async:
            work.follow()
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _traced(self, task: Task, inputs: Tensors, timeout_s: float) -> Task:
        """The task, shown in the profile and the flight recorder until its end."""
        name, ended = f"pccl:{task.name}", list[Callable[[bool], None]]()
        if profiler._is_profiler_enabled:
            ended.append(_span(name, inputs))
        if recorder.SIZE:
            group = getattr(self, "group", self)  # a DeviceBackend has a group
            ended.append(recorder.record(group, name, task.counts, inputs, timeout_s))
        return replace(task, ended=lambda well: [end(well) for end in ended])

    def _get_sequence_number_for_group(self) -> int:
        return self._next_tag - FIRST_TAG

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: calls are always counted."""

    # ---- tasks ----

    def task(
        self,
        name: str,
        result: Any,
        sent: Sequence[Tensor | Tensors],
        received: Sequence[Tensor | Tensors],
        make: Callable[..., Operands],
        *,
        again: bool = False,
        root: int | None = None,
        by_rank: Mapping[str, Sequence[int]] = NOTHING,
        then: Callable[[], object] = nothing,
        prepare: Callable[[], object] = nothing,
        **fixed: Any,
    ) -> Task:
        """The task of a collective.

        Args:
            name: for messages and profiles.
            result: what its future yields.
            sent: tensors. An element may also be a list with one tensor for each rank, which are
                sent as one, in the order of the ring.
            received: likewise, the tensors that receive. A group of one copies the sent ones there.
            make: the function of `pccl.operands`; it gets these, its other arguments from `root`
                and `by_rank` (torch's ranks) and from `fixed`, and the ranks, unless `again`.
            again: whether it is launched again if a peer is lost in it.
            then: is called after success, when the tensors have received.
            prepare: is called before each launch.
        """
        givers, takers = [_moved(each) for each in sent], [_moved(each) for each in received]

        def arrange(order: Order, tag: int | None) -> tuple[Tensors, Tensors]:
            prepare()
            taken = [_joined(each, order) for each in takers]
            found = [_joined(each, order, taken) for each in givers]
            given = [
                torch.cat([each[rank] for rank in order]) if whole is None else whole
                for each, whole in zip(givers, found, strict=True)
            ]
            fresh = [
                each[0].new_empty(sum(one.numel() for one in each)) if whole is None else whole
                for each, whole in zip(takers, taken, strict=True)
            ]
            return given, fresh

        def compose(given: Any, taken: Any, order: Order, ranks: Ranks) -> Operands:
            more: dict[str, Any] = {
                key: [counts[rank] for rank in order] for key, counts in by_rank.items()
            }
            more |= {} if root is None else {"root": order.index(root)}
            return make(given, taken, **more, **fixed, **({} if again else {"ranks": ranks}))

        def settle(order: Order, wholes: Tensors) -> None:
            for target, whole in zip(received, wholes, strict=True):
                if isinstance(target, Tensor):
                    put(target, whole)
                else:
                    ranked = [target[rank] for rank in order]
                    _put_all(ranked, torch.split(whole, [moved_size(each) for each in ranked]))
            then()

        return self._task(name, result, arrange, compose, settle, again)

    def gather_and_combine(
        self,
        name: str,
        result: Any,
        give: Callable[[int | None], Tensors],
        combine: Callable[[Tensors], object],
    ) -> Task:
        """Gathers the results of `give` for the tag of a launch, in any order; all combine them.

        The tag is None if this member is alone.
        """

        def arrange(order: Order, tag: int | None) -> tuple[Tensors, Tensors]:
            sent = give(tag)
            return sent, [each.new_empty((len(order), *each.shape)) for each in sent]

        return self._task(
            name, result, arrange,
            lambda sent, received, order, ranks: operands.all_gather(sent, received, ranks),
            lambda order, received: combine(received), again=True,
        )  # fmt: skip

    def _task(
        self,
        name: str,
        result: Any,
        arrange: Callable[[Order, int | None], tuple[Tensors, Tensors]],
        compose: Callable[[Any, Any, Order, Ranks], Operands],
        settle: Callable[[Order, Tensors], object],
        again: bool,
    ) -> Task:
        """`arrange` returns the flat tensors to send, and those to receive."""
        known = self.members.order
        moved: list[tuple[Order, Tensors]] = []

        def launch(tag: int) -> Handle:
            ring = self.members.ring() if again else self.members.known_ring()
            order = range(len(ring)) if again else [known.index(number) for number in ring]
            sent, received = arrange(order, tag)
            moved[:] = [(order, received)]
            given = _none_one_or_list(sent), _none_one_or_list(received)
            work = compose(*given, order, self.members.ranks(ring))
            return extension.launch(self._comm, name, work, tag)

        def alone() -> None:
            sent, received = arrange([0], None)
            for source, target in zip(sent, received, strict=True):
                if source is not target:
                    target.view(-1).copy_(source.view(-1))
            moved[:] = [([0], received)]

        return Task(name, launch, result, alone, lambda: settle(*moved[0]), again=again)

    def _check_root(self, root: int) -> bool:
        if not 0 <= root < self.members.size:
            raise ValueError(f"root is {root}: ranks are 0 to {self.members.size - 1}")
        return root == self.members.rank

    def _one_each(self, what: str, tensors: Tensors) -> None:
        if len(tensors) != self.members.size:
            raise ValueError(
                f"{len(tensors)} {what} tensors: it must be one for each of the "
                f"{self.members.size} members"
            )

    def _parts_of(
        self, what: str, wholes: Tensors, part: str, parts: Tensors
    ) -> tuple[Tensors, list[Tensors]]:
        """The flat forms of tensors with a part for each member, and those parts by rank."""
        size = self.members.size
        for whole, each in zip(wholes, parts, strict=True):
            if whole.numel() != size * each.numel():
                raise ValueError(
                    f"the {what} has {whole.numel()} elements, the {part} {each.numel()}: it must "
                    f"be {size} times as many, one part for each member"
                )
            if whole.dtype != each.dtype:
                raise ValueError(f"the {what} is {whole.dtype}, the {part} {each.dtype}")
        flats = [each.detach().reshape(-1) for each in wholes]
        return flats, [list(each.view(size, -1).unbind()) for each in flats]

    # ---- torch's calls ----

    @_collective
    def allreduce(self, tensors: Any, options: Options) -> Task:
        tensors, reduction = _list(tensors), Reduction.of(options.op)
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors[0], reduction)
        if reduction.bitwise is not None:
            pieces = _bits(tensors)

            def combine(gathered: Tensors) -> None:
                _put_all(tensors, [reduction.combine(list(rows)) for rows in gathered])

            return self.gather_and_combine("all_reduce", tensors, lambda tag: pieces, combine)
        op, pieces = reduction.for_dtypes(tensors), [reduction.given(t) for t in tensors]
        return self.task(
            "all_reduce", tensors, pieces, pieces, operands.all_reduce, op=op, again=True,
            then=lambda: _put_all(tensors, pieces),
        )  # fmt: skip

    def _sparse_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Task:
        """Gathers sparse tensors (COO) and sums them.

        The members first find the largest number of elements, and pad theirs to that.
        """
        if reduction.op not in (Op.SUM, Op.AVG):
            raise ValueError("sparse tensors can only be summed or averaged")
        mine = tensor.detach().coalesce()
        places, values = mine.indices().t().contiguous(), mine.values().contiguous()
        values = reduction.scaled(values, values.dtype)

        def give(tag: int | None) -> Tensors:
            room = torch.tensor([len(values)])
            if tag is not None:
                handle = self._comm.all_reduce_async(room, op="max", tag=tag)
                if not handle.wait()[0]:
                    assert handle.error is not None
                    raise handle.error

            def filled(piece: Tensor) -> Tensor:
                missing = int(room) - len(piece)
                return torch.cat([piece, piece.new_zeros((missing, *piece.shape[1:]))])

            return [torch.tensor([len(values)]), filled(places), filled(values)]

        def combine(gathered: Tensors) -> None:
            counts, all_places, all_values = gathered
            parts = [
                torch.sparse_coo_tensor(
                    place[:count].t(), value[:count], mine.shape, check_invariants=True
                )
                for count, place, value in zip(counts.view(-1), all_places, all_values, strict=True)
            ]
            total: Any = sum(parts[1:], parts[0]).coalesce()
            tensor.copy_(total / len(parts) if reduction.op is Op.AVG else total)

        return self.gather_and_combine("all_reduce", [tensor], give, combine)

    @_collective
    def broadcast(self, tensors: Any, options: Options) -> Task:
        tensors = _list(tensors)
        self._check_root(options.root)
        return self.task("broadcast", tensors, tensors, tensors, _broadcast, root=options.root)

    @_collective
    def allgather(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        single = isinstance(input_tensors, Tensor)
        outputs = [list(group) for group in ([output_tensors] if single else output_tensors)]
        return self._all_gather(outputs, outputs, input_tensors)

    @_collective
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], options: Options
    ) -> Task:
        by_input = [list(group) for group in zip(*output_lists, strict=True)]
        return self._all_gather(by_input, by_input, input_list)

    @_collective
    def all_gather_single(self, output: Any, input: Any, options: Options) -> Task:
        """Gathers into one tensor; several inputs, each into one, with one collective."""
        outputs, inputs = _list(output), _list(input)
        wholes, parts = self._parts_of("output", outputs, "input", inputs)
        return self._all_gather(outputs, parts, inputs, lambda: _put_all(outputs, wholes))

    def _all_gather(
        self,
        result: Any,
        outputs: Sequence[Tensors],
        inputs: Any,
        then: Callable[[], object] = nothing,
    ) -> Task:
        """`outputs[i][r]` gets the i-th input of rank r; sizes may differ between ranks."""
        for group in outputs:
            self._one_each("output", group)
        sizes = [[moved_size(output) for output in group] for group in outputs]
        rows = sizes[0] if len(set(sizes[0])) > 1 else None  # by rank, if they differ
        if rows is not None and any(each != rows for each in sizes):
            raise ValueError("if sizes differ between ranks, each list must have the same sizes")

        return self.task(
            "all_gather", result, _list(inputs), outputs, operands.all_gather,
            by_rank=NOTHING if rows is None else {"rows": rows}, then=then,
        )  # fmt: skip

    @_collective
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        single = isinstance(output_tensors, Tensor)
        inputs = [input_tensors] if single else input_tensors
        return self._reduce_scatter(_list(output_tensors), inputs, options)

    @_collective
    def reduce_scatter_single(self, output: Any, input: Any, options: Options) -> Task:
        """Reduces and scatters one tensor, or several with one collective."""
        outputs, inputs = _list(output), _list(input)
        _, parts = self._parts_of("input", inputs, "output", outputs)
        return self._reduce_scatter(outputs, parts, options)

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], options: Options
    ) -> Task:
        """On rank r, `outputs[i]` gets the sum of all members' `inputs[i][r]`.

        Parts may differ in size between ranks: all are padded to the largest.
        """
        for group, output in zip(inputs, outputs, strict=True):
            self._one_each("input", group)
            own = group[self.members.rank]
            if own.numel() != output.numel() or own.dtype != output.dtype:
                raise ValueError(
                    f"the output has {output.numel()} elements of {output.dtype}, this member's "
                    f"part of the input {own.numel()} of {own.dtype}"
                )
        reduction = Reduction.of(options.op)
        if reduction.bitwise is not None:  # an all-to-all, whose result each member combines
            if len(outputs) != 1:
                raise ValueError("a bitwise reduce_scatter has one output: make several calls")
            _bits(outputs)
            (output,), (group,) = outputs, inputs
            given = [torch.empty_like(output) for _ in group]

            def combine() -> None:
                put(output, flat(reduction.combine(given)))

            return self._all_to_all("reduce_scatter", [output], given, group, combine)
        op = reduction.for_dtypes(outputs)
        parts = [[reduction.given(tensor) for tensor in group] for group in inputs]
        room = [max(part.numel() for part in group) for group in parts]
        targets = [
            target if target.numel() == count else target.new_empty(count)
            for target, count in zip(map(reducible, outputs), room, strict=True)
        ]

        def filled(part: Tensor, count: int) -> Tensor:
            missing = count - part.numel()
            return torch.cat([part, part.new_zeros(missing)]) if missing else part

        def then() -> None:
            for output, target in zip(outputs, targets, strict=True):
                put(output, target[: moved_size(output)])

        sent = [[filled(each, n) for each in group] for group, n in zip(parts, room, strict=True)]
        return self.task(
            "reduce_scatter", list(outputs), sent, targets, operands.reduce_scatter,
            op=op, options=None, then=then,
        )  # fmt: skip

    @_collective
    def reduce(self, tensors: Any, options: Options) -> Task:
        """Only the root's tensor changes."""
        (tensor,), reduction = _list(tensors), Reduction.of(options.op)
        root, mine = options.root, self._check_root(options.root)
        if reduction.bitwise is not None:
            _bits([tensor])
            rows = [torch.empty_like(tensor) for _ in self.members.order] if mine else []
        else:
            op, rows = reduction.for_dtypes([tensor]), [reduction.given(tensor, copied=True)]

        def then() -> None:
            if mine:
                put(tensor, flat(reduction.combine(rows)) if reduction.bitwise else rows[0])

        if reduction.bitwise is not None:
            return self._gather("reduce", [tensor], rows, tensor, root, then)
        return self.task(
            "reduce", [tensor], rows, rows, operands.reduce, root=root, op=op, options=None,
            then=then,
        )  # fmt: skip

    @_collective
    def gather(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        (tensor,), root = _list(input_tensors), options.root
        outputs = _inner(output_tensors) if self._check_root(root) else []
        if self._check_root(root):
            self._one_each("output", outputs)
        return self._gather("gather", [list(outputs)], outputs, tensor, root)

    def _gather(
        self, name: str, result: Any, outputs: Tensors, tensor: Tensor, root: int,
        then: Callable[[], object] = nothing,
    ) -> Task:  # fmt: skip
        taken = [outputs] if self._check_root(root) else []
        return self.task(name, result, [tensor], taken, operands.gather, root=root, then=then)

    @_collective
    def scatter(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        outputs, root = _list(output_tensors), options.root
        inputs = [_inner(input_tensors)] if self._check_root(root) else []
        for each in inputs:
            self._one_each("input", each)
        return self.task("scatter", outputs, inputs, outputs, operands.scatter, root=root)

    @_collective
    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], options: Options
    ) -> Task:
        return self._all_to_all("all_to_all", list(output_tensors), output_tensors, input_tensors)

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        options: Options,
    ) -> Task:
        outputs = _parts(output, output_split_sizes, self.members.size)
        inputs = _parts(input, input_split_sizes, self.members.size)
        return self._all_to_all("all_to_all", outputs, outputs, inputs)

    def _all_to_all(
        self,
        name: str,
        result: Any,
        outputs: Tensors,
        inputs: Tensors,
        then: Callable[[], object] = nothing,
    ) -> Task:
        """Sends one of `inputs` to each member, and receives one of `outputs`, by rank.

        They may differ in size, and be empty.
        """
        self._one_each("output", outputs)
        self._one_each("input", inputs)

        rows = {
            "send_rows": [moved_size(each) for each in inputs],
            "recv_rows": [moved_size(each) for each in outputs],
        }
        return self.task(
            name, result, [inputs], [outputs], operands.all_to_all, by_rank=rows, then=then
        )

    @_collective
    def barrier(self, options: Options) -> Task:
        return Task("barrier", lambda tag: self._comm.barrier_async(tag=tag), [], again=True)

    @eager
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self.run(self._sends.send(tensor, dst, tag), inputs=tensors)

    @eager
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self.run(self._sends.recv(tensor, src, tag), inputs=tensors)

    @eager
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        (tensor,) = tensors
        return self.run(self._sends.recv_any(tensor, tag), inputs=tensors)

    @eager
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Waits up to `timeout` for all members.

        Raises:
            RuntimeError: on rank 0, if others have not come; the error names the first one, or with
                `wait_all_ranks` all of them. On other ranks, if rank 0 has not answered.
        """
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        deadline, limit = Deadline(limit_s), f"{limit_s * 1000:.0f} ms"

        def message(make: Callable[[Tensor, int, int], Task], rank: int) -> Work:
            left = timedelta(seconds=max(_LEAST_S, deadline.left_s or 0.0))
            task = make(torch.ones(1), rank, BARRIER_TAG)
            return self.run(task, Options(timeout=left, is_async=False))

        send, recv, rank = self._sends.send, self._sends.recv, self.members.rank
        if rank != 0:
            try:
                message(send, 0).wait()
                message(recv, 0).wait()
            except PCCLError as error:
                raise RuntimeError(
                    f"Rank {rank} successfully reached monitoredBarrier, but received errors "
                    f"while waiting for send/recv from rank 0: {error}"
                ) from error
            return
        if deadline.left_s == 0:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit}")
        others = range(1, self.members.size)
        works = [message(recv, other) for other in others]
        missing = {}
        for other, work in zip(others, works, strict=True):
            try:
                work.wait()
            except PCCLError as error:
                missing[other] = error
        if missing:
            named = list(missing) if wait_all_ranks else list(missing)[:1]
            who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
            why = missing[named[0]]
            raise RuntimeError(f"{who} failed to pass monitoredBarrier in {limit}: {why}") from why
        for other in others:
            message(send, other).wait()

    allreduce_coalesced = allreduce
    all_gather_single_coalesced = all_gather_single
    reduce_scatter_single_coalesced = reduce_scatter_single

    # the names before torch 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- several calls as one

    @eager
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    @eager
    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)


def _span(name: str, inputs: Tensors) -> Callable[[bool], None]:
    """Begins a span of the profiler. Returns a function that ends it.

    The span ends in another thread, so torch counts it as asynchronous work, not as the caller's.
    """
    span = _record_function_with_args_enter(name, *inputs)
    return lambda well: in_pool(lambda: _record_function_with_args_exit(span)).result()


def _broadcast(sent: Any, received: Any, **more: Any) -> Operands:
    return operands.broadcast(received, **more)


def _moved(given: Tensor | Tensors) -> Tensor | list[Tensor]:
    return movable(given) if isinstance(given, Tensor) else [movable(each) for each in given]


def _joined(
    given: Tensor | list[Tensor], order: Order, others: Sequence[Tensor | None] = ()
) -> Tensor | None:
    """A flat tensor, or those of all ranks as one in the memory where they lie.

    None: they do not lie one after the other in this order, or `others` overlap that memory.
    """
    if isinstance(given, Tensor):
        return given
    rows = [given[rank] for rank in order]
    places = {each.untyped_storage().data_ptr() for each in rows}
    if len(places) > 1 or any(
        each.untyped_storage().data_ptr() in places for each in others if each is not None
    ):
        return None
    if any(one.data_ptr() + one.nbytes != two.data_ptr() for one, two in itertools.pairwise(rows)):
        return None
    return rows[0].as_strided((sum(each.numel() for each in rows),), (1,))


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [each for inner in tensors for each in _flat(inner)]


def _inner(tensors: Any) -> Any:
    """The list of tensors in a list of one such list."""
    return tensors[0] if tensors and not isinstance(tensors[0], Tensor) else tensors


def _none_one_or_list(pieces: Tensors) -> Any:
    """Unwraps a single tensor, so that a small one travels with the votes."""
    return None if not pieces else pieces[0] if len(pieces) == 1 else list(pieces)


def _put_all(tensors: Tensors, pieces: Tensors) -> None:
    for tensor, piece in zip(tensors, pieces, strict=True):
        put(tensor, piece)


def _bits(tensors: Tensors) -> list[Tensor]:
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        raise ValueError("bitwise operations are for integers and bools")
    return [movable(tensor) for tensor in tensors]


def _parts(tensor: Tensor, sizes: list[int], members: int) -> list[Tensor]:
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
    return list(torch.split(tensor, sizes))
