"""send and recv of torch.distributed: what fails leaves the next message of the same pair right."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from types import FrameType

import pytest
import torch
from torch import Tensor
from training.groups import Groups

import pccl
from pccl.torch import ProcessGroup

SOON = timedelta(seconds=0.2)


def received(group: ProcessGroup, source: int, tag: int = 0, size: int = 1) -> list[float]:
    found = torch.empty(size)
    group.recv([found], source, tag).wait()
    return found.tolist()


@pytest.mark.parametrize("size", [1, 100_000])
def test_two_receives_from_any_source_match_two_senders(three: Groups, size: int) -> None:
    def job(group: ProcessGroup) -> dict[int, float]:
        if group.rank():
            group.send([torch.full((size,), float(group.rank()))], 0, 5).wait()
            return {}
        numbers = [torch.empty(size) for _ in range(2)]
        works = [group.recv_anysource([number], 5) for number in numbers]
        for work in works:
            work.wait()
        return {w.source_rank(): n[-1].item() for w, n in zip(works, numbers, strict=True)}

    assert three.each(job)[0] == {1: 1.0, 2: 2.0}


def test_receives_from_anyone_and_from_one_keep_the_order_of_its_messages(three: Groups) -> None:
    """All of rank 1; rank 2 never sends."""

    def job(group: ProcessGroup) -> list[float]:
        if group.rank() == 1:
            for i in range(5):
                group.send([torch.tensor([float(i)])], 0, 5).wait()
        if group.rank():
            return []
        numbers = [torch.empty(1) for _ in range(4)]
        works = [
            group.recv([numbers[0]], 1, 5),
            group.recv_anysource([numbers[1]], 5),
            group.recv([numbers[2]], 1, 5),
            group.recv_anysource([numbers[3]], 5),
        ]
        for work in reversed(works):
            work.wait()
        return [number.item() for number in numbers] + received(group, 1, 5)

    assert three.each(job)[0] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("failing", [0, 1], ids=["the receive", "the send"])
def test_after_a_time_out_the_next_message_arrives(two: Groups, failing: int) -> None:
    alone = threading.Barrier(2)

    def job(group: ProcessGroup) -> list[float]:
        rank = group.rank()
        for _ in range(2):
            if rank == failing:
                mine = torch.full((1,), -1.0)
                work = group.send([mine], 0) if rank else group.recv([mine], 1)
                with pytest.raises(pccl.PCCLTimeoutError):
                    work.wait(SOON)
                assert mine.item() == -1.0
            alone.wait()
        if rank:
            for i in range(3):
                group.send([torch.tensor([float(i)])], 0).wait()
            return []
        return [received(group, 1)[0] for _ in range(3)]

    assert two.each(job)[0] == [0.0, 1.0, 2.0]


def test_a_receive_from_anyone_that_timed_out_loses_no_message(three: Groups) -> None:
    alone = threading.Barrier(3)

    def job(group: ProcessGroup) -> list[float]:
        if group.rank() == 0:
            with pytest.raises(pccl.PCCLTimeoutError, match="no message has come within"):
                group.recv_anysource([torch.empty(1)], 3).wait(SOON)
        alone.wait()
        if group.rank():
            for i in range(2):
                group.send([torch.tensor([10.0 * group.rank() + i])], 0, 3).wait()
            return []
        found = []
        for source in (None, 1, 2, None):
            number = torch.empty(1)
            group.recv_anysource([number], 3).wait() if source is None else group.recv(
                [number], source, 3
            ).wait()
            found.append(number.item())
        return found

    found = three.each(job)[0]
    assert sorted(found) == [10.0, 11.0, 20.0, 21.0]
    assert [x for x in found if x < 20] == [10.0, 11.0]
    assert [x for x in found if x >= 20] == [20.0, 21.0]


def test_a_receive_from_anyone_survives_a_loss(three: Groups) -> None:
    """It fails only when no possible sender is left."""
    ready, gone = threading.Barrier(2), threading.Event()

    def job(group: ProcessGroup) -> list[float]:
        if group.rank() == 2:
            ready.wait()
            group.abort()
            gone.set()
            return []
        if group.rank() == 1:
            gone.wait()
            for value in (1.0, 2.0):
                while True:
                    try:
                        group.send([torch.tensor([value])], 0, 3).wait()
                        break
                    except pccl.PeerLostError:
                        pass
            return []
        number = torch.empty(1)
        work = group.recv_anysource([number], 3)
        ready.wait()
        while True:
            try:
                work.wait()
                break
            except pccl.PeerLostError:
                work = group.recv_anysource([number], 3)
        second = torch.empty(1)
        while True:
            try:
                group.recv_anysource([second], 3).wait()
                break
            except pccl.PeerLostError:
                pass
        return [number.item(), second.item()]

    assert three.each(job)[0] == [1.0, 2.0]


@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(1, dtype=torch.int32)], ids=str)
def test_a_message_that_does_not_fit_fails_on_both_and_the_next_one_arrives(
    sent: Tensor, two: Groups
) -> None:
    def job(group: ProcessGroup) -> list[float]:
        if group.rank():
            with pytest.raises(pccl.MismatchError):
                group.send([sent], 0).wait()
            group.send([torch.tensor([7.0])], 0).wait()
            return []
        with pytest.raises(pccl.MismatchError):
            group.recv([torch.empty(2)], 1).wait()
        return received(group, 1)

    assert two.each(job)[0] == [7.0]


def test_a_message_may_be_smaller_than_the_tensor_that_receives_it(two: Groups) -> None:
    """The others of its elements keep their values, as with gloo."""

    def job(group: ProcessGroup) -> None:
        other = 1 - group.rank()
        works = [group.send([torch.ones(size)], other, size) for size in (2, 3, 0)]
        flat, turned, kept, first = (torch.zeros(2, 2) for _ in range(4))
        group.recv([flat], other, 2).wait()
        group.recv([turned.t()], other, 3).wait()
        group.recv([kept], other, 0).wait()
        assert flat.tolist() == [[1, 1], [0, 0]]
        assert turned.t().tolist() == [[1, 1], [1, 0]]
        assert kept.tolist() == [[0, 0], [0, 0]]
        works += [group.send([torch.ones(size)], other, 9) for size in (1, 4)]
        group.recv_anysource([first], 9).wait()
        group.recv([kept], other, 9).wait()
        assert first.tolist() == [[1, 0], [0, 0]] and kept.tolist() == [[1, 1], [1, 1]]
        for work in works:
            work.wait()

    two.each(job)


def test_an_interrupted_wait_completes_the_future(two: Groups) -> None:
    work = two.all[0].recv([torch.empty(1)], 1)
    future = work.get_future()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not pccl.AsyncReduceHandle.wait.__code__:
            frame = frame.f_back
        if frame is not None:  # the wait has begun
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with pytest.raises(KeyboardInterrupt):
            work.wait(timedelta(seconds=20))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        future.wait()


def test_coalesced_calls_speak_for_all(two: Groups) -> None:
    cpu = torch.device("cpu")

    def job(group: ProcessGroup) -> None:
        group._start_coalescing(cpu)
        nothing = group._end_coalescing(cpu)
        assert nothing.wait() and nothing.is_completed() and nothing.is_success()
        assert nothing.result() == [] and nothing.get_future().wait() == []

        other = 1 - group.rank()
        given, found = [torch.full((2,), float(group.rank()))], [torch.empty(2)]
        group._start_coalescing(cpu)
        group.send(given, other)
        group.recv(found, other)
        both = group._end_coalescing(cpu)
        both.get_future().wait()
        assert both.wait() and both.is_completed() and len(both.result()) == 2
        assert found[0].tolist() == [float(other)] * 2

        group._start_coalescing(cpu)
        tensors: list[Tensor] = [torch.empty(1), torch.empty(1)]
        for tag, tensor in enumerate(tensors):
            group.recv([tensor], other, 10 + tag)  # one comes, the other does not
        group.send([torch.ones(1)], other, 11)
        three = group._end_coalescing(cpu)
        with pytest.raises(pccl.PCCLTimeoutError):
            three.wait(timedelta(seconds=0.5))
        assert three.is_completed() and not three.is_success()
        assert isinstance(three.exception(), pccl.PCCLTimeoutError)
        with pytest.raises(RuntimeError, match="waited for peer"):
            three.get_future().wait()
        assert tensors[1].item() == 1.0

    two.each(job)
