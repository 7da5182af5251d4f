"""The contract of the compatible names: what is there, how it is called, and what calls do.

More of it: values and descriptors (test_types.py, test_shared_state_values.py, test_arrays.py),
collectives (test_all_reduce.py), shared state (test_shared_state.py), and where others hang
(test_never_hangs.py).
"""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers.cluster import Cluster
from peers.processes import Start, gathered
from peers.waiting import PATIENCE_S

import pccl
from pccl import weights
from pccl.data import Ledger

NAMES = """cuda Communicator MasterNode ReduceOp Attribute SharedStateSyncStrategy DataType
DistributionHint QuantizationAlgorithm ReduceOperandDescriptor QuantizationOptions ReduceDescriptor
TensorInfo SharedState SharedStateSyncInfo ReduceInfo ReduceOpDescriptor AsyncReduceHandle PCCLError
Result DeviceType""".split()

# As pypccl 1.0 has them. What this library adds is optional and by keyword only.
SIGNATURES: dict[str, tuple[Any, str]] = {
    "Communicator": (pccl.Communicator, "address, peer_group=0, p2p_connection_pool_size=0"),
    "connect": (pccl.Communicator.connect, "self, n_attempts=5"),
    "get_attribute": (pccl.Communicator.get_attribute, "self, attribute"),
    "update_topology": (pccl.Communicator.update_topology, "self"),
    "are_peers_pending": (pccl.Communicator.are_peers_pending, "self"),
    "optimize_topology": (pccl.Communicator.optimize_topology, "self"),
    "sync_shared_state": (
        pccl.Communicator.sync_shared_state,
        "self, shared_state, strategy=SharedStateSyncStrategy.ENFORCE_POPULAR",
    ),
    "all_reduce_multiple_with_retry": (
        pccl.Communicator.all_reduce_multiple_with_retry,
        "self, descriptors, *, max_in_flight=4",
    ),
    "MasterNode": (pccl.MasterNode, "listen_address"),
    "run": (pccl.MasterNode.run, "self"),
    "interrupt": (pccl.MasterNode.interrupt, "self"),
    "wait": (pccl.AsyncReduceHandle.wait, "self"),
    "SharedState": (pccl.SharedState, "tensor_infos"),
    "push_revision": (pccl.SharedState.push_revision, "self"),
    "TensorInfo": (
        pccl.TensorInfo,
        "name, data_ptr, *, numel, dtype, device_type, allow_content_inequality",
    ),
    "TensorInfo.from_torch": (
        pccl.TensorInfo.from_torch,
        "tensor, name, *, allow_content_inequality=False",
    ),
    "TensorInfo.from_numpy": (
        pccl.TensorInfo.from_numpy,
        "tensor, name, *, allow_content_inequality=False",
    ),
}


def written(function: Any) -> str:
    """The parameters of a callable; of those by keyword only, the ones that pypccl has."""
    words, keyword_only = [], []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        if parameter.kind is parameter.KEYWORD_ONLY:
            keyword_only.append(parameter.name + default)
        else:
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            words.append(parameter.name + default)
    return ", ".join([*words, "*", *keyword_only] if keyword_only else words)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    function, contract = SIGNATURES[name]
    positional, _, keywords = contract.partition(", *, ")
    found, _, more = written(function).partition(", *, ")
    assert found == positional
    extras = dict(word.partition("=")[::2] for word in more.split(", ")) if more else {}
    for keyword in filter(None, keywords.split(", ")):
        keyword_name, _, default = keyword.partition("=")
        assert extras.pop(keyword_name) == default
    assert "" not in extras.values(), "what is added must be optional"


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_async"])
def test_signature_of_all_reduce(name: str) -> None:
    parameters = inspect.signature(getattr(pccl.Communicator, name)).parameters
    assert list(parameters)[1:7] == [
        *("send", "recv", "op", "tag", "operand_descriptor", "quantization_options"),
    ]
    kinds = [parameter.kind for parameter in parameters.values()]
    assert kinds[1:3] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
    assert set(kinds[3:]) == {inspect.Parameter.KEYWORD_ONLY}
    defaults = [parameters[key].default for key in list(parameters)[4:7]]
    assert defaults == [0, None, None]


def test_names_of_the_module() -> None:
    there: dict[str, Any] = {}
    exec("from pccl import *", there)
    assert set(NAMES) <= there.keys()
    assert there["cuda"].is_available() in (True, False)
    assert pccl.__version__ == importlib.metadata.version("pccl-train")


def python(program: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **env},
    )


def test_commands() -> None:
    version = f"pccl {pccl.__version__}\n"
    scripts = Path(sys.executable).parent
    for command in ([sys.executable, "-m", "pccl"], [str(scripts / "pccl")]):
        ended = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert ended.stdout == version
    for command in ([sys.executable, "-m", "pccl.master"], [str(scripts / "pccl_master")]):
        ended = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert "--listen-address" in ended.stdout and "0.0.0.0:48148" in ended.stdout


@pytest.mark.parametrize("level", ["TRACE", "WARN", "NONE", "LOUD"])
def test_log_levels(level: str) -> None:
    program = """
import pccl
with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
    print(comm.world_size)
"""
    ended = python(program, PCCL_LOG_LEVEL=level)
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert ("registered" in ended.stderr) == (level == "TRACE")
    assert ("PCCL_LOG_LEVEL is 'LOUD'" in ended.stderr) == (level == "LOUD")


@pytest.mark.parametrize("end", [".close()", " = None"])
def test_without_a_stderr_nothing_is_logged(end: str) -> None:
    program = f"""
import sys
import pccl
sys.stderr{end}
with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
    print(comm.world_size)
"""
    ended = python(program, PCCL_LOG_LEVEL="INFO")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


# ---- what is said of what cannot be ----


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:48148", "pccl://[::1]:48148"])
def test_an_address_with_a_scheme(address: str) -> None:
    alone = address.partition("://")[2]
    for make in (pccl.Communicator, pccl.MasterNode):
        with pytest.raises(ValueError, match=re.escape(f"it must be {alone!r} alone")):
            make(address)


WRONG: dict[str, Callable[[], object]] = {
    "the address is 5": lambda: pccl.Communicator(5),  # type: ignore[arg-type]
    "the address is None": lambda: pccl.MasterNode(None),  # type: ignore[arg-type]
    "peer_group is 1.5": lambda: pccl.Communicator("h:1", 1.5),  # type: ignore[arg-type]
    "advertise is 5": lambda: pccl.Communicator("h:1", advertise=5),  # type: ignore[arg-type]
    "port_range is 5": lambda: pccl.Communicator("h:1", port_range=5),  # type: ignore[arg-type]
    "name is 5": lambda: pccl.Communicator("h:1", name=5),  # type: ignore[arg-type]
    "timeout is 'x'": lambda: pccl.Communicator("h:1").connect(timeout="x"),  # type: ignore[arg-type]
    "an entry of a shared state is 1": lambda: pccl.SharedState([1]),  # type: ignore[list-item]
    "tensors is 5": lambda: pccl.SharedState.from_tensors(5),  # type: ignore[arg-type]
    "samples is 2.5": lambda: Ledger(2.5, share=1),  # type: ignore[arg-type]
    "parameters is [": lambda: weights.Publisher("h:1", [np.zeros(3)]),  # type: ignore[arg-type]
    "module is 5": lambda: pccl.SharedState.from_module(5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", WRONG)
def test_an_argument_of_a_wrong_type_is_a_type_error(says: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(says)}"):
        WRONG[says]()


def test_numbers_that_are_not_whole_cost_nothing_and_those_of_numpy_are_as_good_as_others() -> None:
    with Cluster(2) as cluster:

        def calls(_: int, comm: pccl.Communicator) -> None:
            for size in (3, 100_000):  # by way of the master, and around the ring
                for wrong in (1.5, np.float32(2), "3", float("nan")):
                    with pytest.raises(TypeError, match=r"^tag is .*: it must be a whole number"):
                        comm.all_reduce(np.ones(size), tag=wrong)  # type: ignore[arg-type]
                for tag in (np.int64(3), np.uint8(4), True):
                    comm.all_reduce(np.ones(size), tag=tag)  # type: ignore[arg-type]
            shared = pccl.SharedState.from_tensors({"x": np.zeros(3)})
            with pytest.raises(TypeError, match=r"^min_peers is 2\.5: it must be a whole number"):
                comm.sync_shared_state(shared, min_peers=2.5)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="min_peers is 18446744073709551616"):
                comm.sync_shared_state(shared, min_peers=1 << 64)
            comm.sync_shared_state(shared, min_peers=np.int64(2))  # type: ignore[arg-type]

        cluster.each(calls)
        address = cluster.master.address
        with weights.Publisher(address, {"x": np.zeros(3)}) as publisher:
            with pytest.raises(TypeError, match=r"^version is 2\.5: it must be a whole number"):
                publisher.publish(2.5)  # type: ignore[arg-type]
            assert publisher.publish(np.int64(2)).version == 2  # type: ignore[arg-type]
    with pccl.MasterNode("127.0.0.1:0") as master:
        more = {"team": np.int64(7), "team_size": np.int8(1)}
        with pccl.Communicator(master.address, np.int64(7), **more) as comm:  # type: ignore[arg-type]
            assert comm.world_size == 1


def test_objects_bound_to_a_process_cannot_be_pickled_or_copied() -> None:
    shared = pccl.SharedState.from_tensors({"x": np.zeros(3)})
    with Cluster(2) as cluster:
        handle = cluster.comms[0].all_reduce_async(np.zeros(3))
        for one in (cluster.comms[0], cluster.master, handle, shared.tensor_infos[0], shared):
            for how in (pickle.dumps, copy.copy, copy.deepcopy):
                if one is not shared or how is not copy.copy:
                    with pytest.raises(TypeError, match=r"a \w+ cannot be pickled or copied: it"):
                        how(one)


def test_the_error_names_the_value_that_is_no_array() -> None:
    with Cluster(1) as cluster:
        comm, x = cluster.comms[0], np.zeros(3)
        for arrays, words in (
            ({"w": x, "b": None}, "the value of 'b': NoneType is neither"),
            ([x, x, 3.0], "number 2 of the list: float is neither"),
        ):
            with pytest.raises(ValueError, match=words):
                comm.all_reduce(arrays)


def test_a_result_prints_the_name_of_its_world() -> None:
    assert repr(pccl.ReduceInfo(3, 20, 10)) == "ReduceInfo(world_size=3, tx_bytes=20, rx_bytes=10)"


# ---- a world of one ----


def descriptors(array: np.ndarray) -> list[pccl.ReduceOpDescriptor]:
    work = pccl.ReduceDescriptor(
        array.size, pccl.ReduceOp.SUM, 0, pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT), None
    )
    return [pccl.ReduceOpDescriptor.from_numpy(array, array, work)]


def test_alone() -> None:
    with Cluster(1) as cluster:
        comm, x = cluster.comms[0], np.arange(6, dtype=np.float32)
        comm.update_topology()
        assert comm.are_peers_pending() is False
        shared = pccl.SharedState.from_tensors({"x": x})
        assert comm.sync_shared_state(shared) == pccl.SharedStateSyncInfo(0, 0)
        for collective in (
            lambda: comm.all_reduce(x, x, op=pccl.ReduceOp.SUM),
            lambda: comm.all_reduce_async(x, x, op=pccl.ReduceOp.SUM),
            lambda: comm.all_reduce_multiple_with_retry(descriptors(x)),
            lambda: comm.all_gather(x),
            lambda: comm.reduce_scatter(x),
            lambda: comm.broadcast(x),
        ):
            with pytest.raises(pccl.TooFewPeersError, match="TOO_FEW_PEERS"):
                collective()
        np.testing.assert_array_equal(x, np.arange(6))
        with pytest.raises(pccl.PCCLError, match="INVALID_USAGE"):
            comm.optimize_topology()
        with pytest.raises(pccl.PCCLError, match=r"INVALID_USAGE.*connected already"):
            comm.connect()


def test_before_connect() -> None:
    comm, x = pccl.Communicator("127.0.0.1:1"), np.zeros(3, np.float32)
    for call in (
        lambda: comm.sync_shared_state(pccl.SharedState.from_tensors({"x": x})),
        lambda: comm.all_reduce_async(x, x, op=pccl.ReduceOp.SUM),
        lambda: comm.all_reduce_multiple_with_retry(descriptors(x)),
        comm.barrier,
        lambda: comm.rank,
    ):
        with pytest.raises(pccl.PCCLError) as caught:
            call()
        assert caught.value.result is pccl.Result.INVALID_USAGE


def test_several_collectives_that_are_none() -> None:
    with Cluster(2) as cluster:
        comm, x = cluster.comms[0], np.ones(3, np.float32)
        for described, in_flight, words in (
            ([], 4, "the list of descriptors is empty"),
            (descriptors(x), 0, "max_in_flight is 0: it must be at least 1"),
            (descriptors(x), -1, "max_in_flight is -1"),
        ):
            with pytest.raises(pccl.PCCLError, match=words) as caught:
                comm.all_reduce_multiple_with_retry(described, max_in_flight=in_flight)
            assert caught.value.result is pccl.Result.INVALID_ARGUMENT
        assert (x == 1).all()


@pytest.mark.parametrize("name", ["update_topology", "optimize_topology", "sync_shared_state"])
def test_a_collective_that_is_launched_and_not_awaited(name: str) -> None:
    with Cluster(2) as cluster:
        comm, x = cluster.comms[0], np.zeros(3, np.float32)
        comm.all_reduce_async(x, x, op=pccl.ReduceOp.SUM)
        words = [pccl.SharedState.from_tensors({"x": x})] if name == "sync_shared_state" else []
        with pytest.raises(pccl.PCCLError) as caught:
            getattr(comm, name)(*words)
        assert caught.value.result is pccl.Result.PENDING_ASYNC_OPS


def test_time_is_up_for_several() -> None:
    with Cluster(2) as cluster:
        comm, x = cluster.comms[0], np.ones(3, np.float32)
        with pytest.raises(pccl.PCCLTimeoutError, match=r"waited for peer 2 \([^ ]+, 127"):
            comm.all_reduce_multiple_with_retry(descriptors(x), timeout=0.1)
        assert (x == 1).all()
        y = np.ones(3, np.float32)

        def again(index: int, comm: pccl.Communicator) -> None:
            comm.all_reduce_multiple_with_retry(descriptors(y if index else x), timeout=30)

        cluster.each(again)
        assert (x == 2).all() and (y == 2).all()


# ---- interruptions ----


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process on Windows")
def test_ctrl_c_interrupts_any_call(start: Start) -> None:
    puppets = gathered(start, [0, 0], PCCL_LOG_LEVEL="NONE")
    calls: dict[str, dict[str, Any]] = {
        **{"all_reduce": {}, "update_topology": {}, "optimize_topology": {}},
        "sync": {"revision": 0, "value": 1.0},
        "retry": {"value": 1.0, "count": 10, "tags": 2, "max_in_flight": 2},
    }
    for call, words in calls.items():
        assert puppets[0].call("interruptible", call=call, **words) == "interrupted", call
        for puppet in puppets:  # nobody waits for it there, and it can make other calls
            puppet.begin("all_reduce")
        assert [puppet.value() for puppet in puppets] == [2.0, 2.0], call


def test_exception_types() -> None:
    """As pypccl's scripts have it, and as Python's others do."""
    array = np.zeros(3)
    with Cluster(2) as cluster:
        comm = cluster.comms[0]
        for error in (ValueError, AssertionError):
            with pytest.raises(error, match="send has 3 elements, recv has 4"):
                comm.all_reduce(array, np.zeros(4))
        with pytest.raises(RuntimeError, match="call connect"):
            pccl.Communicator(cluster.master.address).are_peers_pending()
    assert issubclass(pccl.PCCLTimeoutError, TimeoutError)


def test_the_repr_of_a_communicator() -> None:
    with Cluster(2, groups=[0, 0]) as cluster:
        comm = cluster.comms[0]
        said = rf", peer 1 \([^ ]+\), rank {comm.rank} of 2, group 0\)"
        assert re.fullmatch(rf"Communicator\('{cluster.master.address}'{said}", repr(comm))
    assert repr(comm) == f"Communicator({cluster.master.address!r}, group 0, not connected)"
