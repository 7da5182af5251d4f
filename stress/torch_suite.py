"""Runs torch's own tests of torch.distributed with gloo, and again with pccl in its place.

    python stress/torch_suite.py --out results
    python stress/torch_suite.py --out results --tests pytorch/test/distributed
    python stress/torch_suite.py --out results --report docs/internals/torch_tests.md

The first command runs distributed_test.py, which torch ships. The second one runs test files of a
checkout of torch's repository at the tag of the installed version: those of FILES, or of --files.

Where there is no GPU, the tests of GPUs run on the CPU: decorators that skip them are ignored, and
what they do with a CUDA device is done with the CPU. A test that needs a GPU then fails with gloo,
too, and does not count.

Each backend's results go to a file of JSON, from which a run that was stopped goes on. The exit
code is 1 if a test that gloo passes fails with pccl, and KNOWN does not give the reason.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SHIPPED = "torch.testing._internal.distributed.distributed_test"
SIZES = (2, 4)  # ranks
TEST_S = 300  # the longest that one test may take
FILE_S = 3600  # and all tests of a file, with one backend
REPLACED = "TORCH_SUITE_BACKEND"  # in the environment of tests: the backend that gloo's tests get

# files below test/distributed of torch's repository that have tests which run with gloo
FILES = [
    "algorithms/test_join.py",
    "_composable/fsdp/test_fully_shard_clip_grad_norm_.py",
    "_composable/fsdp/test_fully_shard_comm.py",
    "_composable/fsdp/test_fully_shard_frozen.py",
    "_composable/fsdp/test_fully_shard_state_dict.py",
    "_composable/fsdp/test_fully_shard_training.py",
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "checkpoint/test_state_dict_utils.py",
    "optim/test_zero_redundancy_optimizer.py",
    "pipelining/test_schedule_multiproc.py",
    "pipelining/test_stage.py",
    "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py",
    "tensor/parallel/test_tp_style.py",
    "tensor/test_api.py",
    "tensor/test_dtensor.py",
    "tensor/test_embedding_ops.py",
    "tensor/test_init.py",
    "tensor/test_math_ops.py",
    "tensor/test_matrix_ops.py",
    "tensor/test_redistribute.py",
    "tensor/test_view_ops.py",
    "test_c10d_functional_native.py",
    "test_c10d_object_collectives.py",
    "test_device_mesh.py",
    "test_functional_api.py",
    "test_functional_differentials.py",
]

# tests that pass with gloo and not with pccl, and why
KNOWN = {
    "test_all_gather_into_tensor_single": "its out= variant calls a method of torch in C++ that a "
    "group written in Python cannot override"
}

Outcome = tuple[str, str, float]  # passed, skipped or failed; why; seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--backends", nargs="+", default=["gloo", "pccl"])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of ranks")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of tests")
    parser.add_argument("--part", default="1/1", help="the I-th of N parts of the tests")
    parser.add_argument("--tests", type=Path, help="test/distributed of a checkout of torch")
    parser.add_argument("--files", nargs="+", default=FILES, help="files below --tests to run")
    parser.add_argument(
        "--report", type=Path, help="run nothing, and write the results into this page"
    )
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)  # backend, ranks, file
    return parser.parse_args()


# ---- pccl in the place of gloo ----


THEIRS = {"gloo", "nccl", "cpu:gloo", "cpu:gloo,cuda:nccl"}


def replace_theirs(backend: str, theirs: set[str]) -> None:
    """Replaces the backend of groups with torch's backends, or with the default one."""
    import torch.distributed as dist

    for name, replaced in (("init_process_group", {None, *theirs}), ("new_group", theirs)):
        _replace(getattr(dist, name), replaced, backend)


def _replace(before: Callable[..., Any], replaced: set[str | None], backend: str) -> None:
    signature = inspect.signature(before)

    @functools.wraps(before)
    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        if bound.arguments.get("backend") in replaced:
            bound.arguments["backend"] = backend
        return before(*bound.args, **bound.kwargs)

    for module in list(sys.modules.values()):
        if (
            getattr(module, "__name__", "").startswith("torch.")
            and vars(module).get(before.__name__) is before
        ):
            setattr(module, before.__name__, call)


class Alike(str):
    """The name of the backend, which equals "gloo" in torch's tests."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other in {"gloo", self.__str__()}

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


# ---- tests of GPUs on the CPU ----


def _same(test: Any) -> Any:
    return test


def ignore_gates(size: int) -> None:
    """Stops torch's decorators from skipping tests that want GPUs, or NCCL instead of gloo."""
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal import common_utils as utils

    for name in ("skip_if_no_gpu", "skip_if_rocm_multiprocess"):
        setattr(common, name, _same)
    if size > 2:  # its groups are of the ranks 1 and 2
        common.skip_if_small_worldsize = _same
    for name in (
        "skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "requires_nccl_version", "requires_nccl",
        "require_n_gpus_for_nccl_backend", "requires_accelerator_dist_backend",
    ):  # fmt: skip
        setattr(common, name, lambda *given, **named: _same)
    before = utils.skip_but_pass_in_sandcastle_if

    def skip(condition: bool, reason: str) -> Any:
        return before(condition, reason) if reason in NEEDED else _same

    utils.skip_but_pass_in_sandcastle_if = skip
    common.skip_but_pass_in_sandcastle_if = skip
    common.TIMEOUT_DEFAULT = TEST_S
    common.TIMEOUT_OVERRIDE.clear()


NEEDED = {"no torchvision", "Skipped due to flakiness"}  # reasons to still skip a test


def emulate_gpus(size: int) -> None:
    """Replaces the CUDA devices of distributed_test.py with the CPU."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def rank() -> int:
        return torch.distributed.get_rank()

    for name, function in {
        "device_count": lambda: size,
        "current_device": rank,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": torch.manual_seed,
    }.items():
        setattr(torch.cuda, name, function)
    module, init = torch.nn.Module, DistributedDataParallel.__init__
    to = module.to
    module.cuda = lambda self, device=None: self  # type: ignore[assignment, method-assign]
    module.to = lambda self, *given, **named: to(self, *map(_cpu, given), **_on_cpu(named))  # type: ignore[assignment, method-assign]

    @functools.wraps(init)
    def without_ids(self: Any, module: Any, *given: Any, **named: Any) -> None:
        given = (None, None, *given[2:]) if given else given
        init(self, module, *given, **{**named, "device_ids": None, "output_device": None})

    DistributedDataParallel.__init__ = without_ids  # type: ignore[method-assign]

    class OnCPU(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            if function is torch.Tensor.cuda:
                return given[0].clone()
            if function is torch.Tensor.to:
                given = given[0], *map(_cpu, given[1:])
            return function(*given, **_on_cpu(named or {}))

    OnCPU().__enter__()


def _cpu(device: Any) -> Any:
    """The CPU for a CUDA device or its number; any other value unchanged."""
    is_cuda = type(device) is int or str(device).startswith("cuda")
    return "cpu" if is_cuda else device


def _on_cpu(named: dict[str, Any]) -> dict[str, Any]:
    return {**named, "device": _cpu(named["device"])} if "device" in named else named


# ---- the tests ----


def shipped(backend: str, size: int) -> type[unittest.TestCase]:
    """The tests that torch ships, without skips for backends other than gloo."""
    import torch
    from torch.testing._internal import common_distributed as common

    if backend != "gloo":
        importlib.import_module(f"{backend}.torch")  # here, not in each process
    common.DistTestCases.backend_feature["plugin"].add(backend)
    if not torch.cuda.is_available():
        ignore_gates(size)
        emulate_gpus(size)
        replace_theirs(backend, {"nccl"})
    spec = importlib.util.find_spec(SHIPPED)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for line, changed in {
        'BACKEND = os.environ["BACKEND"]\n': 'BACKEND = Alike(os.environ["BACKEND"])\n',
        "def require_world_size(": "require_backend_is_available = any_backend\n\n\n"
        "def require_world_size(",
    }.items():
        assert source.count(line) == 1
        source = source.replace(line, changed)
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(Alike=Alike, any_backend=lambda backends: _same)
    sys.modules[SHIPPED] = module  # where pickle looks
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    for name in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        vars(module)[f"{name}_SUPPORTED_BACKENDS"].append(backend)

    class TestBackend(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestBackend


def of_file(path: Path, backend: str, size: int) -> ModuleType:
    """A file of torch's repository; its processes import this file again, as __mp_main__."""
    os.environ[REPLACED] = backend
    prepare(backend, size)
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def prepare(backend: str, size: int) -> None:
    """Prepares each process of a file's tests."""
    import torch
    from torch.testing._internal import common_distributed as common

    replace_theirs(backend, THEIRS)
    if not torch.cuda.is_available():
        ignore_gates(size)
    common.DEFAULT_WORLD_SIZE = size


def cases(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
        return
    for each in suite:
        yield from cases(each)


class Results(unittest.TestResult):
    """The outcome of each test, written at once."""

    def __init__(self, file: Path, place: str) -> None:
        super().__init__()
        self._file, self._place = file, place
        self.found = read(file)
        self._began_s = time.monotonic()  # an error of a class or module begins no test

    def name(self, test: unittest.TestCase) -> str:
        return f"{self._place} {test.id().rpartition('.')[2]}"

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began_s = time.monotonic()
        self._note(test, "failed", "the process of the tests has ended in it")

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        seconds = round(time.monotonic() - self._began_s, 1)
        self.found[self.name(test)] = (outcome, why, seconds)
        self._file.write_text(json.dumps(self.found, indent=1))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        outcome, why, seconds = self.found[self.name(test)]
        print(f"{outcome:7} {seconds:6.1f} s {self.name(test)} {in_short(why)!r}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._note(test, "failed", str(error[1]))

    addError = addFailure


def run(args: argparse.Namespace) -> None:
    """The tests of one file with one backend, in this process."""
    backend, size, file = args.run[0], int(args.run[1]), args.run[2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(WORLD_SIZE=str(size), BACKEND=backend)
    loader = unittest.defaultTestLoader
    if file == SHIPPED:
        cls = globals()["TestBackend"] = shipped(backend, size)
        suite = loader.loadTestsFromTestCase(cls)
    else:
        suite = loader.loadTestsFromModule(of_file(args.tests / file, backend, size))
    name = "distributed_test.py" if file == SHIPPED else file
    results = Results(args.out / f"torch_{backend}.json", f"{name} {size}")
    tests = [test for test in cases(suite) if any(part in test.id() for part in args.only)]
    index, count = map(int, args.part.split("/"))
    left = [test for test in tests[index - 1 :: count] if results.name(test) not in results.found]
    unittest.TestSuite(left).run(results)
    for child in multiprocessing.active_children():  # of a test that leaves a rank behind
        child.kill()


# ---- the report ----

MARK = "## Results"


def in_short(why: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in why.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1][:200]


OTHERS = {
    "passed": "gloo passes them",
    "failed": "gloo fails them",
    "skipped": "gloo skips them",
}


def compare(gloo: dict[str, Outcome], pccl: dict[str, Outcome]) -> tuple[str, int]:
    """The report, and the number of tests that gloo passes and pccl fails for no known reason."""
    counts: dict[str, Counter[str]] = {}
    apart: dict[str, list[str]] = {before: [] for before in OTHERS}
    unexplained = 0
    for name in sorted(gloo.keys() & pccl.keys()):
        place, _, test = name.rpartition(" ")
        (before, why_before, _), (now, why_now, _) = gloo[name], pccl[name]
        counts.setdefault(place, Counter()).update([f"gloo {before}", f"{before} {now}"])
        if before != now:
            reason = KNOWN.get(test) or in_short(why_before if now == "passed" else why_now)
            apart[before].append(f"| {place} | {test} | {now} | {reason.replace('|', ' ')} |")
            unexplained += before == "passed" and test not in KNOWN
    rows = ["| file | ranks | gloo passes | pccl passes of these | pccl also passes | neither |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for place, count in counts.items():
        file, _, size = place.rpartition(" ")
        both, besides = count["passed passed"], count["failed passed"] + count["skipped passed"]
        neither = count.total() // 2 - count["gloo passed"] - besides
        numbers = map(str, (count["gloo passed"], both, besides, neither))
        rows.append(f"| {file} | {size} | {' | '.join(numbers)} |")
    for before, lines in apart.items():
        if lines:
            rows += ["", f"pccl differs from gloo in these tests. {OTHERS[before]}:", ""]
            rows += ["| file, ranks | test | pccl | reason |", "| --- | --- | --- | --- |", *lines]
    return "\n".join(rows) + "\n", unexplained


def read(file: Path) -> dict[str, Outcome]:
    return json.loads(file.read_text()) if file.exists() else {}


def run_all(args: argparse.Namespace) -> None:
    """Runs each file with each backend in separate processes, which import torch once."""
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["--out", str(args.out), "--part", args.part, "--only", *args.only]
    words += ["--tests", str(args.tests)] if args.tests else []
    files = [SHIPPED]
    if args.tests:
        files = [file for file in args.files if (args.tests / file).exists()]
        for file in sorted(set(args.files) - set(files)):
            print(f"{file} is not below {args.tests}: it is left out", file=sys.stderr)
    for file, size, backend in itertools.product(files, args.sizes, args.backends):
        results, before = args.out / f"torch_{backend}.json", -1
        one = [sys.executable, __file__, *words, "--run", backend, str(size), file]
        # a test that ends the process has failed; the next process continues after it
        while before < len(read(results)):
            before = len(read(results))
            if subprocess.run(one, timeout=FILE_S).returncode == 0:
                break


def main() -> int:
    args = arguments()
    if args.run:
        run(args)
        return 0
    if args.report is None:
        run_all(args)
    gloo, pccl = (read(args.out / f"torch_{backend}.json") for backend in ("gloo", "pccl"))
    report, unexplained = compare(gloo, pccl)
    if args.report is None:
        print(report)
    else:
        head, _, _ = args.report.read_text(encoding="utf-8").partition(MARK)
        args.report.write_text(f"{head}{MARK}\n\n{report}", encoding="utf-8")
    return min(1, unexplained)


if backend := os.environ.get(REPLACED):  # imported again by a process of a test
    prepare(backend, int(os.environ["WORLD_SIZE"]))
if __name__ == "__main__":
    sys.exit(main())
