"""`pccl plan`: its times are near those measured, its advice fits, or it says that nothing does."""

from __future__ import annotations

import argparse

import pytest

import pccl
from pccl.cli import main as cli
from pccl.cli.plan import Cluster, advise, quantity

MIB = 1 << 20


@pytest.mark.parametrize(
    ("mib", "mbit", "rtt_ms", "measured_s"),
    [  # docs/internals/performance.md: two peers, fp32
        (64, 1000, 1, 0.57),
        (64, 1000, 50, 0.68),
        (64, 1000, 100, 0.80),
        (64, 500, 100, 1.35),
        (256, 1000, 50, 2.38),
        (256, 1000, 100, 2.68),
    ],
)
def test_estimates_are_close_to_measurements(
    mib: int, mbit: int, rtt_ms: int, measured_s: float
) -> None:
    cluster = Cluster(mib * MIB / 4, 2, mbit * 1e6, rtt_ms / 1e3)
    assert cluster.all_reduce().seconds == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize("peers", [2, 3, 8, 14, 15, 16, 40, 300])
def test_no_wire_costs_more_than_fp32(peers: int) -> None:
    cluster = Cluster(1e9, peers, 1e9)
    sent = {w: cluster.diloco(w).sent for w in ("fp32", "int8", "int4", "2bit", "sparse")}
    assert max(sent.values()) == sent["fp32"]
    assert sent["int4"] <= sent["int8"] and sent["sparse"] <= sent["2bit"]
    if peers == 2:
        assert sent["fp32"] == 4e9 and sent["int4"] == pytest.approx(0.5625e9)


@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "2bit", "sparse"])
@pytest.mark.parametrize("peers", [2, 3, 4, 8, 13, 14, 26, 27, 31, 40, 300])
def test_bytes_equal_the_formula_of_the_documentation(wire: str, peers: int) -> None:
    """docs/howto/diloco.md: what each peer sends for a parameter."""
    size = Cluster(1, 2, 1e9).diloco(wire).sent
    ring, gather = 8 * (peers - 1) / peers, (peers - 1) * size
    fits = wire in ("int8", "int4") and 3 <= peers <= 128
    two_stage = 2 * gather / peers if fits else gather
    expected = ring if wire == "fp32" else min(ring, two_stage)
    assert Cluster(1, peers, 1e9).diloco(wire).sent == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cluster", "call"),
    [
        (Cluster(1e6, 2, 1e9, step_s=5), "comm.all_reduce(gradients)"),
        (Cluster(1e8, 4, 25e9, step_s=5), "comm.all_reduce(gradients)"),
        (Cluster(1e9, 4, 60e9, step_s=5), 'comm.all_reduce(gradients, quantization="int8")'),
        (
            Cluster(1e8, 4, 1e9),
            'DiLoCo(comm, model, optimizer, inner_steps=30, mode="sync", wire="int4")',
        ),
    ],
)
def test_advice(cluster: Cluster, call: str) -> None:
    advice = advise(cluster)
    assert advice is not None and advice.call == call


@pytest.mark.parametrize("params", [1e5, 1e7, 1e9, 7e9, 7e10])
@pytest.mark.parametrize("uplink", [1e7, 2e8, 1e9, 1e11])
@pytest.mark.parametrize("peers", [2, 8, 40])
def test_the_advice_fits_the_budget(params: float, uplink: float, peers: int) -> None:
    cluster = Cluster(params, peers, uplink)
    advice = advise(cluster)
    if advice is None:
        assert cluster.diloco("sparse").seconds > 500
        return
    taken = advice.exchange.seconds / advice.round_s(cluster)
    assert taken <= (0.8 if advice.mode == "decoupled" else 0.5)
    if advice.inner_steps:
        assert 30 <= advice.inner_steps <= 500


def test_it_prints_a_table_and_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("plan --params 7B --peers 8 --uplink 200M --step 10".split()) == 0
    out = capsys.readouterr().out
    assert "DiLoCo, sparse" in out and "a newcomer receives 56 GB" in out
    assert "a round trip of 50 ms, 10 s per inner step\n" in out
    assert "assumed, not given: the round trip (--rtt)\n" in out
    assert "recommended: DiLoCo(comm, model, optimizer" in out
    assert cli.main("plan --params 70e9 --peers 16 --uplink 100M".split()) == 1
    assert "does not fit" in capsys.readouterr().out


def test_links_come_from_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pccl.MasterNode("127.0.0.1:0", http="127.0.0.1:0") as master:
        where = f"plan --params 7B --links {master.http_address}"
        assert cli.main(where.split()) == 2
        assert "no link of that run is measured" in capsys.readouterr().err
        assert cli.main(f"{where} --peers 8 --uplink 200M".split()) == 0


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e999", "1.2.3", "5X", "nan"])
def test_invalid_quantities(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a positive number"):
        quantity(text)


def test_quantities() -> None:
    asked = ["7e9", "7B", "200M", "1.5G", "200Mbit/s", "3"]
    assert [quantity(text) for text in asked] == [7e9, 7e9, 2e8, 1.5e9, 2e8, 3]
