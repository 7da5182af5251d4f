"""`pccl bench`: its data is predictable, its table is that of nccl-tests, and failures show."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.waiting import PATIENCE_S, entered

import pccl
from pccl.cli import arguments
from pccl.cli.bench import collectives, idle, state, trials
from pccl.cli.bench.trials import IN_PLACE, OUT_OF_PLACE, Job, Measured, Trial, measure
from pccl.cli.main import main
from pccl.cli.processes import WorkerError, collect
from pccl.types import DataType, ReduceOp

SIZES = [4096, 16384, 65536]


def bench(
    *words: object, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would, in a directory that is not the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "pccl.cli.main", "bench", *map(str, words)],
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_all_reduce_prints_the_table_of_nccl_tests(tmp_path: Path, transport: str) -> None:
    file = tmp_path / "results.json"
    ended = bench(
        *("all_reduce", "-b", "4K", "-e", "64K", "-f", 4, "-n", 2, "-w", 1, "--json", file),
        cwd=tmp_path,
        env={"PCCL_TRANSPORT": transport},
    )
    assert ended.returncode == 0, ended.stderr
    assert "# Out of bounds values : 0 OK" in ended.stdout
    assert f"transport {transport}" in ended.stdout
    table_rows = rows(ended.stdout)
    assert [int(row[0]) for row in table_rows] == SIZES
    for row in table_rows:
        assert row[1:5] == [str(int(row[0]) // 4), "float", "sum", "-1"]
        assert float(row[5]) > 0 < float(row[9])
        assert row[8] == row[12] == "0"
        assert len(row) == 17
        assert int(row[15]) >= int(row[0])  # each of two peers sends half of it twice
        assert row[16] == "N/A" or float(row[16]) > 0
    results = json.loads(file.read_text())
    assert results["out_of_bounds"] == {"count": 0, "okay": True}
    assert [row["size"] for row in results["results"]] == SIZES
    for row in results["results"]:
        for way in ("out_of_place", "in_place"):
            assert row[way]["time_min"] <= row[way]["time"]
            assert row[way]["alg_bw"] == row[way]["bus_bw"]  # 2 (n-1) / n is 1 for two peers
            assert row[way]["nwrong"] == 0
            assert row[way]["wire"] == row["size"]


@pytest.mark.parametrize(
    ("what", "redop"),
    [pytest.param("all_gather", "none", marks=pytest.mark.slow), ("reduce_scatter", "max")],
)
def test_gather_and_scatter_count_as_nccl_tests_do(tmp_path: Path, what: str, redop: str) -> None:
    file = tmp_path / "results.json"
    words = ["-o", "max"] if redop == "max" else []
    sizes = ("-b", "96K", "-e", "96K", "-n", 1, "-w", 0, "--peers", 3, "--json", file)
    ended = bench(what, *words, *sizes, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(ended.stdout)
    assert row[:5] == [str(96 << 10), str(8 << 10), "float", redop, "-1"]
    assert row[8] == row[12] == "0"
    (result,) = json.loads(file.read_text())["results"]
    for way in ("out_of_place", "in_place"):
        assert result[way]["bus_bw"] == pytest.approx(result[way]["alg_bw"] * 2 / 3)


def test_broadcast_is_in_place_only(tmp_path: Path) -> None:
    ended = bench("broadcast", "-b", "64K", "-e", "64K", "-n", 1, "-w", 0, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(ended.stdout)
    assert row[:9] == ["65536", "16384", "float", "none", "0", "N/A", "N/A", "N/A", "N/A"]
    assert row[10] == row[11]
    assert row[12:14] == ["0", "N/A"]


@pytest.mark.slow
def test_all_to_all_is_never_in_place(tmp_path: Path) -> None:
    words = "all_to_all", "--peers", 3, "-b", "96K", "-e", "96K", "-n", 1, "-w", 0
    ended = bench(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(ended.stdout)
    assert row[:5] == [str(96 << 10), str(8 << 10), "float", "none", "-1"]
    assert row[8:10] == ["0", "N/A"]
    assert row[-2] == str(64 << 10)  # a row for each of the two others


class Alone:
    rank, world_size = 1, 3

    def nothing(self, *arrays: object, **settings: object) -> None:
        pass

    all_reduce = all_gather = reduce_scatter = broadcast = all_to_all = nothing
    all_reduce_async = all_gather_async = reduce_scatter_async = broadcast_async = nothing
    all_to_all_async = nothing


def test_wrong_results_are_counted() -> None:
    """The check of each collective finds results that contain no other peer's contribution."""

    for what in collectives.FACTORS:
        job = Job(what, 3, (5000,), DataType.FLOAT, ReduceOp.SUM, 1, 0, check=True)
        trial = Trial(Alone(), job, 5000)  # type: ignore[arg-type]
        for way in trial.ways().values():
            assert trial.check(way) > 4000


@pytest.mark.slow
def test_gloo_takes_turns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = bench(
        *("all_reduce", "-b", "4K", "-e", "4K", "-n", 2, "-w", 0, "--peers", 3),
        *("-d", "bfloat16", "-o", "max", "--against", "gloo"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(ended.stdout)
    assert row[:4] == ["4096", "2048", "bfloat16", "max"]
    assert row[8] == row[12] == "0"
    assert len(row) == 21
    assert float(row[15]) / float(row[5]) == pytest.approx(float(row[17]), abs=0.006)


@pytest.mark.parametrize("what", collectives.FACTORS)
def test_tensors_of_a_device_are_measured_as_arrays_are(what: str) -> None:
    """Torch's CPU stands in for a GPU: tensors are filled, measured, verified, as on one."""
    pytest.importorskip("torch")
    dtype = DataType.BFLOAT16 if what == "all_reduce" else DataType.FLOAT
    job = Job(what, 2, (10_000,), dtype, ReduceOp.SUM, 1, 0, check=True)

    def one(index: int, comm: pccl.Communicator) -> Measured:
        return measure(comm, job, 10_000, "cpu")

    with Cluster(2) as cluster:
        for measured in cluster.each(one):
            assert set(measured.wrong.values()) == {0}
            assert measured.wrong.keys() == measured.times_s.keys() == measured.sent.keys()


def test_wrong_results_on_a_device_are_counted() -> None:
    pytest.importorskip("torch")
    for what in collectives.FACTORS:
        job = Job(what, 3, (5000,), DataType.FLOAT, ReduceOp.SUM, 1, 0, check=True)
        trial = Trial(Alone(), job, 5000, "cpu")  # type: ignore[arg-type]
        for way in trial.ways().values():
            assert trial.check(way) > 4000


def test_the_error_without_a_gpu_names_the_missing_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")

    def told(*words: str) -> str:
        assert main(["bench", *words]) == 2
        return capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert "--device cuda needs torch built with CUDA" in told("broadcast", "--device", "cuda")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        ways_to_ask = ([], ["--against", "gloo"], ["--against", "nccl"], ["-d", "bfloat16"])
        for words in ways_to_ask:
            assert "CUDA 13.0, but finds none" in told("all_reduce", "--device", "cuda", *words)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "--device cuda needs torch, built with CUDA: pip" in trials.missing("cuda")
    monkeypatch.setattr(trials, "missing", lambda device: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    nccl = "--device", "cuda", "--against", "nccl"
    assert "is built without nccl" in told("all_reduce", *nccl)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert "there are 1, for --peers 2" in told("all_reduce", *nccl)
    assert "nccl has no uint32" in told("all_reduce", *nccl, "-d", "uint32")
    gloo = "--device", "cuda", "--against", "gloo"
    assert "gloo has no all_gather of GPU memory" in told("all_gather", *gloo)


def test_processes_share_gpus_if_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = [trials.of_process("cuda", number) for number in range(3)]
    assert found == chosen == ["cuda:0", "cuda:1", "cuda:0"]
    assert trials.of_process("cpu", 3) == ""


@pytest.mark.skipif(not pccl.cuda.is_available(), reason="torch finds no CUDA device here")
def test_tensors_on_cuda_are_measured(tmp_path: Path) -> None:
    import torch

    other = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    words = "all_reduce", "-b", "4M", "-e", "16M", "-f", 4, "-n", 2, "--device", "cuda"
    ended = bench(*words, "--against", other, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert torch.cuda.get_device_name() in ended.stdout
    assert [(row[8], row[12]) for row in rows(ended.stdout)] == [("0", "0")] * 2


@pytest.mark.slow  # it waits until the run is idle
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_an_idle_run_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "idle", "--seconds", "3"]) == 0
    (master, *_), (peer, *_, traffic) = rows(capsys.readouterr().out)
    assert (master, peer) == ("master", "peer")
    assert int(traffic) > 0, "heartbeats"


def test_an_idle_peer_stays_until_the_others_have_measured(
    master: pccl.MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "SETTLE_S", 0.0)
    peers = [idle._idle(number, master.address, 2, 0) for number in range(2)]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(next, peers)] == [os.getpid()] * 2
        early = pool.submit(list, peers[0])
        entered(master)
        assert not early.done()
        assert len([*peers[1]]) == len(early.result()) == 1


def test_kernels_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "0"]
    assert main(["bench", "kernels", *few, "-o", "all"]) == 0
    printed = capsys.readouterr().out
    ops, types = (op.name.lower() for op in pccl.ReduceOp), [t.common_name for t in pccl.DataType]
    names = [*itertools.product(ops, types)]
    for codec in ("int8", "int4", "uint8"):
        names += [(what, codec) for what in ("quantize", "dequantize", "step")]
    assert [(row[1], row[2], row[-1]) for row in rows(printed)] == [(*name, "0") for name in names]


def test_peers_of_several_machines_print_one_table(tmp_path: Path) -> None:
    words = ("-b", "64K", "-e", "256K", "-f", 4, "-n", 2, "-w", 0, "--lanes", 2, "--json", "out")
    with pccl.MasterNode("127.0.0.1:0") as master, ThreadPoolExecutor() as pool:
        dirs = [tmp_path / "a", tmp_path / "b"]
        started = []
        for cwd in dirs:
            cwd.mkdir()
            command = ("all_gather", *words, "--master", master.address)
            started.append(pool.submit(bench, *command, cwd=cwd))
        ended = [future.result() for future in started]
    for one in ended:
        assert one.returncode == 0, one.stderr
        assert f"by the master {master.address}" in one.stdout and "lanes 2" in one.stdout
    assert ended[0].stdout == ended[1].stdout
    assert (dirs[0] / "out").read_text() == (dirs[1] / "out").read_text()
    for row, size in zip(rows(ended[0].stdout), [64 << 10, 256 << 10], strict=True):
        assert row[0] == str(size)
        assert row[8] == row[12] == "0"
        assert row[15] == str(size // 2)


def in_turns(directory: Path, nbytes: str, *words: str) -> list[str]:
    """The row of an all-reduce of that size that is measured in turns with another one."""
    size = "-b", nbytes, "-e", nbytes, "-n", 1, "-w", 0
    ended = bench("all_reduce", *size, *words, cwd=directory)
    assert ended.returncode == 0, ended.stderr
    assert "0 OK" in ended.stdout
    (row,) = rows(ended.stdout)
    assert float(row[15]) / float(row[5]) == pytest.approx(float(row[17]), abs=0.006)
    return row


def test_quantized_takes_turns_with_unquantized(tmp_path: Path) -> None:
    row = in_turns(tmp_path, "64K", "--quantize", "int8", "--against", "unquantized")
    assert int(row[19]) < int(row[0]) / 3


def test_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digest", "-b", "40M", "-e", "40M", "-n", "1", "-w", "0"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[0] == str(40 << 20)
    assert float(row[-1]) > 0 < float(row[-2])


@pytest.mark.parametrize(
    "quantization",
    ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "uint8"))],
)
def test_quantized_elements_are_near(tmp_path: Path, quantization: str) -> None:
    ended = bench(
        *("all_reduce", "-b", "64K", "-e", "64K", "-n", 1, "-w", 0, "--peers", 3),
        *("-d", "half", "-o", "avg", "--quantize", quantization),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"quantized to {quantization}" in ended.stdout
    (row,) = rows(ended.stdout)
    assert row[8] == row[12] == "0"


@pytest.mark.parametrize("many", ["pieces", "tensors"])
def test_one_call_takes_turns_with_many_at_once(tmp_path: Path, many: str) -> None:
    in_turns(tmp_path, "1000400", "--against", many)


def test_far_elements_are_counted() -> None:
    table = np.arange(trials.PERIOD, dtype=np.float32)
    bits = trials.tiled(table, 3 * trials.PERIOD + 7)
    bits[[0, trials.PERIOD + 5, -1]] += (0.4, 0.6, -0.6)
    bits[100] = np.nan
    assert trials.count_far(bits, table, DataType.FLOAT, 0.5) == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--against", "gloo", "-d", "uint32"], "gloo has no uint32"),
        (["--against", "gloo", "-o", "avg"], "gloo has no avg"),
        (["--against", "gloo", "--master", "x"], "leave out --master"),
        (["--against", "nccl"], "nccl moves GPU memory only: add --device cuda"),
        (["--against", "unquantized"], "needs --quantize"),
        (["--against", "pieces", "-b", "16"], "16 elements or more"),
        (["--against", "tensors", "-b", "64K"], "37598 elements or more"),
        (["--quantize", "int8", "-o", "max"], "sums and means"),
        (["--quantize", "int4", "-d", "int32"], "sums and means"),
        (["-b", "8K", "-e", "4K"], "-b no more than -e"),
        (["-b", "4X"], "is not a size"),
        (["--peers", "1"], "at least 2"),
    ],
)
def test_impossible_measurements_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "gloo" in words:
        pytest.importorskip("torch")
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["bench", "all_reduce", *words]))
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", [DataType.INT8, DataType.FLOAT, DataType.DOUBLE])
@pytest.mark.parametrize("peers", [2, 3, 16])
def test_the_expected_result_equals_a_sequential_reduction(
    dtype: DataType, op: ReduceOp, peers: int
) -> None:
    step = {ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}
    result = trials.contribution(dtype, op, 0)
    for number in range(1, peers):
        result = step.get(op, np.add)(result, trials.contribution(dtype, op, number))
    if op is ReduceOp.AVG:
        result = (result / np.asarray(peers, result.dtype)).astype(result.dtype)
    np.testing.assert_array_equal(result, trials.expected(dtype, op, peers))


@pytest.mark.parametrize("op", ReduceOp)
def test_expected_bfloat16_agrees_with_torch(op: ReduceOp) -> None:
    torch = pytest.importorskip("torch")
    peers = 3
    exact = torch.from_numpy(trials.expected(DataType.FLOAT, op, peers))
    ours = trials.as_array(trials.expected(DataType.BFLOAT16, op, peers), DataType.BFLOAT16)
    assert torch.equal(ours, exact.to(torch.bfloat16))


def test_every_wrong_element_counts() -> None:
    expected = trials.expected(DataType.FLOAT, ReduceOp.SUM, 2)
    result = trials.tiled(expected, 3 * trials.PERIOD + 10).copy()
    assert trials.count_wrong(result, expected) == 0
    result[[0, 5 * 1000, result.size - 1]] += 1
    assert trials.count_wrong(result, expected) == 3
    shifted = trials.tiled(expected, 3 * trials.PERIOD)
    assert trials.count_wrong(np.roll(shifted, 64), expected) > shifted.size / 2


def test_wrong_elements_of_any_peer_fail_the_table() -> None:
    times = {OUT_OF_PLACE: [2e-6, 4e-6], IN_PLACE: [4e-6, 8e-6]}
    peers = [Measured(times, {OUT_OF_PLACE: wrong, IN_PLACE: 0}, {}, {}) for wrong in (0, 7)]
    row = collectives.Row("all_reduce", 1000, 4, "float", "sum", peers)
    assert row.timings[OUT_OF_PLACE] == collectives.Timing(pytest.approx(3), pytest.approx(2), 7)
    assert row.algbw(IN_PLACE) == pytest.approx(4000 / 6e3)
    assert "7 FAILED" in collectives.foot([row])


def test_a_process_that_ends_early_is_noticed() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.close()
    with receiver, pytest.raises(WorkerError, match="process 0 ended"):
        collect([receiver])


def test_it_explains_how_each_size_travels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PCCL_INLINE_BYTES", raising=False)
    words = "bench all_reduce --explain -b 64K -e 64M -f 1024 --peers 2".split()
    assert main(words) == 0
    small, large = capsys.readouterr().out.splitlines()[2:]
    assert small.split() == ["65536", "inline", "inline"]
    assert "ring, eager, chunks of 1 MiB, 1 lane " in large
    assert "one-shot, eager, chunks of 256 KiB, lanes by the round trip" in large


def test_sizes_are_read_with_their_suffixes() -> None:
    assert [arguments.size(text) for text in ("12", "4K", "3m", "1G")] == [
        12,
        4096,
        3 << 20,
        1 << 30,
    ]
    for text in ("", "K", "-4K", "0", "1.5M"):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.size(text)


def test_state_reaches_a_newcomer(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    ended = bench(
        *("state", "-b", "256K", "-e", "1M", "-f", 4, "-n", 2, "-w", 1),
        *("--entries", 7, "--holders", 2, "--json", file),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert [row[0] for row in rows(ended.stdout)] == [str(256 << 10), str(1 << 20)]
    for row in json.loads(file.read_text())["results"]:
        assert row["nwrong"] == 0
        for way in ("newcomer", "equal", "lanes", "hash", "copy"):
            assert 0 < row[way]["time_min"] <= row[way]["time"]


def test_bytes_of_the_state_that_are_wrong_count() -> None:
    found = np.zeros(5000, np.uint8)
    expected = found.copy()
    expected[[0, 77, -1]] = 1
    assert state.count_wrong(found, expected) == 3


def test_state_has_a_byte_for_each_entry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["bench", "state", "-b", "4", "-e", "4", "--entries", "5"]))
    assert ended.value.code == 2
    assert "a byte at least" in capsys.readouterr().err


@pytest.mark.slow
def test_ddp_is_measured_beside_gloo_and_by_several_commands(tmp_path: Path) -> None:
    small = ["-n", 2, "-w", 2, "--layers", 1, "--width", 16, "--length", 8, "--batch", 1]
    words = ("ddp", *small, "--wire", "int8", "--json")
    ended = bench(*words, tmp_path / "here", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    assert [row[0] for row in rows(ended.stdout)] == ["gloo", "pccl", "pccl"]
    with pccl.MasterNode("127.0.0.1:0") as master, ThreadPoolExecutor() as pool:
        files = [tmp_path / str(i) for i in range(2)]
        by = [lambda f=f: bench(*words, f, "--master", master.address, cwd=tmp_path) for f in files]
        assert [each.result().returncode for each in [pool.submit(job) for job in by]] == [0, 0]
    for file in (tmp_path / "here", *files):
        results = json.loads(file.read_text())["results"]
        assert [row["way"] for row in results] == ["gloo", "pccl", "pccl int8"]
        assert all(row["equal"] and row["steps_per_s"] > 0 for row in results)
        assert results[0]["of_gloo"] == 1
        assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-4)
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.parametrize("peers", [2, 16, 17, 64])
def test_sums_are_exact_in_bfloat16_among_any_number_of_peers(peers: int) -> None:
    wanted = trials.expected(DataType.BFLOAT16, ReduceOp.SUM, peers)
    exact = trials.expected(DataType.FLOAT, ReduceOp.SUM, peers)
    assert ((wanted.astype(np.uint32) << 16).view(np.float32) == exact).all()
    assert 0 < exact.max() <= 256


def test_the_masters_work_is_measured_for_each_vote(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "master", "--peers", "20", "10", "-n", "1", "--groups", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[2:6] == ["10", "peers", "20", "peers"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["start", "finish", "pending", "topology", "sync", "KiB"]
    assert all(float(number) > 0 for line in lines[1:] for number in line.split()[1:3])


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_recoveries_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "1", "--bytes", "64K", "--only", "kill", "join", "master"]
    assert main(["bench", "recovery", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 peers, 65536 bytes" in lines[0]
    titles = "kill -9 of a peer", "a newcomer's connect()", "and its first", "kill -9 of the master"
    assert len(lines) == 5
    assert all(line.startswith(title) for line, title in zip(lines[1:], titles, strict=True))
