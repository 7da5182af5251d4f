"""MasterNode and `python -m pccl.master`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import zmq
from peers.waiting import PATIENCE_S

import pccl
from pccl.protocol.master import Master


def test_misuse() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    with pytest.raises(pccl.PCCLError, match="INVALID_USAGE"):
        master.interrupt()
    master.run()
    with pytest.raises(pccl.PCCLError, match="runs already"):
        master.run()
    with pytest.raises(pccl.PCCLError, match="cannot listen on"):
        pccl.MasterNode(master.address).run()
    master.interrupt()
    master.interrupt()


def test_status_while_it_runs() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    with pytest.raises(pccl.PCCLError, match="does not run"):
        master.status()
    with master, pccl.Communicator(master.address):
        assert [peer.peer for peer in master.status().peers] == [1]
    with pytest.raises(pccl.PCCLError, match="does not run"):
        master.status()


def test_it_runs_again_after_an_interruption() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    for _ in range(2):
        master.run()
        with pccl.Communicator(master.address) as comm:
            assert comm.world_size == 1
        master.interrupt()
        master.wait()


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("localhost:", ValueError),
        ("localhost:x", ValueError),
        (":1", ValueError),
        ("::1:5", ValueError),
    ],
)
def test_bad_addresses(address: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        pccl.MasterNode(address)
    with pytest.raises(error):
        pccl.Communicator(address)


def test_the_port_is_free_again_at_once() -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    address = master.address
    with pccl.Communicator(address):
        pass
    master.interrupt()
    with pccl.MasterNode(address) as again, pccl.Communicator(again.address) as comm:
        assert comm.world_size == 1


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with pccl.MasterNode("[::1]:0") as master, pccl.Communicator(master.address) as comm:
        assert comm.world_size == 1


@contextlib.contextmanager
def started(*command: str, stdin: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process that prints the address of its master at the end of its first line."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


COMMAND = ("-m", "pccl.master", "--listen-address", "127.0.0.1:0")
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
import pccl
from pccl.runtime.server.server import Server
m = pccl.MasterNode('127.0.0.1:0')
m.run()
print(m.address, flush=True)"""
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@contextlib.contextmanager
def hangup(handler: signal.Handlers) -> Iterator[None]:
    """Processes that start meanwhile treat SIGHUP so, also if these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize(
    "command",
    [COMMAND, ("-c", SCRIPT), ("-c", SCRIPT + "; m.wait()"), ("-c", SCRIPT + "; signal.pause()")],
    ids=["command", "at exit", "wait", "elsewhere"],
)
def test_a_stopped_master_notifies_its_peers(command: tuple[str, ...], name: str) -> None:
    if name == "SIGHUP" and command is not COMMAND:
        pytest.skip("a program's own affair")
    number = signal.Signals[name]
    with hangup(signal.SIG_DFL), started(*command) as (process, address):
        comm = pccl.Communicator(address)
        comm.connect()
        assert comm.world_size == 1
        process.send_signal(number)
        with pytest.raises(pccl.MasterLostError, match="the master was stopped"):
            while True:
                comm.update_topology(timeout=20)
        comm.close()
        killed = number == signal.SIGINT and command[-1].endswith("()")  # by KeyboardInterrupt
        assert process.wait(PATIENCE_S) == (-signal.SIGINT if killed else 0)


@posix
def test_a_master_under_nohup_outlives_its_terminal() -> None:
    with (
        hangup(signal.SIG_IGN),
        started(*COMMAND) as (process, address),
        pccl.Communicator(address) as comm,
    ):
        process.send_signal(signal.SIGHUP)
        for _ in range(100):
            comm.update_topology(timeout=20)
        assert process.poll() is None


# CPython handles a signal that comes just before the main thread falls asleep, or while it waits
# for the GIL before that, only when it wakes up. So another thread says when it is asleep: when it
# stands where it stood a moment ago, and has not run since.
LATE = """
import atexit, pathlib, re, sys, threading
main = threading.main_thread()
status = pathlib.Path(f"/proc/self/task/{main.native_id}/status")
def place():
    frame = sys._current_frames()[main.ident]
    runs = re.findall("ctxt_switches:.*", status.read_text()) if status.exists() else []
    return frame.f_code.co_name, frame.f_lasti, runs
def tell():
    before = None
    while (now := place()) != before or now[0] not in ("_shutdown", "wait"):
        before = now
        threading.Event().wait(0.02)
    print("ready", flush=True)
threading.Thread(target=tell, daemon=True).start()
def for_long():
    threading.Event().wait(60)
"""


@posix
@pytest.mark.parametrize(
    "where",
    ["threading.Thread(target=for_long).start()", "atexit.register(for_long)"],
    ids=["a thread", "at exit"],
)
def test_sigterm_ends_a_script_without_a_word_wherever_it_is(where: str) -> None:
    with started("-c", SCRIPT + LATE + where) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@posix
def test_sigterm_ends_a_script_without_a_word_while_it_shuts_down() -> None:
    at_once = "threading._register_atexit(signal.raise_signal, signal.SIGTERM)"
    with started("-c", SCRIPT + "\nimport threading; " + at_once) as (process, _):
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, "")


IGNORING = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@posix
def test_ctrl_c_ends_a_master_that_a_shell_has_started_in_the_background() -> None:
    as_command = 'from pccl.master import main; sys.exit(main(["--listen-address", "127.0.0.1:0"]))'
    with started("-c", IGNORING + as_command) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


@posix
def test_ctrl_c_ends_any_command_that_a_shell_has_started_in_the_background() -> None:
    program = """
import os, threading
from pccl import master
from pccl.cli.main import main
def run(args):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)
master.run = run
sys.exit(main(["master"]))
"""
    ended = subprocess.run([sys.executable, "-c", IGNORING + program], timeout=PATIENCE_S)
    assert ended.returncode == 130


@posix
def test_a_second_signal_ends_it_at_once() -> None:
    slow = """
import sys, threading
from pccl.master import main
from pccl.runtime.server.server import Server
Server.close = lambda self: print("closing", flush=True) or threading.Event().wait(60)
sys.exit(main(["--listen-address", "127.0.0.1:0"]))
"""
    with started("-c", slow) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_script_that_hosts_a_master_and_fails_ends() -> None:
    """And its peers are told so, by the master."""
    fails = "; import sys; sys.stdin.readline(); raise OSError('of the script')"
    with started("-c", SCRIPT + fails, stdin=subprocess.PIPE) as (process, address):
        with pccl.Communicator(address) as comm:
            assert process.stdin is not None
            process.stdin.close()
            with pytest.raises(pccl.MasterLostError, match="the master was stopped"):
                while True:
                    comm.update_topology(timeout=20)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        errors = process.stderr.read()
        assert errors.endswith("OSError: of the script\n") and errors.count("Traceback") == 1


BROKEN = """
import sys
from pccl.protocol.master import Master, inputs
feed = Master.feed
def fail(self, event):
    if self.peers and isinstance(event, inputs.Tick):
        raise RuntimeError("a bug")
    return feed(self, event)
Master.feed = fail
"""
AS_COMMAND = 'from pccl.master import main; sys.exit(main(["--listen-address", "127.0.0.1:0"]))'


@pytest.mark.parametrize("program", [AS_COMMAND, SCRIPT], ids=["command", "at exit"])
def test_a_master_that_fails_ends_with_a_status_and_a_sentence(program: str) -> None:
    with started("-c", BROKEN + program) as (process, address):
        while process.poll() is None:  # once a peer is there
            with contextlib.suppress(pccl.PCCLError):
                pccl.Communicator(address).connect(1, timeout=5)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert last.endswith(f"the master at {address} has failed: RuntimeError: a bug")


def test_a_master_that_fails_ends_with_a_status_when_the_streams_are_closed() -> None:
    """Its log, too, goes where the program writes; it serves nevertheless."""
    closing = "\nsys.stderr.close(); sys.stdout.close()"
    with started("-c", BROKEN + SCRIPT + closing) as (process, address):
        while process.poll() is None:
            with contextlib.suppress(pccl.PCCLError):
                pccl.Communicator(address).connect(1, timeout=5)
        assert process.wait(PATIENCE_S) == 1


def fail(*_: object) -> list[object]:
    raise RuntimeError("a bug")


def test_the_failure_of_a_master_is_raised_in_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Master, "feed", fail)
    with pytest.raises(pccl.PCCLError, match="has failed: RuntimeError: a bug"):
        with pccl.MasterNode("127.0.0.1:0") as master:
            with pytest.raises(pccl.PCCLError, match="RuntimeError: a bug"):
                master.wait()
    monkeypatch.undo()
    master.run()
    master.interrupt()


def test_a_master_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    master = pccl.MasterNode("127.0.0.1:0")
    start, handler = threading.Thread.start, signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(
            threading.Thread, "start", lambda t: fail() if t.name == "pccl-master" else start(t)
        )
        with pytest.raises(pccl.PCCLError, match="INTERNAL_ERROR: no thread could be started"):
            master.run()
    assert signal.getsignal(signal.SIGTERM) == handler
    address = master.address
    with pccl.MasterNode(address) as again:  # its port is free
        assert again.address == address


@pytest.mark.parametrize("where", ["pccl.runtime.sockets.socket.socketpair", "os.dup", "os.open"])
def test_a_master_without_descriptors(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    master = pccl.MasterNode("127.0.0.1:0")
    monkeypatch.setattr(
        "pccl.master_node.require_resources", lambda: None
    )  # there were some just now
    with monkeypatch.context() as patched:
        patched.setattr(where, none)
        with pytest.raises(pccl.PCCLError, match="Too many open files") as raised:
            master.run()
    assert "another port" not in str(raised.value)
    master.run()
    master.interrupt()


def test_a_master_without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them in turn; what was opened before is closed, or the port would be taken."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    master = pccl.MasterNode(f"127.0.0.1:{port}")
    make = zmq.Context.socket
    for nth in range(2):
        made = iter(range(100))

        def fails(
            context: zmq.Context[zmq.Socket[bytes]], *arguments: int, nth: int = nth
        ) -> zmq.Socket[bytes]:
            if next(made) == nth:  # noqa: B023
                raise zmq.ZMQError(errno.EMFILE)
            return make(context, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(zmq.Context, "socket", fails)
            with pytest.raises(pccl.PCCLError, match="ZeroMQ cannot make its sockets"):
                master.run()
    master.run()
    master.interrupt()


FORK = """
import os, signal, sys, threading, time
child = os.fork()
if child == 0:
    m.interrupt(); m.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
with pccl.Communicator(m.address) as comm:
    print(comm.world_size, flush=True)
    before = time.process_time()
    try:
        comm.wait_for_peers(2, timeout=0.3)
    except pccl.PCCLTimeoutError:
        print(time.process_time() - before, flush=True)
m.interrupt()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_its_parents_master_alone() -> None:
    with started("-c", SCRIPT + FORK) as (process, _):
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        world, used_s = out.split()
        assert int(world) == 1
        assert float(used_s) < 0.2, "it spins"


def test_garbage_ends_only_its_connection() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        host, port = master.address.split(":")
        with socket.create_connection((host, int(port))) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"tcp://{master.address}")
        for frames in ([b"\xff" * 100], [b""], [b"a", b"b", b"c"], [b"\x94\x04\x07\x03\x94"]):
            stranger.send_multipart(frames)
        comm.update_topology()
        assert comm.are_peers_pending() is False
        stranger.close(linger=0)
        context.term()


def test_another_protocol_version_is_refused_in_words() -> None:
    from pccl.protocol import messages as m

    with pccl.MasterNode("127.0.0.1:0") as master:
        context = zmq.Context()
        old = context.socket(zmq.DEALER)
        old.connect(f"tcp://{master.address}")
        old.send(m.encode(m.Hello(m.PROTOCOL_VERSION + 1, "9.9", 0, "", 1, "", "x", b"")))
        assert old.poll(10_000)
        answer = m.decode_from_master(old.recv())
        assert isinstance(answer, m.Refused)
        assert "protocol version" in answer.why
        old.close(linger=0)
        context.term()
