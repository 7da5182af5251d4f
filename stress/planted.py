"""Plants a bug in each of ten places of master, peer and engine: `python -m stress` must find it.

    python stress/planted.py [--only WORD] [--minutes 0.5]

Each is a copy of the repository with one line changed, and built again where that is C. The exit
code is 1 if a bug is not found, or for another reason than the one that is expected.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from verdicts import MISSED, report

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("c", "pccl", "stress", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILT = 300.0  # seconds at most


class Bug(NamedTuple):
    """A bug.

    Attributes:
        place: where it is, in words.
        file: where it is.
        old: what stands there, once.
        new: what takes its place.
        options: of the run.
        said: what is said of it; one of these.
    """

    place: str
    file: str
    old: str
    new: str
    options: str
    said: tuple[str, ...]


BUGS = [
    Bug(
        "master: adding up small contributions leaves the last one out",
        "pccl/runtime/inline.py",
        "enumerate(parts[1:], 2)",
        "enumerate(parts[1:-1], 2)",
        "--faults kill,join",
        ("own contribution is missing", "contributions in a world of"),
    ),
    Bug(
        "master: a journal that is read has no peers",
        "pccl/runtime/server/journal.py",
        "return State(run, incarnation, next_peer, dict(peers))",
        "return State(run, incarnation, next_peer, {})",
        "--faults restart-master,join --bound 20",
        ("was dropped, and never cut off", "nobody ever held", "until the run"),
    ),
    Bug(
        "master: nobody learns that newcomers wait",
        "pccl/protocol/master/run.py",
        "pending = self.membership.any_pending",
        "pending = False",
        "--faults kill,join --bound 15",
        ("until the run has",),
    ),
    Bug(
        "master: what it decides depends on addresses of memory",
        "pccl/protocol/master/groups.py",
        "peers = tuple(map(self._membership.info, self._membership.accepted(number)))",
        "peers = tuple(sorted(map(self._membership.info, self._membership.accepted(number)), "
        "key=id))",
        "--faults kill,join",
        ("decides otherwise",),
    ),
    Bug(
        "master: heartbeats are not missed",
        "pccl/runtime/server/server.py",
        "zmq.HEARTBEAT_TIMEOUT: config.heartbeat_timeout_ms",
        "zmq.HEARTBEAT_TIMEOUT: 60_000",
        "--faults freeze,join --bound 4",
        ("no call was answered for", " took "),
    ),
    Bug(
        "peer: a vote that a restarted master lacks is not cast again",
        "pccl/protocol/peer/votes.py",
        "            else:\n                self._outbox.say(vote)\n",
        "",
        "--faults restart-master --bound 15",
        ("no call was answered for", "until the run has", " took "),
    ),
    Bug(
        "peer: what a newcomer receives stays beside its memory",
        "pccl/runtime/client/staging.py",
        "content = in_place if plan.in_place else reserve(region.nbytes)",
        "content = reserve(region.nbytes)",
        "--faults kill,join",
        ("have different states of revision", "is not what the steps before it make"),
    ),
    Bug(
        "engine: the last hop does not reduce the last element of a chunk",
        "c/engine/chunk.c",
        "in, own.send, own.length, divisor);",
        "in, own.send, own.length - (divisor > 1), divisor);",
        "--faults kill,join",
        ("the mean is wrong", "own contribution is missing", "is not the same all over"),
    ),
    Bug(
        "engine: what an aborted collective has overwritten is not restored",
        "c/engine/parts.c",
        "        if (parts->part[i].overwrites)\n"
        "            restore_part(&parts->part[i], undo, written);",
        "        if (parts->part[i].overwrites && parts->n == 0)\n"
        "            restore_part(&parts->part[i], undo, written);",
        "--faults reset-lane,reset-accepted-lane --calm 0.1 --elements 1500000",
        ("was not restored",),
    ),
    Bug(
        "engine: the sockets of a stream that is closed stay open",
        "c/engine/stream.c",
        "        (void)zmq->close(stream->push);",
        "        (void)zmq;",
        "--faults kill,join",
        ("has grown from", "did not end within", "was not killed, and did not leave"),
    ),
]


def plant(bug: Bug, directory: Path) -> None:
    """Makes a copy of the repository with the bug."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "build")
            shutil.copytree(source, directory / name, ignore=ignore)
        else:
            shutil.copy(source, directory)
    path = directory / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.old!r} does not stand in {bug.file} just once")
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    if path.suffix == ".c":
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=directory, check=True, timeout=BUILT)


def verdict(bug: Bug, minutes: float) -> str:
    """What the run says of a bug; it begins with MISSED if that is not what it should."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        plant(bug, directory)
        command = [sys.executable, "-m", "stress", "--plain", "--peers", "3", "--calm", "0.5"]
        words = ["--minutes", str(minutes), *bug.options.split()]
        done = subprocess.run(
            [*command, *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": temporary},
            capture_output=True,
            text=True,
            check=False,
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("VIOLATION: ")]
    right = [line for line in said if any(text in line for text in bug.said)]
    if done.returncode == 1 and right:
        return right[0].removeprefix("VIOLATION: ")
    return f"{MISSED}: {said[:3] or (done.stdout + done.stderr)[-600:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.5, help="for each (%(default)s)")
    parser.add_argument("--only", default="", help="only bugs whose place contains this")
    args = parser.parse_args()
    return report(
        {bug.place: partial(verdict, bug, args.minutes) for bug in BUGS if args.only in bug.place}
    )


if __name__ == "__main__":
    sys.exit(main())
