"""The collectives of a torch process group.

Each method that `_collective` decorates is one call of torch. It defines which flat tensors are
sent and received, in which order, and the operands of pccl that they become. The decorator and
`_task` do the rest: torch's two forms of arguments, the launch, a group of one, profiling.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
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
from pccl.torch.work import CoalescedWork, Handle, Task, Work, eager, in_pool

_LEAST_S = 0.001  # the least time limit, for messages that have arrived already
FIRST_TAG = 1 << 32  # lower ones are for the user and for this integration's own calls

Tensors: TypeAlias = Sequence[Tensor]
Order: TypeAlias = Sequence[int]  # torch's ranks, by the position in the ring
# returns the flat tensors that are sent, and those that receive
Arrange: TypeAlias = Callable[[Order], tuple[Tensors, Tensors]]
# takes both, each as None, one tensor or a list
Compose: TypeAlias = Callable[[Any, Any, Order, Ranks], Operands]
Settle: TypeAlias = Callable[[Order, Tensors], None]


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

    All members make the same calls in the same order. Several may be under way at a time.
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
        """Waits until all collectives have succeeded or failed."""
        for work in list(self._under_way):
            work.drive()
        self._sends.give_up()

    def _restart(self) -> None:
        """Resets the tags, so that the members' next calls match; nothing may be under way."""
        with self._launching:
            self._next_tag = FIRST_TAG

    def run(
        self,
        task: Task,
        options: Options = Options(),  # noqa: B008 - immutable
        inputs: Any = (),
    ) -> Work:
        """Launches a task. If it is asynchronous, it ends without its caller, too.

        A profile shows it until its end, with the shapes of `inputs`, which may be nested in lists.
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
        """The task, which a profile and the flight recorder have until its end."""
        name, ended = f"pccl:{task.name}", list[Callable[[bool], None]]()
        if profiler._is_profiler_enabled:
            ended.append(_span(name, inputs))
        if recorder.SIZE:
            group = getattr(self, "group", self)  # of a DeviceBackend
            ended.append(recorder.record(group, name, task.counts, inputs, timeout_s))
        return replace(task, ended=lambda well: [end(well) for end in ended])

    def _get_sequence_number_for_group(self) -> int:
        return self._next_tag - FIRST_TAG

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to set: calls are counted from the start."""

    # ---- tasks ----

    def _task(
        self,
        name: str,
        result: Any,
        arrange: Arrange,
        compose: Compose,
        settle: Settle,
        *,
        again: bool = False,
        prepare: Callable[[int], object] = lambda tag: None,
    ) -> Task:
        """The task of a collective.

        Args:
            name: for messages and profiles.
            result: what its future yields.
            arrange: returns what is sent and received. A group of one copies the first to the
                second.
            compose: makes the operands.
            settle: copies what was received to the caller's tensors.
            again: whether it is launched again if a peer is lost in it.
            prepare: is called with the tag before each launch.
        """
        known = self.members.order
        moved: list[tuple[Order, Tensors]] = []

        def launch(tag: int) -> Handle:
            prepare(tag)
            ring = self.members.ring() if again else self.members.known_ring()
            order = range(len(ring)) if again else [known.index(number) for number in ring]
            sent, received = arrange(order)
            moved[:] = [(order, received)]
            given = _none_one_or_list(sent), _none_one_or_list(received)
            work = compose(*given, order, self.members.ranks(ring))
            return extension.launch(self._comm, name, work, tag)

        def alone() -> None:
            sent, received = arrange([0])
            for source, target in zip(sent, received, strict=True):
                if source is not target:
                    target.view(-1).copy_(source.view(-1))
            moved[:] = [([0], received)]

        return Task(name, launch, result, alone, lambda: settle(*moved[0]), again=again)

    def gather_and_combine(
        self,
        name: str,
        result: Any,
        give: Callable[[], Tensors],
        combine: Callable[[Tensors], object],
        prepare: Callable[[int], object] = lambda tag: None,
    ) -> Task:
        """Gathers the tensors of all members in any order, and combines them on each member."""

        def arrange(order: Order) -> tuple[Tensors, Tensors]:
            sent = give()
            return sent, [each.new_empty((len(order), *each.shape)) for each in sent]

        def settle(order: Order, received: Tensors) -> None:
            combine(received)

        return self._task(name, result, arrange, _all_gather, settle, again=True, prepare=prepare)

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

            return self.gather_and_combine("all_reduce", tensors, lambda: pieces, combine)
        op, pieces = reduction.for_dtypes(tensors), [reduction.given(t) for t in tensors]
        return self._task(
            "all_reduce",
            tensors,
            lambda order: (pieces, pieces),
            lambda sent, received, order, ranks: operands.all_reduce(sent, None, op),
            lambda order, received: _put_all(tensors, received),
            again=True,
        )

    def _sparse_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Task:
        """Gathers sparse tensors (COO) and sums them.

        The members first find the largest number of elements, to which all pad theirs.
        """
        if reduction.op not in (Op.SUM, Op.AVG):
            raise ValueError("sparse tensors can only be summed or averaged")
        mine = tensor.detach().coalesce()
        places, values = mine.indices().t().contiguous(), mine.values().contiguous()
        values, room = reduction.scaled(values, values.dtype), len(values)

        def prepare(tag: int) -> None:
            nonlocal room
            largest = torch.tensor([len(values)])
            handle = self._comm.all_reduce_async(largest, op="max", tag=tag)
            if not handle.wait()[0]:
                assert handle.error is not None
                raise handle.error
            room = int(largest)

        def filled(piece: Tensor) -> Tensor:
            return torch.cat([piece, piece.new_zeros((room - len(piece), *piece.shape[1:]))])

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

        def give() -> Tensors:
            return [torch.tensor([len(values)]), filled(places), filled(values)]

        return self.gather_and_combine("all_reduce", [tensor], give, combine, prepare)

    @_collective
    def broadcast(self, tensors: Any, options: Options) -> Task:
        tensors, root = _list(tensors), options.root
        self._check_root(root)
        pieces = [movable(tensor) for tensor in tensors]
        return self._task(
            "broadcast",
            tensors,
            lambda order: (pieces, pieces),
            lambda sent, received, order, ranks: operands.broadcast(sent, order.index(root), ranks),
            lambda order, received: _put_all(tensors, received),
        )

    @_collective
    def allgather(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        single = isinstance(input_tensors, Tensor)
        return self._all_gather([output_tensors] if single else output_tensors, input_tensors)

    @_collective
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], options: Options
    ) -> Task:
        by_input = [list(group) for group in zip(*output_lists, strict=True)]
        return self._all_gather(by_input, input_list)

    def _all_gather(self, outputs: Sequence[Tensors], inputs: Any) -> Task:
        """`outputs[i][r]` gets the i-th input of rank r; sizes may differ between ranks."""
        for group in outputs:
            self._one_each("output", group)
        pieces = [movable(tensor) for tensor in _list(inputs)]
        sizes = [[moved_size(output) for output in group] for group in outputs]
        rows = sizes[0] if len(set(sizes[0])) > 1 else None  # by rank, if they differ
        if rows is not None and any(each != rows for each in sizes):
            raise ValueError("if sizes differ between ranks, each list must have the same sizes")

        def compose(sent: Any, received: Any, order: Order, ranks: Ranks) -> Operands:
            counts = None if rows is None else [rows[rank] for rank in order]
            return operands.all_gather(sent, received, ranks, counts)

        def settle(order: Order, received: Tensors) -> None:
            for group, whole in zip(outputs, received, strict=True):
                _put_parts([group[rank] for rank in order], whole)

        return self._task(
            "all_gather",
            [list(group) for group in outputs],
            lambda order: (
                pieces,
                [p.new_empty(sum(s)) for p, s in zip(pieces, sizes, strict=True)],
            ),
            compose,
            settle,
        )

    @_collective
    def all_gather_single(self, output: Any, input: Any, options: Options) -> Task:
        """Gathers into one tensor; of several inputs, each into one, by one collective."""
        outputs, inputs = _list(output), _list(input)
        size = self.members.size
        _check_parts("output", outputs, "input", inputs, size)
        pieces, wholes = [movable(each) for each in inputs], [movable(each) for each in outputs]

        def arrange(order: Order) -> tuple[Tensors, Tensors]:
            if list(order) == sorted(order):
                return pieces, wholes
            # an in-place input is at its rank's part of the output, not at its position's
            return [piece.clone() for piece in pieces], wholes

        def settle(order: Order, received: Tensors) -> None:
            for output, whole in zip(outputs, received, strict=True):
                if list(order) != sorted(order):
                    rows = whole.view(size, -1)
                    rows.copy_(rows[[order.index(rank) for rank in range(size)]])
                put(output, whole)

        return self._task("all_gather", list(outputs), arrange, _all_gather, settle)

    @_collective
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        single = isinstance(output_tensors, Tensor)
        inputs = [input_tensors] if single else input_tensors
        return self._reduce_scatter(_list(output_tensors), inputs, options)

    @_collective
    def reduce_scatter_single(self, output: Any, input: Any, options: Options) -> Task:
        """Reduces and scatters one tensor; or several, by one collective."""
        outputs, inputs = _list(output), _list(input)
        size = self.members.size
        _check_parts("input", inputs, "output", outputs, size)
        parts = [list(given.detach().reshape(-1).view(size, -1).unbind()) for given in inputs]
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
        if reduction.bitwise is not None:
            return self._reduce_scatter_bitwise(outputs, inputs, reduction)
        op = reduction.for_dtypes(outputs)
        parts = [[reduction.given(tensor) for tensor in group] for group in inputs]
        room = [max(part.numel() for part in group) for group in parts]
        targets = [reducible(output) for output in outputs]

        def filled(part: Tensor, count: int) -> Tensor:
            missing = count - part.numel()
            return torch.cat([part, part.new_zeros(missing)]) if missing else part

        def arrange(order: Order) -> tuple[Tensors, Tensors]:
            sent = [
                torch.cat([filled(group[rank], count) for rank in order])
                for group, count in zip(parts, room, strict=True)
            ]
            received = [
                target if target.numel() == count else target.new_empty(count)
                for target, count in zip(targets, room, strict=True)
            ]
            return sent, received

        def settle(order: Order, received: Tensors) -> None:
            for output, target, whole in zip(outputs, targets, received, strict=True):
                put(output, whole[: target.numel()])

        return self._task(
            "reduce_scatter",
            list(outputs),
            arrange,
            lambda sent, received, order, ranks: operands.reduce_scatter(
                sent, received, op, None, ranks
            ),
            settle,
        )

    def _reduce_scatter_bitwise(
        self, outputs: Tensors, inputs: Sequence[Tensors], reduction: Reduction
    ) -> Task:
        """An all-to-all, whose result each member combines: pccl has no bitwise operations."""
        if len(outputs) != 1:
            raise ValueError("a bitwise reduce_scatter has one output: make several calls")
        _bits(outputs)
        (output,), (group,) = outputs, inputs
        given = [torch.empty_like(output) for _ in group]

        def combine() -> None:
            put(output, flat(reduction.combine(given)))

        return self._all_to_all("reduce_scatter", given, group, combine, [output])

    @_collective
    def reduce(self, tensors: Any, options: Options) -> Task:
        """Only the root's tensor changes."""
        (tensor,), reduction = _list(tensors), Reduction.of(options.op)
        root, mine = options.root, self._check_root(options.root)
        if reduction.bitwise is not None:
            (piece,) = _bits([tensor])

            def combine(rows: Tensors) -> None:
                put(tensor, reduction.combine(rows))

            return self._gather("reduce", [tensor], piece, root, combine)
        op, piece = reduction.for_dtypes([tensor]), reduction.given(tensor, copied=True)

        def settle(order: Order, received: Tensors) -> None:
            if mine:
                put(tensor, piece)

        return self._task(
            "reduce",
            [tensor],
            lambda order: ([piece], [piece]),
            lambda sent, received, order, ranks: operands.reduce(
                sent, None, order.index(root), op, None, ranks
            ),
            settle,
        )

    @_collective
    def gather(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        (tensor,), outputs = _list(input_tensors), _inner(output_tensors)
        if self._check_root(options.root):
            self._one_each("output", outputs)
        return self._gather(
            "gather",
            [list(outputs)],
            movable(tensor),
            options.root,
            lambda rows: _put_all(outputs, rows),
        )

    def _gather(
        self, name: str, result: Any, piece: Tensor, root: int, take: Callable[[Tensors], None]
    ) -> Task:
        """Gathers one piece of each member on the root; `take` gets them by rank."""
        mine = self._check_root(root)

        def arrange(order: Order) -> tuple[Tensors, Tensors]:
            return [piece], [piece.new_empty((len(order), piece.numel()))] if mine else []

        def settle(order: Order, received: Tensors) -> None:
            if mine:
                take([received[0][order.index(rank)] for rank in range(len(order))])

        return self._task(
            name,
            result,
            arrange,
            lambda sent, received, order, ranks: operands.gather(
                sent, received, order.index(root), ranks
            ),
            settle,
        )

    @_collective
    def scatter(self, output_tensors: Any, input_tensors: Any, options: Options) -> Task:
        (output,), inputs = _list(output_tensors), _inner(input_tensors)
        root, target = options.root, movable(output)
        mine = self._check_root(root)
        if mine:
            self._one_each("input", inputs)
        pieces = [movable(tensor) for tensor in inputs] if mine else []
        return self._task(
            "scatter",
            [output],
            lambda order: ([torch.cat([pieces[rank] for rank in order])] if mine else [], [target]),
            lambda sent, received, order, ranks: operands.scatter(
                sent, received, order.index(root), ranks
            ),
            lambda order, received: put(output, target),
        )

    @_collective
    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], options: Options
    ) -> Task:
        return self._all_to_all("all_to_all", output_tensors, input_tensors)

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
        return self._all_to_all("all_to_all", outputs, inputs)

    def _all_to_all(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        then: Callable[[], object] = lambda: None,
        result: Any = None,
    ) -> Task:
        """Sends one of `inputs` to each member, and receives one of `outputs`, by rank.

        They may differ in size, and be empty.
        """
        self._one_each("output", outputs)
        self._one_each("input", inputs)
        sent, targets = [movable(each) for each in inputs], [movable(each) for each in outputs]

        def arrange(order: Order) -> tuple[Tensors, Tensors]:
            whole = torch.cat([sent[rank] for rank in order])
            return [whole], [whole.new_empty(sum(target.numel() for target in targets))]

        def compose(given: Any, received: Any, order: Order, ranks: Ranks) -> Operands:
            gives = [sent[rank].numel() for rank in order]
            takes = [targets[rank].numel() for rank in order]
            return operands.all_to_all(given, received, gives, takes, ranks)

        def settle(order: Order, received: Tensors) -> None:
            _put_parts([outputs[rank] for rank in order], received[0])
            then()

        return self._task(name, result or list(outputs), arrange, compose, settle)

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
        """Waits for all members, up to `timeout`.

        Raises:
            RuntimeError: on rank 0, others have not come: names the first one, or with
                `wait_all_ranks` all of them. On others, rank 0 has not answered.
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

    # several calls as one

    @eager
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    @eager
    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)


def _span(name: str, inputs: Tensors) -> Callable[[bool], None]:
    """Begins a span of the profiler. Returns a function that ends it.

    It ends in another thread: so torch takes it for asynchronous, and not for work of the caller.
    """
    span = _record_function_with_args_enter(name, *inputs)
    return lambda well: in_pool(lambda: _record_function_with_args_exit(span)).result()


def _all_gather(sent: Any, received: Any, order: Order, ranks: Ranks) -> Operands:
    return operands.all_gather(sent, received, ranks)


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
    """Unwraps a single tensor: small ones then travel with the votes."""
    return None if not pieces else pieces[0] if len(pieces) == 1 else list(pieces)


def _put_all(tensors: Tensors, pieces: Tensors) -> None:
    for tensor, piece in zip(tensors, pieces, strict=True):
        put(tensor, piece)


def _put_parts(tensors: Tensors, whole: Tensor) -> None:
    _put_all(tensors, torch.split(whole, [moved_size(tensor) for tensor in tensors]))


def _bits(tensors: Tensors) -> list[Tensor]:
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        raise ValueError("bitwise operations are for integers and bools")
    return [movable(tensor) for tensor in tensors]


def _check_parts(what: str, wholes: Tensors, part: str, parts: Tensors, size: int) -> None:
    for whole, each in zip(wholes, parts, strict=True):
        if whole.numel() != size * each.numel():
            raise ValueError(
                f"the {what} has {whole.numel()} elements, the {part} {each.numel()}: it must be "
                f"{size} times as many, one part for each member"
            )
        if whole.dtype != each.dtype:
            raise ValueError(f"the {what} is {whole.dtype}, the {part} {each.dtype}")


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
