"""Publishers and subscribers of weights, over real sockets in one process."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq
from pages import listed
from peers.processes import Master, stop
from peers.strangers import speaker, welcome
from peers.waiting import PATIENCE_S, wait_until

import pccl
from pccl import weights
from pccl.cli.main import main
from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Answer
from pccl.runtime import limits
from pccl.runtime.client.engine import Engine
from pccl.runtime.client.sync import Staging
from pccl.weights.client import Blob, BlobStore, Options, WeightsClient, client
from pccl.weights.publisher import DELTAS_MAX
from pccl.weights.tensors import Tensors, blob_of, found_digests

Parameters = dict[str, np.ndarray]


def parameters(scale: float = 1.0) -> Parameters:
    """Two tensors, one of them of several leaves."""
    draw = np.random.default_rng(7)
    small = np.full(3, scale)
    return {"large": (draw.random(1 << 20) * scale).astype(np.float32), "small": small}


def blank() -> Parameters:
    return {name: np.zeros_like(array) for name, array in parameters().items()}


def train(own: Parameters) -> None:
    """Changes a few elements."""
    own["large"][::100] += np.float32(0.25)
    own["small"] += 1


def same(one: Parameters, other: Parameters) -> bool:
    return all((one[name] == other[name]).all() for name in one)


@pytest.fixture
def address(master: pccl.MasterNode) -> str:
    return master.address


@pytest.fixture
def made() -> Iterator[list[weights.Publisher | weights.Subscriber]]:
    found: list[weights.Publisher | weights.Subscriber] = []
    yield found
    for one in found:
        one.close()


Publish = Callable[[Parameters], weights.Publisher]
Follow = Callable[..., weights.Subscriber]


@pytest.fixture
def publisher(made: list, address: str) -> Publish:
    def make(own: Parameters) -> weights.Publisher:
        made.append(weights.Publisher(address, own))
        return made[-1]

    return make


@pytest.fixture
def follow(made: list, address: str) -> Follow:
    def make(own: Parameters, relay: bool = True) -> weights.Subscriber:
        made.append(weights.Subscriber(address, own, relay=relay))
        return made[-1]

    return make


@contextlib.contextmanager
def fails(kind: type[pccl.PCCLError], words: str) -> Iterator[None]:
    """With such an error, which the page of errors lists."""
    with pytest.raises(kind, match=words) as raised:
        yield
    assert type(raised.value) is kind
    listed(f"{kind.__name__}: {raised.value}")


@contextlib.contextmanager
def foreign(address: str, store: BlobStore, *, follows: bool) -> Iterator[WeightsClient]:
    """A client with a store of the test, which relays what the store has taken."""
    options = Options(address, None, None, None, None)
    one = client(options, store, "A test", follows=follows, relays=follows)
    try:
        yield one
    finally:
        one.close("the test is over")


def followers_have(master: pccl.MasterNode, version: int) -> None:
    """Waits until the master knows that all subscribers serve this version."""
    wait_until(lambda: [*master.status().weights.followers] == [version])  # type: ignore[union-attr]


def swapped(subscriber: weights.Subscriber, version: int) -> None:
    """Waits for a version, and takes it."""
    assert subscriber.wait(version - 1, timeout=PATIENCE_S) == version
    assert subscriber.swap() == version


def test_subscribers_follow_bit_by_bit_and_change_at_their_own_word(
    publisher: Publish, follow: Follow
) -> None:
    source, copies = parameters(), [blank() for _ in range(3)]
    trainer = publisher(source)
    followers = [follow(own) for own in copies[:2]]
    first = trainer.publish()
    assert first.version == 1 and first.delta_bytes is None and first.whole_bytes is not None
    for follower, own in zip(followers, copies, strict=False):
        follower.wait(timeout=PATIENCE_S)
        assert same(own, blank()) and (follower.version, follower.staged) == (0, 1)
        assert follower.swap() == 1 and same(own, source)
        assert follower.swap() == 1
    train(source)
    second = trainer.publish(version=100)
    assert second.version == trainer.version == 100 and second.whole_bytes is None
    assert second.delta_bytes is not None and second.delta_bytes < first.whole_bytes / 20
    for follower, own in zip(followers, copies, strict=False):
        swapped(follower, 100)
        assert same(own, source) and follower.latest == 100
    late = follow(copies[2], relay=False)
    swapped(late, 100)
    assert same(copies[2], source)


def test_later_versions_open_no_streams(
    publisher: Publish, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_stream = Engine.open_stream

    def spy(its: Engine, number: int) -> None:
        opened.append(number)
        open_stream(its, number)

    monkeypatch.setattr(Engine, "open_stream", spy)
    source, own = parameters(), blank()
    trainer, follower = publisher(source), follow(own)
    for version in range(1, 5):
        trainer.publish()
        swapped(follower, version)
        assert same(own, source) and len(opened) == 2  # one in each direction
        train(source)


def test_a_run_of_peers_does_not_notice(address: str, publisher: Publish, follow: Follow) -> None:
    source = parameters()
    trainer = publisher(source)
    trainer.publish()
    with pccl.Communicator(address) as peer:
        follower = follow(blank())
        swapped(follower, 1)
        assert not peer.are_peers_pending()


def test_after_many_differences_there_is_a_whole_version_which_relays_make_themselves(
    master: pccl.MasterNode, publisher: Publish, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.weights.publisher.DELTAS_MAX", 2)
    assert DELTAS_MAX == 64
    source, own = parameters(), blank()
    trainer, relay = publisher(source), follow(own)
    found = []
    for version in range(1, 6):
        found.append(trainer.publish().whole_bytes is not None)
        swapped(relay, version)
        train(source)
    assert found == [True, False, True, False, True]
    followers_have(master, 5)
    trainer.close()
    late_own = blank()
    late = follow(late_own)
    swapped(late, 5)
    assert same(own, late_own)


def test_another_publisher_continues_after_the_first_has_gone(
    publisher: Publish, follow: Follow
) -> None:
    source, own, late_own = parameters(), blank(), blank()
    trainer = publisher(source)
    relay = follow(own)
    trainer.publish()
    swapped(relay, 1)
    trainer.close()
    with fails(pccl.PCCLTimeoutError, "no newer one has come"):
        relay.wait(timeout=0.01)
    late = follow(late_own)
    swapped(late, 1)
    train(source)
    second = publisher(source)
    assert second.publish().version == 2
    for follower in (relay, late):
        swapped(follower, 2)
    assert same(own, source) and same(late_own, source)


def test_the_later_of_two_publishers_gets_an_error_and_can_continue(
    publisher: Publish, follow: Follow
) -> None:
    source, own = parameters(), blank()
    one, other = publisher(source), publisher(parameters(2.0))
    follower = follow(own)
    one.publish(5)
    with fails(pccl.PCCLError, "version 5 is not newer than version 5"):
        other.publish(5)
    assert other.publish().version == 6
    train(source)
    with fails(pccl.PCCLError, "another process has published version 6"):
        one.publish()
    assert one.publish().version == 7
    swapped(follower, 7)
    assert same(own, source)
    for absurd in (0, 2**61):  # after which nobody could go on
        with pytest.raises(ValueError, match=f"version is {absurd}"):
            one.publish(absurd)


class Liar(BlobStore):
    """Relays packages whose bytes it has changed."""

    def fits(self, package: m.Package) -> bool:
        return True

    def work_in(self, blob: Blob) -> tuple[int, Blob | None]:
        blob.body[5 << 19] ^= 1
        return blob.package.version, None


def test_a_holder_of_wrong_data_is_not_believed(
    master: pccl.MasterNode, publisher: Publish, follow: Follow
) -> None:
    source, own = parameters(), blank()
    trainer = publisher(source)
    with foreign(master.address, Liar(), follows=True):
        trainer.publish()
        followers_have(master, 1)
        trainer.close()
        victim = follow(own)
        with fails(pccl.PCCLTimeoutError, r"\(1 was published\)"):
            victim.wait(timeout=0.5)
        assert victim.staged == 0 and same(own, blank())
        honest = publisher(source)
        honest.publish()
        swapped(victim, 2)
        assert same(own, source)


class Doubter(BlobStore):
    """Cannot apply a difference, as if its memory had been changed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.taken: list[tuple[int, int]] = []
        self._then = then

    def fits(self, package: m.Package) -> bool:
        return True

    def work_in(self, blob: Blob) -> tuple[int, Blob | None]:
        self.taken.append(blob.package.key)
        if blob.package.base:
            self._then()
            return 0, None
        return blob.package.version, None


def test_a_client_that_starts_over_takes_what_only_it_still_has(
    master: pccl.MasterNode, publisher: Publish
) -> None:
    source = parameters()
    trainer = publisher(source)
    trainer.publish()
    doubter = Doubter(trainer.close)
    with foreign(master.address, doubter, follows=True):
        followers_have(master, 1)
        train(source)
        trainer.publish()
        wait_until(lambda: doubter.taken == [(1, 0), (2, 1), (1, 0)])
        followers_have(master, 1)


def test_a_timeout_names_unreachable_holders(
    publisher: Publish,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(limits, "QUIET_S", 0.1)
    monkeypatch.setenv("PCCL_OUTGOING_ONLY", "1")
    monkeypatch.setenv("PCCL_TRANSPORT", "tcp")
    source = publisher(parameters())
    source.publish()
    with fails(pccl.PCCLTimeoutError, r"no newer one has come \(1 was published\) within 1 s"):
        follow(blank()).wait(timeout=1.0)
    (said, *_) = [text for text in caplog.messages if "waiting for" in text]
    assert "(1 was published)" in said and "PCCL_RELAY=1" in said


def test_a_difference_from_another_base_is_found_out_and_replaced(
    address: str, publisher: Publish, follow: Follow
) -> None:
    source, own = parameters(), blank()
    trainer, follower = publisher(source), follow(own)
    trainer.publish()
    swapped(follower, 1)
    train(source)
    tensors = Tensors(source, writable=False)
    new, owner = tensors.read()
    base, whole = tensors.stretch(), tensors.stretch()
    for memory in (base, whole):
        for part, content in zip(tensors.within(memory), new, strict=True):
            part[:] = content
    base[64] ^= 1
    pieces, sizes = tensors.differences(base, new)
    found = found_digests(new)
    blobs = (
        blob_of(tensors.head(2, 1, found, sizes), np.frombuffer(b"".join(pieces), np.uint8)),
        blob_of(tensors.head(2, 0, found, tensors.sizes), whole),
    )
    del new, owner
    with foreign(address, BlobStore(), follows=False) as other:
        call = other.call()
        other.publish(call, blobs)
        assert call.next(PATIENCE_S) == Answer(call.number, None)
        swapped(follower, 2)
    assert same(own, source)


def test_parameters_that_do_not_fit_end_their_subscriber_and_no_other(
    publisher: Publish, follow: Follow
) -> None:
    source, own = parameters(), blank()
    trainer, follower = publisher(source), follow(own)
    other = {"large": np.zeros(1 << 20, np.int32), "small": np.zeros(3)}
    stranger = follow(other)
    shorter = follow({"large": np.zeros(5, np.float32)})
    trainer.publish()
    swapped(follower, 1)
    with fails(pccl.PCCLError, "'large' has 1048576 elements of float32 where"):
        stranger.wait(timeout=PATIENCE_S)
    with fails(pccl.PCCLError, r"4194368 bytes .* 64 are here"):
        shorter.wait(timeout=PATIENCE_S)
    train(source)
    trainer.publish()
    swapped(follower, 2)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this platform")
def test_a_number_that_is_published_again_takes_nothing_away() -> None:
    """After a call that timed out, though its version arrives."""
    source, own = parameters(), blank()
    master = Master()
    try:
        with weights.Publisher(master.address, source) as trainer:
            stop(master.process)
            with pytest.raises(pccl.PCCLTimeoutError):
                trainer.publish(3, timeout=0.01)
            with pytest.raises(pccl.PCCLError, match="version 3 is under way"):
                trainer.publish(3, timeout=30)  # at once, on a busy machine too
            master.process.send_signal(signal.SIGCONT)
            with weights.Subscriber(master.address, own) as follower:
                swapped(follower, 3)
                assert same(own, source)
                with pytest.raises(pccl.PCCLError, match="version 3 is not newer"):
                    trainer.publish(3)
                assert trainer.publish().version == 4
                swapped(follower, 4)
    finally:
        master.kill()


def test_a_fetch_that_is_given_up_keeps_no_memory(
    master: pccl.MasterNode,
    publisher: Publish,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its only holder, which has never sent a byte, is gone, and there is another version."""
    caplog.set_level("INFO", "pccl")
    monkeypatch.setattr(limits, "WEIGHTS_REST_S", 0.05)
    package = m.Package(1, 0, bytes(16), 100, bytes(16), (4 << 20) + 64, bytes(16))
    source, own = parameters(), blank()
    others = stagings()  # of other tests, until they are collected
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with speaker(zmq.DEALER, int(master.address.rpartition(":")[2])) as holder:
            hello = m.Hello(m.PROTOCOL_VERSION, "1", 0, "127.0.0.1", port, "", "", b"", client=True)
            holder.send(m.encode(hello))
            assert isinstance(welcome(holder), m.Welcome)
            holder.send(m.encode(m.Publish(1, (package,))))
            follower = follow(own)
            wait_until(lambda: stagings(others))
            (memory,) = map(weakref.ref, stagings(others))
    wait_until(lambda: "a fetch continues elsewhere" in caplog.text)
    publisher(source).publish(2)
    swapped(follower, 2)
    wait_until(lambda: memory() is None)
    assert same(own, source)


def stagings(others: Sequence[Staging] = ()) -> list[Staging]:
    """The memory of all fetches in this process but `others`."""
    found = [one for one in gc.get_objects() if type(one) is Staging]
    return [one for one in found if not any(one is other for other in others)]


def test_subscribers_need_a_key_of_the_run_and_may_not_connect_after_their_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: dict[Engine, set[str]] = {}
    were_allowed: set[str] = set()
    expect, admit = Engine.expect, Engine.admit

    def note_expected(its: Engine, peer: int, nonce: int, keys: Iterable[str]) -> None:
        allowed[its] = set()
        expect(its, peer, nonce, keys)

    def note_admitted(its: Engine, key: str) -> None:
        allowed[its].add(key)
        were_allowed.add(key)
        admit(its, key)

    monkeypatch.setattr(Engine, "expect", note_expected)
    monkeypatch.setattr(Engine, "admit", note_admitted)
    for name in ("keys", "foreign"):
        assert main(["keys", str(tmp_path / name)]) == 0
    own_key = (tmp_path / "keys" / "master.key").read_bytes()
    (tmp_path / "foreign" / "master.key").write_bytes(own_key)
    keys, foreign = tmp_path / "keys", tmp_path / "foreign"
    source, copies = parameters(), [blank(), blank()]
    with pccl.MasterNode("127.0.0.1:0", security=keys) as master:
        with fails(pccl.KickedError, "`allowed` does not have"):
            weights.Subscriber(master.address, blank(), security=foreign)
        trainer = weights.Publisher(master.address, source, security=keys)
        followers = [weights.Subscriber(master.address, own, security=keys) for own in copies]
        trainer.publish()
        for follower, own in zip(followers, copies, strict=True):
            swapped(follower, 1)
            assert same(own, source)
        wait_until(lambda: not any(allowed.values()))
        assert were_allowed and len(allowed) == 3
        for one in (*followers, trainer):
            one.close()


def test_no_master_is_an_error() -> None:
    with fails(pccl.MasterLostError, r"no pccl master answers at 127.0.0.1:1 "):
        weights.Subscriber("127.0.0.1:1", blank(), connect_timeout=0.1)
    with pytest.raises(ValueError, match="connect_timeout is 0"):
        weights.Subscriber("127.0.0.1:1", blank(), connect_timeout=0)


def test_no_descriptors_is_an_error_without_leaks(
    address: str, publisher: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_context() -> zmq.Context[zmq.Socket[bytes]]:
        raise zmq.ZMQError(errno.EMFILE)

    before = set(threading.enumerate())
    monkeypatch.setattr(zmq, "Context", no_context)
    with fails(pccl.PCCLError, "cannot begin: Too many open files: raise"):
        publisher(parameters())
    assert set(threading.enumerate()) <= before, "the engine's thread"


def test_another_version_of_pccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    master = Master()
    monkeypatch.setattr(m, "PROTOCOL_VERSION", m.PROTOCOL_VERSION + 1)
    try:
        with fails(pccl.KickedError, r"the master refused this: .* speaks protocol"):
            weights.Subscriber(master.address, blank())
    finally:
        master.kill()


def test_staged_weights_survive_the_end_of_the_master() -> None:
    source, own = parameters(), blank()
    with pccl.MasterNode("127.0.0.1:0") as master:
        trainer = weights.Publisher(master.address, source)
        follower = weights.Subscriber(master.address, own)
        trainer.publish()
        follower.wait(timeout=PATIENCE_S)
    with fails(pccl.MasterLostError, "the master was stopped"):
        follower.wait(1, timeout=PATIENCE_S)
    assert follower.swap() == 1 and same(own, source)
    with fails(pccl.MasterLostError, "the master was stopped"):
        trainer.publish()
    follower.close()
    trainer.close()


def test_a_closed_client_raises(publisher: Publish, follow: Follow) -> None:
    trainer, follower = publisher(parameters()), follow(blank())
    for one in (trainer, follower):
        one.close()
        one.close()
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(one)
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.copy(one)
    with fails(pccl.PCCLError, "the publisher was closed"):
        trainer.publish()
    with fails(pccl.PCCLError, "the subscriber was closed"):
        follower.wait()
