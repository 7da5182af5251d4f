"""Parts of the client and the server alone: no threads, no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pccl.protocol.peer.effects import Answer, Fail, Fetched, Measure
from pccl.runtime import limits
from pccl.runtime.client.call import Call, Deadline
from pccl.runtime.client.control import PendingCalls
from pccl.runtime.client.memory import Pool
from pccl.runtime.server.server import Pauses
from pccl.types import Result


def made(pending: PendingCalls, *numbers: int) -> Sequence[Call]:
    calls = [Call(number) for number in numbers]
    for call in calls:
        pending.add(call)
        pending.memory[call.number] = Pool([], 0, None)
    return calls


def test_a_call_hears_of_its_end_when_all_else_is_done() -> None:
    pending = PendingCalls()
    first, second = made(pending, 1, 2)
    pending.note(Fetched(1, 1, True, ""))
    assert first.has_notes and not second.has_notes
    pending.answer(Answer(2, "done"))
    assert 1 in pending and 2 not in pending
    assert second.end is None, "not told yet"
    assert list(pending.memory) == [1]
    pending.notify()
    assert second.end == Answer(2, "done")
    pending.answer(Answer(2, "again"))
    pending.notify()
    assert second.end == Answer(2, "done"), "nobody waits any more"


def test_no_call_is_left_without_an_answer() -> None:
    pending = PendingCalls()
    first, second = made(pending, 1, 2)
    pending.closed = True
    pending.fail_all(Fail(0, Result.RANK_CONNECTION_LOST, "told to go"))
    assert first.end == Fail(1, Result.RANK_CONNECTION_LOST, "told to go")
    assert second.end == Fail(2, Result.RANK_CONNECTION_LOST, "told to go")
    assert not pending.memory
    (late,) = made(pending, 3)
    pending.fail_all(None)
    assert isinstance(late.end, Fail) and late.end.call == 3


def test_an_interrupt_of_a_long_wait_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as "during handling of the above exception, another exception occurred"."""

    class Interrupted:
        def inquire(self, call: Call) -> None:
            raise KeyboardInterrupt

        withdraw = None

    monkeypatch.setattr(limits, "QUIET_S", 0.0)
    with pytest.raises(KeyboardInterrupt) as caught:
        Deadline(None).next(Interrupted(), Call(1))  # type: ignore[arg-type]
    assert caught.value.__context__ is None


def test_a_time_limit_holds_while_notes_come_without_a_pause() -> None:
    late = []

    class Client:
        def time_out(self, call: Call, why: str) -> None:
            late.append(call.number)

        inquire = None

    call, again = Call(1), Call(2)
    deadline = Deadline(0.0)
    for _ in range(3):
        call.put(Measure(1, 5, (2,)))
        assert deadline.next(Client(), call) == Measure(1, 5, (2,))  # type: ignore[arg-type]
    call.put(Answer(1, None))
    assert deadline.next(Client(), call) == Answer(1, None)  # type: ignore[arg-type]
    again.put(Answer(2, None))
    assert deadline.next(Client(), again) == Answer(2, None)  # type: ignore[arg-type]
    assert late == [1]


def test_a_pause_counts_against_no_peer() -> None:
    now = 100.0
    pauses = Pauses(4.0, lambda: now, lambda: now)
    now += 1.0
    pauses.check(1.0)
    assert (pauses.total_s, pauses.woke_lately) == (0.0, False)
    now += 10.0
    pauses.check(1.0)
    assert (pauses.total_s, pauses.woke_lately) == (9.0, True)
    pauses.dealt_with()
    assert not pauses.woke_lately
    now += 10.0
    pauses.check(0.0)
    now += 8.0
    assert not pauses.woke_lately, "whatever breaks so much later does so for another reason"
