"""Processes that commands start: their groups, their output, and their ends.

A `Process` leads a process group of its own, which ends with it: what it has started keeps no GPU,
no port and no pipe. A group gets signals only while its number is surely its own, that is, before
its leader has been reaped.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from pccl.errors import PCCLError
from pccl.support.closing import Closing

QUIET_S = 0.5  # output that brings nothing for so long is shown, and at the end not waited for
OUTPUT_BYTES = 1 << 16  # that are read at once, and the longest line
TAIL_BYTES, TAIL_LINES = 4000, 15  # of a file that has what a failed process has printed
MARK = "LOCAL_RUN_COPY"  # in the environment of a process, and so of whatever it starts
POLL_S = 0.02
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # TerminateProcess on Windows
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")  # of lines, also those that are overwritten


class Process(Closing):
    """A program that was started, and leads its own process group.

    `status` is None before `poll` or `wait` have seen its end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],  # the program and its arguments
        environment: Mapping[str, str],  # its variables
        *,
        stdin: bool = False,  # whether `say` writes to it; otherwise it reads nothing
        stdout: IO[Any] | int = subprocess.DEVNULL,  # a file, or PIPE
        stderr: IO[Any] | int = subprocess.DEVNULL,  # likewise
    ) -> None:
        self._mark = f"/{secrets.token_hex(8)}"
        self._lock = threading.RLock()  # a handler of signals may come while one is passed on
        self._popen = subprocess.Popen(
            command,
            bufsize=0,
            env={**environment, MARK: environment.get(MARK, "") + self._mark},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=os.name == "posix",  # Ctrl-C reaches it by way of us
        )
        self.pid = self._popen.pid
        self.stdout: IO[bytes] | None = self._popen.stdout
        self.stderr: IO[bytes] | None = self._popen.stderr
        self.status: int | None = None

    def say(self, line: str) -> None:
        """Writes a line to its stdin. If it is gone, `poll` and `wait` tell."""
        if self._popen.stdin is not None:
            with suppress(OSError, ValueError):
                self._popen.stdin.write(f"{line}\n".encode())

    def signal(self, number: int) -> None:
        """Signals it and what it has started, as a terminal does; nobody once it has ended."""
        with self._lock:
            if self.status is None:
                self._signal_group(number)

    def kill(self) -> None:
        self.signal(KILL)

    def kill_strays(self) -> None:
        """Kills what it has started and what has left its group, known by its environment; on Linux
        only."""
        left = True
        for _ in range(3):  # they may start others meanwhile
            if not left:
                break
            left = False
            for found in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if self._mark.encode() in found.read_bytes():
                        os.kill(int(found.parent.name), signal.SIGKILL)
                        left = True

    def poll(self) -> int | None:
        """Its status, if it has ended; then its group has, too."""
        if self.status is None and self._has_ended(wait=False):
            self._reap()
        return self.status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its status when it has ended, and its group with it; None when the time is over."""
        if timeout_s is None:
            if self.status is None:
                self._has_ended(wait=True)
                self._reap()
            return self.status
        until_s = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return self.status

    def close(self) -> None:
        """Kills it and its group, and waits for that."""
        self.kill()
        self.wait()

    def _has_ended(self, *, wait: bool) -> bool:
        """True if the process has ended; waits for that if asked to. Its number stays taken
        meanwhile, except on systems without waitid."""
        if hasattr(os, "waitid"):
            options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
            with suppress(ChildProcessError):  # another thread has reaped it
                return os.waitid(os.P_PID, self.pid, options) is not None
            return True
        if wait:
            self._popen.wait()
        return self._popen.poll() is not None

    def _reap(self) -> None:
        with self._lock:
            if self.status is None:
                self._signal_group(KILL)
                self.status = self._popen.wait()
                if self._popen.stdin is not None:
                    with suppress(OSError):
                        self._popen.stdin.close()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # none is left, as macOS has it
            if sys.platform == "win32":
                self._popen.terminate()
            else:
                os.killpg(self.pid, number)


class Output(threading.Thread):
    """Reads lines from a pipe until all have closed its other end.

    `heard` gets complete lines, with their ends; or one part of a line that lingers or is too long.
    """

    def __init__(self, pipe: IO[bytes], heard: Callable[[Sequence[bytes]], None]) -> None:
        super().__init__(name="pccl-output", daemon=True)
        self._pipe, self._heard = pipe, heard
        self._lock = threading.Lock()
        self._rest = b""  # of a line that is not complete
        self._moved_s = 0.0
        self.start()

    def run(self) -> None:
        with self._pipe:
            while data := os.read(self._pipe.fileno(), OUTPUT_BYTES):
                with self._lock:
                    self._moved_s = time.monotonic()
                    *lines, self._rest = _ENDS.split(self._rest + data)
                    if len(self._rest) > OUTPUT_BYTES:
                        lines, self._rest = [*lines, self._rest], b""
                    if lines:
                        self._heard(lines)
        self.flush(0.0)

    def flush(self, after_s: float = QUIET_S) -> None:
        """Hands on a line that nobody has completed for so long: a question, a bar of progress."""
        with self._lock:
            if self._rest and time.monotonic() - self._moved_s >= after_s:
                self._heard([self._rest])
                self._rest = b""

    def finish(self, until_s: float) -> None:
        """Waits while more comes. A process that lives on may hold the pipe: it is left to it."""
        self._moved_s = max(self._moved_s, time.monotonic())
        while (left_s := min(until_s, self._moved_s + QUIET_S) - time.monotonic()) > 0:
            self.join(left_s)
            if not self.is_alive():
                break
        self.flush(0.0)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of what a process has printed into a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def held(pid: int) -> tuple[int, int, int] | None:
    """A process's descriptors, threads, and MiB of memory; on Linux only."""
    if sys.platform != "linux":
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        files, tasks = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    except OSError:  # it has ended
        return None
    return files, tasks, pages * os.sysconf("SC_PAGE_SIZE") >> 20


class Fleet(Closing):
    """Python modules that run as processes, told by lines what to do, and heard by lines.

    Each has a pipe as its stdin and should end when that closes, so that all end even if this
    process is killed. `heard` has (number of the process, line of its stdout), and (number, status)
    when it has ended. The module is looked for in `path` first.
    """

    def __init__(self, module: str, path: str = "") -> None:
        paths = [each for each in (path, os.environ.get("PYTHONPATH")) if each]
        self._command = [sys.executable, "-P", "-m", module]  # -P: not what lies in this directory
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.heard: queue.Queue[tuple[int, str | int]] = queue.Queue()
        self._directory = tempfile.TemporaryDirectory(prefix="pccl-", ignore_cleanup_errors=True)
        self._processes: dict[int, Process] = {}
        self._readers: list[threading.Thread] = []

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for reader in self._readers:
            reader.join()
        self._directory.cleanup()

    def start(self, number: int, *words: str) -> None:
        with self._errors(number).open("wb") as errors:
            process = self._processes[number] = Process(
                [*self._command, *words],
                self._environment,
                stdin=True,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

        def read() -> None:
            assert process.stdout is not None
            said = Output(process.stdout, lambda lines: self._hear(number, lines))
            status = process.wait()
            assert status is not None
            said.finish(time.monotonic() + QUIET_S)
            self.heard.put((number, status))

        reader = threading.Thread(target=read, daemon=True)
        self._readers.append(reader)
        reader.start()

    def say(self, number: int, line: str) -> None:
        """Writes a line to the stdin of one. If it is gone, that will be heard."""
        self._processes[number].say(line)

    def kill(self, number: int) -> None:
        """Ends one as a power cut would."""
        self._processes[number].kill()

    def errors(self, number: int) -> str:
        """The end of what one has written to stderr."""
        return tail(self._errors(number))

    def _errors(self, number: int) -> Path:
        return Path(self._directory.name, f"{number}.stderr")

    def _hear(self, number: int, lines: Sequence[bytes]) -> None:
        for line in lines:
            self.heard.put((number, line.decode(errors="replace")))


# ---- functions of this program that run as processes ----

LEAVE_S = 10.0  # for workers to end by themselves after the last result


class WorkerError(Exception):
    """A worker could not do its work; the text says why."""


@contextmanager
def workers(
    number: int, work: Callable[..., Iterator[object]], *arguments: object
) -> Iterator[list[Connection]]:
    """Starts processes that send what work(i, *arguments) yields, or why it fails, as text."""
    context = multiprocessing.get_context("spawn")
    started = []
    results = []
    try:
        for index in range(number):
            receiver, sender = context.Pipe(duplex=False)
            job = (work, index, arguments, sender)
            process = context.Process(target=_work, args=job, daemon=True)
            process.start()
            sender.close()  # the process has its own, so that its end is the end of the pipe
            started.append(process)
            results.append(receiver)
        yield results
        for process in started:
            process.join(LEAVE_S)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()


def collect(results: Sequence[Connection]) -> list[Any]:
    """One result of every worker. Raises WorkerError if one sends text instead, or nothing."""
    found: dict[int, Any] = {}
    waiting = dict(enumerate(results))
    while waiting:
        ready = wait(waiting.values())
        for number in [number for number, result in waiting.items() if result in ready]:
            try:
                message = waiting.pop(number).recv()
            except EOFError:
                raise WorkerError(f"process {number} ended before it had measured all") from None
            if isinstance(message, str):
                raise WorkerError(f"process {number}: {message}")
            found[number] = message
    return [found[number] for number in range(len(results))]


def _work(
    work: Callable[..., Iterator[object]],
    index: int,
    arguments: Sequence[object],
    results: Connection,
) -> None:
    follow_parent()
    try:
        for result in work(index, *arguments):
            results.send(result)
    except PCCLError as error:
        results.send(str(error))


def follow_parent() -> None:
    """In a worker: ends when the parent does, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
