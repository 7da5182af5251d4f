"""`pccl doctor --explain`: what a master's numbers say of its run."""

from __future__ import annotations

import msgspec
from simulation.manual import ManualRun

from pccl.cli.doctor import explanation
from pccl.protocol import messages as m
from pccl.protocol.master import Status

WORK = m.Spec("all_reduce", 0, 10, 1_000_000)


def a_run(entering_s: float, running_s: float, times: int = 4) -> ManualRun:
    run = ManualRun(3)
    now_s = 0.0
    for _ in range(times):
        now_s += 1.0
        run.master.now_s = now_s
        run.say(b"1", m.StartVote(2, 0, WORK))
        run.say(b"2", m.StartVote(2, 0, WORK))
        run.master.now_s = now_s = now_s + entering_s
        run.say(b"3", m.StartVote(2, 0, WORK))
        run.master.now_s = now_s = now_s + running_s
        run.everyone(m.FinishVote(run.master.run.numbers.next_seq - 1, True))
    return run


def measured(run: ManualRun, rates: dict[tuple[int, int], int]) -> Status:
    run.master.run.groups[0].rates = rates
    return run.master.status()


def test_a_run_that_has_done_nothing() -> None:
    assert list(explanation(ManualRun(2).master.status())) == ["no collective has committed yet"]


def test_where_the_time_goes() -> None:
    lines = list(explanation(a_run(0.75, 0.25).master.status()))
    assert lines[0] == (
        "4 collectives have committed, of 4 MB on average: "
        "1 s from the first peer's call to the last one's end"
    )
    late = "waiting for peers that enter later. If all entered at once: 250 ms"
    assert lines[1] == f" 75 %, 750 ms: {late}"
    assert lines[2].startswith(" 25 %, 250 ms: from then until all have finished")
    assert "no link is measured: call optimize_topology()" in lines[3]
    (late,) = lines[4:]
    assert late.startswith("the latest is peer 3: others recently waited ")
    assert late.endswith(" for it in each call, and 3 s in all")


def test_the_slowest_link_and_the_gain_without_it() -> None:
    rate = round(4e6 * 4 / 3 / 0.25)  # that each link has carried
    rates = {(1, 2): 2 * rate, (2, 3): rate, (3, 1): 4 * rate}
    line, fits = list(explanation(measured(a_run(0.0, 0.25), rates)))[3:]
    assert line.startswith(
        "group 0: the slowest link, from peer 2 to peer 3, carries 170.7 Mbit/s; "
    )
    assert line.endswith("the next slowest would, with 341.3 Mbit/s: 125 ms in place of 250 ms")
    fast = {hop: 10 * rate for hop in rates}
    assert fits == (
        "which settings fit these links: pccl plan --params NUMBER --peers 3 --uplink 170.7M"
    )
    line, _ = list(explanation(measured(a_run(0.0, 0.25), fast)))[3:]
    assert "links are not what limits it, but votes, round trips or processors" in line


def test_the_cost_of_failures() -> None:
    run = a_run(0.0, 0.25)
    run.everyone(m.FinishVote(run.start(), False, "a lane was cut"))
    run.master.now_s += 5.0
    *_, aborted, lost = explanation(run.master.status())
    assert aborted == "1 collectives were aborted: 1 by link"
    assert lost == "group 0: 56 % of the time was lost to aborts, recoveries and late peers"
    assert msgspec.json.encode(run.master.status())
