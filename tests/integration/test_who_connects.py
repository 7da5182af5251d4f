"""Which connections a peer's engine accepts, and which peer a stream has reached."""

from __future__ import annotations

import contextlib
import gc
import random
import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from peers.cluster import Cluster, client_of, in_threads
from peers.engines import AllReduce, Peer
from peers.waiting import wait_until
from zmq.utils.monitor import parse_monitor_message

import pccl
from pccl.cli.main import main
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.engine import ANOTHER, COMPLETE, STREAM_LOST, Engine, EngineOptions
from pccl.runtime.encryption import new_keys, secure_client
from pccl.security import KeyPair

TOKEN = b"the master's"
COUNT = 1 << 14
PAIR = KeyPair(*(each.decode() for each in zmq.curve_keypair()))  # of the first engine
NEXT = KeyPair(*(each.decode() for each in zmq.curve_keypair()))
KEYS = [PAIR.public, NEXT.public]
Use = Callable[["zmq.Socket[bytes]"], None]


def options(pair: KeyPair | None) -> EngineOptions:
    if pair is None:
        return EngineOptions(heartbeat_ms=0, dialler=TOKEN)
    public, secret = pair.public.encode(), pair.secret.encode()
    return EngineOptions(heartbeat_ms=0, curve_public=public, curve_secret=secret)


@pytest.fixture(params=["keys", "no keys"])
def ring(backend: str, request: pytest.FixtureRequest) -> Iterator[list[Peer]]:
    """Peers 1 and 2, each other's only neighbors; neither expects the other yet."""
    pairs = [PAIR, NEXT] if request.param == "keys" else [None, None]
    peers = [Peer(options(pair)) for pair in pairs]
    for number, peer in enumerate(peers, 1):
        other = number % 2
        key = KEYS[other] if request.param == "keys" else ""
        to = peers[other].endpoint("tcp")
        called = {"peer": other + 1, "nonce": 77, "curve_server": key}
        peer.engine.open_stream(1)
        peer.engine.connect_stream(1, to, lanes=2, hwm=4, **called)  # type: ignore[arg-type]
    yield peers
    for peer in peers:
        peer.engine.close()


@pytest.mark.parametrize("later", [False, True])
def test_neighbors_wait_until_they_are_known(ring: list[Peer], later: bool) -> None:
    job = AllReduce(ring, 1, 10_000)
    for who in range(2):
        job.start(who)
    assert not ring[0].engine.socket.poll(200)
    for number, peer in enumerate(ring, 1):
        peer.engine.expect(number, 5, [])
        peer.engine.expect(number, 77, KEYS)
        if later:  # who is a bit behind is let in all the same
            peer.engine.expect(number, 78, KEYS)
    for peer in ring:
        peer.wait(COMPLETE, 1)
    assert all((recv == job.expected).all() for recv in job.recv)


def test_a_stream_to_the_wrong_peer_is_lost_at_once(backend: str) -> None:
    peers = [Peer(options(None)) for _ in range(2)]
    for transport, stream in (("tcp", 1), ("ipc", 2)):
        to = peers[1].endpoint(transport)
        peers[0].engine.open_stream(stream)
        peers[0].engine.connect_stream(stream, to, lanes=1, hwm=4, peer=3, nonce=77)
        peers[1].engine.expect(2, 77, [])
        lost = peers[0].wait(STREAM_LOST, stream)
        assert lost.status == ANOTHER
        assert f"another process answers at {to}, not peer 3" in lost.text
    for peer in peers:
        peer.engine.close()


def test_a_stream_to_another_key_is_lost_at_once(backend: str) -> None:
    peers = [Peer(options(pair)) for pair in (PAIR, NEXT)]
    to = peers[1].endpoint("tcp")
    peers[0].engine.open_stream(1)
    peers[0].engine.connect_stream(1, to, lanes=1, hwm=4, peer=3, curve_server=PAIR.public)
    lost = peers[0].wait(STREAM_LOST, 1)
    assert lost.status == ANOTHER
    assert f"another process answers at {to}, not peer 3" in lost.text
    for peer in peers:
        peer.engine.close()


def test_an_engine_for_everybody(backend: str) -> None:
    """A control: the strangers below fail for want of a name, and not for another reason."""
    peer = Peer(EngineOptions())
    stranger = Stranger(peer.endpoint("tcp"), lambda push: None)
    assert stranger.is_in()
    stranger.close()
    peer.engine.close()


# ---- strangers ----


class Stranger:
    """A PUSH at an engine's port, and what became of its handshake."""

    def __init__(self, endpoint: str, use: Use) -> None:
        self.context = zmq.Context()
        self.push = self.context.socket(zmq.PUSH)
        self.push.set(zmq.LINGER, 0)
        self.push.set(zmq.RECONNECT_IVL, -1)
        use(self.push)
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor = self.push.get_monitor_socket(wanted)
        self.push.connect(endpoint)
        with contextlib.suppress(zmq.Again):  # it was refused already
            self.push.send(b"x" * 64, zmq.DONTWAIT)

    def is_in(self, timeout_s: float = 10.0) -> bool:
        assert self.monitor.poll(int(timeout_s * 1000)), "nothing became of its handshake"
        event = parse_monitor_message(self.monitor.recv_multipart())
        return bool(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def waits(self) -> bool:
        return not self.monitor.poll(0)

    def close(self) -> None:
        self.push.disable_monitor()
        self.monitor.close(0)
        self.push.close()
        self.context.term()


def plain(name: str, password: str) -> Use:
    def use(push: zmq.Socket[bytes]) -> None:
        push.set_string(zmq.PLAIN_USERNAME, name)
        push.set_string(zmq.PLAIN_PASSWORD, password)

    return use


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A run's directory: the master's, with the key that its peers share."""
    assert main(["keys", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


@pytest.fixture(params=["tcp", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def target(comm: pccl.Communicator, transport: str) -> str:
    hello = client_of(comm).hello
    return f"tcp://127.0.0.1:{hello.port}" if transport == "tcp" else f"ipc://{hello.ipc}"


def dropped(comm: pccl.Communicator) -> int:
    """How many messages its engine has dropped."""
    port = client_of(comm).hello.port
    engines = [one for one in gc.get_objects() if type(one) is Engine and one.port == port]
    return engines[0].dropped


def reduce(run: Cluster, count: int = 100_000) -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        x = np.full(count, 2.0**index, np.float32)
        comm.all_reduce(x, x, op=pccl.ReduceOp.SUM)
        assert (x == 2.0 ** len(run.comms) - 1).all()

    run.each(job)


def test_strangers_get_nothing_in(backend: str, transport: str) -> None:
    with Cluster(2) as run:
        endpoint = target(run.comms[0], transport)
        outside = [
            Stranger(endpoint, lambda push: None),
            Stranger(endpoint, lambda push: secure_client(push, new_keys(), PAIR.public)),
            Stranger(endpoint, plain("2", "0" * 16)),
            Stranger(endpoint, plain("dial", secrets.token_hex(16))),
            Stranger(endpoint, plain("1" * 255, "x" * 255)),
        ]
        assert not any(stranger.is_in() for stranger in outside)
        guessing = [Stranger(endpoint, plain("1", "0" * 16)) for _ in range(80)]
        reduce(run)
        run.join()  # a new epoch, and room for those who can prove themselves
        reduce(run)
        assert all(stranger.waits for stranger in guessing)
        assert not any(map(dropped, run.comms))
        for stranger in outside + guessing:
            stranger.close()


def test_an_empty_password_admits_no_one() -> None:
    """The place of a password that there is not yet must not count as one that is empty."""
    with Cluster(1) as run:
        stranger = Stranger(target(run.comms[0], "tcp"), plain("1", "\0"))
        with pytest.raises(AssertionError, match="nothing became of its handshake"):
            stranger.is_in(timeout_s=1.0)
        stranger.close()


def test_strangers_get_nothing_in_where_there_are_keys(
    backend: str, keys: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_CURVE_DIR", str(keys))
    with Cluster(2) as run:
        endpoint, insider = target(run.comms[0], transport), pccl.Security.from_dir(keys)
        server = client_of(run.comms[0]).knowledge.plan.peers[0].curve
        outside = [
            Stranger(endpoint, lambda push: None),
            Stranger(endpoint, plain("1", "0" * 16)),
            Stranger(endpoint, lambda push: secure_client(push, new_keys(), new_keys().public)),
        ]
        assert not any(stranger.is_in() for stranger in outside)
        unknown = [
            Stranger(endpoint, lambda push: secure_client(push, new_keys(), server)),
            Stranger(endpoint, lambda push: secure_client(push, insider.peer_keys(), server)),
        ]
        reduce(run)
        assert all(stranger.waits for stranger in unknown)
        assert not any(map(dropped, run.comms))
        for stranger in outside + unknown:
            stranger.close()


# ---- forged chunks ----


def forged(run: int, seq: int, step: int, draw: random.Random) -> list[bytes]:
    """The chunk for peer 1 of 2 at that step in an all-reduce of COUNT elements of FLOAT."""
    half, segment, nonce = COUNT // 2, 1 - step, draw.getrandbits(64)
    numbers = (
        0x4C434350,
        1,
        0,
        2,
        run,
        seq,
        0,
        nonce,
        segment,
        step,
        2,
        0,
        segment * half,
        half,
        0,
    )
    return [struct.pack("<IBBHQQQQHHHHQII", *numbers), draw.randbytes(4 * half)]


def test_a_former_member_cannot_forge_chunks() -> None:
    """To know the run, the epoch and the sequence number does not suffice. (That it would without
    the nonce of the call is shown in c/test/test_faults.c.)"""
    with Cluster(2) as cluster, zmq.Context() as context, context.socket(zmq.PUSH) as push:
        client = client_of(cluster.comms[0])
        draw = random.Random(1)
        push.linger = 0
        push.plain_username = str(client.knowledge.number).encode()
        push.plain_password = f"{client.knowledge.plan.nonce:016x}".encode()
        push.connect(f"tcp://127.0.0.1:{client.hello.port}")

        def job(index: int, comm: pccl.Communicator) -> int:
            succeeded = 0
            for step in range(50):
                x = np.full(COUNT, float(index + step), np.float32)
                seq, forges = client.knowledge.last_seq + 1, index == 0 and step % 2 == 1
                if forges:
                    push.send_multipart(forged(client.knowledge.run, seq, 0, draw))
                handle = comm.all_reduce_async(x, x, op=pccl.ReduceOp.SUM)
                if forges:
                    wait_until(lambda: client.knowledge.last_seq >= seq)  # noqa: B023
                    push.send_multipart(forged(client.knowledge.run, seq, 1, draw))
                if handle.wait()[0]:
                    assert (x == 2 * step + 1).all()
                    succeeded += 1
            return succeeded

        assert cluster.each(job)[0] >= 25  # nothing is forged in every second one
        assert dropped(cluster.comms[0]) > 0


# ---- another peer's address ----


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_forwarding_that_leads_to_another_peer(
    encrypted: bool, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B says that it is reached where C is: B has to go, with the reason, and C does not."""
    if encrypted:
        monkeypatch.setenv("PCCL_CURVE_DIR", str(keys))
    with Cluster(2) as run:
        port = client_of(run.comms[1]).hello.port

        join = PeerClient.join

        def misled(client: PeerClient, call: Call) -> None:
            name = {"host": "localhost", "others": ()}  # which is not dialled
            changed = {**name, "port": port, "ipc": ""}
            client.hello = msgspec.structs.replace(client.hello, **changed)
            join(client, call)

        with monkeypatch.context() as patched:
            patched.setattr(PeerClient, "join", misled)
            last = run.join()

        def job(comm: pccl.Communicator) -> str:
            x = np.full(100_000, 1.0, np.float32)
            try:
                while True:
                    with contextlib.suppress(pccl.PeerLostError):
                        if comm.all_reduce(x, x).world_size == 2:
                            return ""
            except pccl.KickedError as error:
                return str(error)

        said = in_threads([lambda c=c: job(c) for c in run.comms])  # type: ignore[misc]
        assert said[:2] == ["", ""]
        assert f", localhost:{port})" in said[2] and "could not reach peer 3 (you, " in said[2]
        assert f"another process answers at tcp://127.0.0.1:{port}, not peer 3" in said[2]
        run.comms.remove(last)
        last.close()
        reduce(run)
