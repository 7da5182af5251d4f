"""<pccl.h>: programs in C and C++ use all of it, rightly and wrongly, with peers of Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.ports import unused_port
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl.capi import values
from pccl.capi.libpccl import ffi
from pccl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "programs" / "capi" / "program.c"
EXAMPLE = ROOT / "examples" / "c" / "all_reduce.c"
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
COMPILERS = {"c99": ["cc", "-std=c99"], "c++17": ["c++", "-std=c++17", "-x", "c++"]}

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="C programs do not link with pccl on Windows"
)

Build = Callable[[str, Path], Path]


@pytest.fixture
def build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Build:
    """build(language, source) compiles and links as the commands say."""

    def one(language: str, source: Path) -> Path:
        compiler, *options = COMPILERS[language]
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler} here")
        said = []
        for command in ("cflags", "libs"):
            assert cli.main([command]) == 0
            said.append(capsys.readouterr().out.split())
        cflags, libs = said
        made = tmp_path / f"{source.stem}-{language}"
        sources = [str(source), "-x", "none"] if "-x" in options else [str(source)]
        command = [compiler, *options, *STRICT, *cflags, *sources, *libs, "-pthread"]
        built = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return made

    return one


def start(program: Path, *words: str, **settings: str) -> subprocess.Popen[str]:
    """As with the environment of the tests active, which an editable install needs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, **settings}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([str(program), *words], env=env, text=True, **streams)


def ends(process: subprocess.Popen[str]) -> str:
    """The output of a program, which must succeed."""
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, said
    return said


def calls(master: pccl.MasterNode) -> list[str]:
    """The calls of all peers."""
    return [call.call for peer in master.status().peers for call in peer.calls]


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def share(comm: pccl.Communicator) -> None:
    """The part of the other peer in `program peer`."""
    comm.wait_for_peers(2, timeout=30)
    parts = [np.full(50_000, float(tag), np.float32) for tag in (1, 2, 3, 4)]
    handles = [comm.all_reduce_async(part, op="sum", tag=i + 1) for i, part in enumerate(parts)]
    for i, handle in enumerate(handles):
        assert handle.wait(timeout=PATIENCE_S)[0]
        assert (parts[i] == 2.0 + i).all()
    comm.all_reduce(np.array([1, 2, 3], np.float32), tag=11, timeout=30)
    sums = np.array([4, 5, 6], np.float32)
    halves = np.array([0x3F80, 0x4000], np.uint16)
    described = [
        pccl.ReduceOpDescriptor(
            array.ctypes.data,
            array.ctypes.data,
            pccl.ReduceDescriptor(
                array.size, pccl.ReduceOp.SUM, tag, pccl.ReduceOperandDescriptor(dtype), None
            ),
        )
        for tag, array, dtype in (
            (1, sums, pccl.DataType.FLOAT),
            (2, halves, pccl.DataType.BFLOAT16),
        )
    ]
    comm.all_reduce_multiple_with_retry(described, max_in_flight=2, timeout=30)
    assert sums.tolist() == [8, 10, 12] and halves.tolist() == [0x4000, 0x4080]
    comm.all_reduce(np.full(3, 2, np.float32), op="sum", quantization="int8", timeout=30)
    state = pccl.SharedState.from_tensors(
        {"weights": np.array([1.0, 2.0, 3.0]), "step": np.array([42])}
    )
    state.revision = 7
    assert comm.sync_shared_state(state, timeout=30).tx_bytes == 32


@pytest.mark.parametrize("language", COMPILERS)
def test_a_c_program_and_a_python_peer_do_all_calls_together(
    language: str, build: Build, master: pccl.MasterNode
) -> None:
    program = build(language, PROGRAM)
    with start(program, "peer", port_of(master.address)) as process:
        with pccl.Communicator(master.address) as comm:
            share(comm)
            wait_until(lambda: any("tag 77" in call for call in calls(master)))
        ends(process)


def test_every_misuse_gets_its_code(build: Build) -> None:
    program = build("c99", PROGRAM)
    with start(program, "misuse", str(unused_port()), PCCL_CONNECT_TIMEOUT_S="1") as process:
        ends(process)
    with start(program, "master", str(unused_port())) as process:
        ends(process)


def test_a_program_may_end_without_destroying_its_objects(build: Build, address: str) -> None:
    with start(build("c99", PROGRAM), "leave", port_of(address)) as process:
        assert ends(process) == ""


def test_a_forked_child_is_told(build: Build, address: str) -> None:
    with start(build("c99", PROGRAM), "fork", port_of(address)) as process:
        assert ends(process) == ""


def test_the_example_adds_up_with_a_python_peer(build: Build, address: str) -> None:
    example = build("c99", EXAMPLE)
    with start(example, "127.0.0.1", port_of(address)) as process:
        with pccl.Communicator(address) as comm:
            comm.wait_for_peers(2, timeout=30)
            x = np.ones(1_000_000, np.float32)
            comm.all_reduce(x, op="sum", timeout=30)
        assert ends(process) == "the sum over 2 peers is 2.0\n"
    assert (x == 2).all()


def test_a_package_that_cannot_be_imported_is_told(build: Build, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pccl.capi.calls'] = None")
    with start(build("c99", PROGRAM), "leave", "1", PYTHONPATH=str(tmp_path)) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3  # pcclInit, and two calls after it
    assert "pccl: Python cannot import the package pccl, looking in" in said
    assert "ModuleNotFoundError: import of pccl.capi.calls halted" in said


def test_torn_content_stays_torn_until_it_has_another_revision() -> None:
    count = 9 << 20
    memory, name = np.zeros(count, np.uint8), ffi.new("char[]", b"x")
    infos = ffi.new("pcclTensorInfo_t[1]")
    infos[0].name, infos[0].count, infos[0].datatype = name, count, pccl.DataType.UINT8.value
    infos[0].data = ffi.cast("void *", memory.ctypes.data)
    given = ffi.new("pcclSharedState_t *", {"revision": 3, "count": 1, "infos": infos})
    state = values.State()
    newest, also = (pccl.SharedState.from_tensors({"x": np.ones(count, np.uint8)}) for _ in "ab")
    newest.revision = also.revision = 9

    def stop(progress: pccl.SharedStateProgress) -> None:
        raise LookupError("in the middle")

    def tear(index: int, comm: pccl.Communicator) -> None:
        """The newest content begins to arrive, and no more."""
        if index == 0:
            with pytest.raises(pccl.PCCLTimeoutError):
                comm.sync_shared_state(newest)
        else:
            with pytest.raises(LookupError, match="in the middle"):
                comm.sync_shared_state(state.of(given), progress=stop)

    with Cluster(2) as cluster:
        cluster.each(lambda index, comm: comm.sync_shared_state(also if index else newest))
        newest.push_revision()
        cluster.each(tear)
        assert state.of(given).torn
        given.revision = 4
        whole = state.of(given)
        given.revision = 5
        assert state.of(given) is whole and not whole.torn and whole.revision == 5
        cluster.each(tear)
        assert state.of(given).torn
        infos[0].count = count - 1
        assert not state.of(given).torn


@pytest.mark.slow
def test_gpu_support_is_reported(build: Build) -> None:
    said = ends(start(build("c99", PROGRAM), "build"))
    assert said == f"GPUs: {'yes' if pccl.cuda.is_available() else 'no'}\n"


# ---- names and values ----

KINDS = {  # of C and of Python, and what stands in front of a name in C
    "pcclResult_t": (pccl.Result, "pccl"),
    "pcclDataType_t": (pccl.DataType, "pccl"),
    "pcclDeviceType_t": (pccl.DeviceType, "pcclDevice"),
    "pcclRedOp_t": (pccl.ReduceOp, "pccl"),
    "pcclAttribute_t": (pccl.Attribute, "PCCL_ATTRIBUTE_"),
    "pcclSharedStateSyncStrategy_t": (
        pccl.SharedStateSyncStrategy,
        "PCCL_SHARED_STATE_SYNC_STRATEGY_",
    ),
    "pcclDistributionHint_t": (pccl.DistributionHint, "pcclDistribution"),
    "pcclQuantizationAlgorithm_t": (pccl.QuantizationAlgorithm, "pcclQuant"),
}
RENAMED = {  # in C after that prefix; in Python
    "PEERGROUPWORLDSIZE": "LOCALWORLDSIZE",
    "LARGESTPEERGROUPWORLDSIZE": "LARGESTPEERGROUPWORLDSIZE",
}


@pytest.mark.parametrize("kind", KINDS)
def test_enumerations_have_the_values_of_python(kind: str) -> None:
    of_python, prefix = KINDS[kind]
    of_c = {
        name.removeprefix(prefix).replace("_", "").upper(): value
        for name, value in ffi.typeof(kind).relements.items()
    }
    of_c = {RENAMED.get(name, name): value for name, value in of_c.items()}
    assert of_c == {each.name.replace("_", ""): each.value for each in of_python}


FIELDS = {  # which programs for the reference initialize by position
    "ccoip_inet_address_t": "protocol ipv4 ipv6",
    "ccoip_socket_address_t": "inet port",
    "pcclCommCreateParams_t": "master_address peer_group p2p_connection_pool_size",
    "pcclReduceInfo_t": "local_world_size tx_bytes rx_bytes",
    "pcclReduceOperandDescriptor_t": "datatype distribution_hint",
    "pcclQuantizationOptions_t": "quantized_datatype algorithm",
    "pcclReduceDescriptor_t": "count op tag src_descriptor quantization_options",
    "pcclReduceOpDescriptor_t": "sendbuf recvbuf descriptor",
    "pcclAsyncReduceOp_t": "comm tag",
    "pcclTensorInfo_t": "name data count datatype device_type allow_content_inequality",
    "pcclSharedState_t": "revision count infos",
    "pcclSharedStateSyncInfo_t": "tx_bytes rx_bytes",
    "pcclBuildInfo_t": "has_cuda_support",
}


@pytest.mark.parametrize("name", FIELDS)
def test_structs_have_their_fields_in_order(name: str) -> None:
    assert [field for field, _ in ffi.typeof(name).fields] == FIELDS[name].split()


def test_every_function_of_the_header_is_used_by_the_program() -> None:
    header = (ROOT / "pccl" / "capi" / "include" / "pccl.h").read_text(encoding="utf-8")
    functions = set(re.findall(r"^PCCL_EXPORT .*?\b(pccl\w+)\(", header, re.MULTILINE))
    used = set(re.findall(r"\b(pccl[A-Z]\w+)\(", PROGRAM.read_text(encoding="utf-8")))
    assert len(functions) == 20
    assert functions <= used
