"""Processes that commands start: their groups, their output, and their ends.

A `Process` leads its own process group. When it ends, the rest of the group is killed, so nothing
that it has started keeps a GPU, a port or a pipe. A group is signaled only before its leader is
reaped: afterwards its number may belong to another group.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, TypeAlias

from pccl.errors import PCCLError
from pccl.support import Closing

QUIET_S = 0.5  # after this time without output, show part of a line, and stop waiting for the end
OUTPUT_BYTES = 1 << 16  # read at once; also the longest line
TAIL_BYTES, TAIL_LINES = 4000, 15  # bytes to keep of a failed process's output
MARK = "LOCAL_RUN_COPY"  # an environment variable that marks a process's descendants
POLL_S = 0.02
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # TerminateProcess on Windows
Heard: TypeAlias = Callable[[Sequence[bytes]], object]  # receives lines of output


class Process(Closing):
    """A started program, which leads its own process group.

    `status` is None until `poll` or `wait` has seen its end. Raises OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],  # the program and its arguments
        environment: Mapping[str, str],  # its variables
        *,
        stdin: bool = False,  # whether `say` writes to its stdin; otherwise that is empty
        stdout: Heard | IO[Any] | int = subprocess.DEVNULL,  # what gets its lines, a file, or PIPE
        stderr: Heard | IO[Any] | int = subprocess.DEVNULL,  # the same
    ) -> None:
        self._mark = f"/{secrets.token_hex(8)}"
        self._lock = threading.RLock()  # a signal handler may interrupt `signal` and call it
        self._popen = subprocess.Popen(
            command,
            bufsize=0,
            env={**environment, MARK: environment.get(MARK, "") + self._mark},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if callable(stdout) else stdout,
            stderr=subprocess.PIPE if callable(stderr) else stderr,
            start_new_session=os.name == "posix",  # Ctrl-C reaches only us; we pass it on
        )
        self.pid = self._popen.pid
        self.stdout: IO[bytes] | None = self._popen.stdout
        self.status: int | None = None
        ways = ((self._popen.stdout, stdout), (self._popen.stderr, stderr))
        self.outputs = [Output(pipe, heard) for pipe, heard in ways if pipe and callable(heard)]

    def say(self, line: str) -> None:
        """Writes a line to its stdin. Does nothing if the process has ended."""
        if self._popen.stdin is not None:
            with suppress(OSError, ValueError):
                self._popen.stdin.write(f"{line}\n".encode())

    def signal(self, number: int) -> None:
        """Signals its group, as a terminal does. Does nothing if the process has ended."""
        with self._lock:
            if self.status is None:
                self._signal_group(number)

    def kill(self) -> None:
        self.signal(KILL)

    def kill_strays(self) -> None:
        """Kills its descendants outside its group, found by their environment; only on Linux."""
        for _ in range(3):  # they may start others in between
            killed = False
            for found in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if self._mark.encode() in found.read_bytes():
                        os.kill(int(found.parent.name), signal.SIGKILL)
                        killed = True
            if not killed:
                break

    def poll(self) -> int | None:
        """The exit status; None while it runs. After its end, kills the rest of its group."""
        if self.status is None and self._has_ended(wait=False):
            self._reap()
        return self.status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for its end, and kills the rest of its group. None: the time is up."""
        if timeout_s is None:
            if self.status is None:
                self._has_ended(wait=True)
                self._reap()
            return self.status
        until_s = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return self.status

    def finish(self, most_s: float) -> None:
        """Waits while its last output comes, after its end."""
        until_s = time.monotonic() + most_s
        for output in self.outputs:
            output.finish(until_s)

    def close(self) -> None:
        """Kills it and its group, and waits for the end."""
        self.kill()
        self.wait()

    def _has_ended(self, *, wait: bool) -> bool:
        """True if the process has ended; waits for that if asked.

        It is not reaped, so its number stays in use, except on systems without waitid.
        """
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
        with suppress(ProcessLookupError, PermissionError):  # none is left
            if sys.platform == "win32":
                self._popen.terminate()
            else:
                os.killpg(self.pid, number)


class Output(threading.Thread):
    """Reads lines from a pipe until its other end is closed.

    `heard` gets complete lines, with their ends, or part of a line that is too long, or has stayed
    incomplete for some time.
    """

    def __init__(self, pipe: IO[bytes], heard: Heard) -> None:
        super().__init__(name="pccl-output", daemon=True)
        self._pipe, self._heard = pipe, heard
        self._lock = threading.Lock()
        self._rest = b""  # an incomplete line
        self._moved_s = 0.0
        self.start()

    def run(self) -> None:
        with self._pipe:
            while data := os.read(self._pipe.fileno(), OUTPUT_BYTES):
                with self._lock:
                    self._moved_s = time.monotonic()
                    lines = (self._rest + data).splitlines(keepends=True)
                    self._rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
                    if len(self._rest) > OUTPUT_BYTES:
                        lines, self._rest = [*lines, self._rest], b""
                    if lines:
                        self._heard(lines)
        self.flush(0.0)

    def flush(self, after_s: float = QUIET_S) -> None:
        """Passes on a line that is still incomplete, such as a question or a progress bar."""
        with self._lock:
            if self._rest and time.monotonic() - self._moved_s >= after_s:
                self._heard([self._rest])
                self._rest = b""

    def finish(self, until_s: float) -> None:
        """Waits while output arrives, but not for a surviving process that holds the pipe."""
        self._moved_s = max(self._moved_s, time.monotonic())
        while (left_s := min(until_s, self._moved_s + QUIET_S) - time.monotonic()) > 0:
            self.join(left_s)
            if not self.is_alive():
                break
        self.flush(0.0)


def free_address(host: str = "127.0.0.1") -> str:
    """An address with a free port of this machine, for a master that will be restarted there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def start_master(address: str, *options: str) -> Process:
    command = [sys.executable, "-P", "-m", "pccl.master", "--listen-address", address, *options]
    return Process(command, os.environ)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a file with the output of a process."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def held(pid: int) -> tuple[int, int, int] | None:
    """The descriptors, threads and MiB of memory of a process; only on Linux."""
    if sys.platform != "linux":
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        files, tasks = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    except OSError:  # the process has ended
        return None
    return files, tasks, pages * os.sysconf("SC_PAGE_SIZE") >> 20


class Fleet(Closing):
    """Processes that run a Python module, and exchange lines with this process.

    Each should end when its stdin closes, so that all of them end even if this process is killed.
    `heard` has (number of the process, line of its stdout), and (number, status) when it has ended.
    The module is searched in `path` first.
    """

    def __init__(self, module: str, path: str = "") -> None:
        paths = [each for each in (path, os.environ.get("PYTHONPATH")) if each]
        self._command = [sys.executable, "-P", "-m", module]  # -P: no modules from this directory
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.heard: queue.Queue[tuple[int, str | int]] = queue.Queue()
        self._directory = tempfile.TemporaryDirectory(prefix="pccl-", ignore_cleanup_errors=True)
        self._processes: dict[int, Process] = {}
        self._waiting: list[threading.Thread] = []  # for the end of each

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for thread in self._waiting:
            thread.join()
        self._directory.cleanup()

    def start(self, number: int, *words: str) -> None:
        def heard(lines: Sequence[bytes]) -> None:
            for line in lines:
                self.heard.put((number, line.decode(errors="replace")))

        def wait() -> None:
            status = process.wait()
            assert status is not None
            process.finish(QUIET_S)
            self.heard.put((number, status))

        command = [*self._command, *words]
        with self._errors(number).open("wb") as errors:
            process = Process(command, self._environment, stdin=True, stdout=heard, stderr=errors)
        self._processes[number] = process
        self._waiting.append(threading.Thread(target=wait, daemon=True))
        self._waiting[-1].start()

    def say(self, number: int, line: str) -> None:
        self._processes[number].say(line)

    def kill(self, number: int) -> None:
        self._processes[number].kill()

    def errors(self, number: int) -> str:
        """The last lines of one process's stderr."""
        return tail(self._errors(number))

    def _errors(self, number: int) -> Path:
        return Path(self._directory.name, f"{number}.stderr")


# ---- functions of this program that run as processes ----

LEAVE_S = 10.0  # for workers to end by themselves after the last result


class WorkerError(OSError):
    """A worker has failed; the text says why."""


@contextmanager
def workers(
    number: int, work: Callable[..., Iterator[object]], *arguments: object
) -> Iterator[list[Connection]]:
    """Starts processes that send the results of work(i, *arguments) or, as text, why it failed."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        started, results = [], []
        for index in range(number):
            receiver, sender = context.Pipe(duplex=False)
            job = (work, index, arguments, sender)
            process = context.Process(target=_work, args=job, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            sender.close()  # so that the pipe closes with the process, which has its own end
            started.append(process)
            results.append(receiver)
        yield results
        for process in started:
            process.join(LEAVE_S)


def collect(results: Sequence[Connection]) -> list[Any]:
    """One result of every worker. Raises WorkerError if a worker sends text, or nothing."""
    found: dict[int, Any] = {}
    while waiting := [result for i, result in enumerate(results) if i not in found]:
        ready = wait(waiting)
        for number, result in enumerate(results):
            if result not in ready:
                continue
            try:
                found[number] = result.recv()
            except EOFError:
                raise WorkerError(f"process {number} ended before it had measured all") from None
            if isinstance(found[number], str):
                raise WorkerError(f"process {number}: {found[number]}")
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
    """In a worker: ends when the parent ends, and leaves Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
