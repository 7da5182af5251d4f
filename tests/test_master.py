"""MasterNode and `python -m pccl.master`."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
import zmq

import pccl


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


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("localhost", AssertionError),
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


def started(*command: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM on Windows")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "pccl.master", "--listen-address", "127.0.0.1:0"),
        (
            "-c",
            "import pccl; m = pccl.MasterNode('127.0.0.1:0'); m.run(); print(m.address, flush=1)",
        ),
    ],
)
def test_a_master_lives_until_it_is_told_to_end(command: tuple[str, ...], number: int) -> None:
    process, address = started(*command)
    try:
        with pccl.Communicator(address) as comm:
            assert comm.world_size == 1
        process.send_signal(number)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_garbage_drops_that_connection_and_nobody_else() -> None:
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
