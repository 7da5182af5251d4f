"""Publishers and subscribers of weights, over real sockets in one process."""

from __future__ import annotations

import contextlib
import copy
import errno
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from pages import listed
from peers.waiting import wait_until

import pccl
from pccl import weights
from pccl.cli.main import main
from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client import control
from pccl.runtime.client.engine import Engine
from pccl.weights.publisher import DELTAS_MAX

Parameters = dict[str, np.ndarray]
PATIENCE_S = 20.0


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
    publisher: Publish, follow: Follow, monkeypatch: pytest.MonkeyPatch
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
    wait_until(lambda: (5, 0) in relay._client._blobs)
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


def test_a_holder_of_wrong_data_is_not_believed(publisher: Publish, follow: Follow) -> None:
    source, own = parameters(), blank()
    trainer, liar = publisher(source), follow(blank())
    trainer.publish()
    swapped(liar, 1)
    wait_until(lambda: (1, 0) in liar._client._blobs)
    liar._client._blobs[1, 0].body[5 << 19] ^= 1
    trainer.close()
    victim = follow(own)
    with fails(pccl.PCCLTimeoutError, r"\(1 was published\)"):
        victim.wait(timeout=0.5)
    assert victim.staged == 0 and same(own, blank())
    honest = publisher(source)
    honest.publish()
    swapped(victim, 2)
    assert same(own, source)


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


def test_a_base_that_has_changed_is_found_out_and_replaced(
    publisher: Publish, follow: Follow
) -> None:
    source, own = parameters(), blank()
    trainer, follower = publisher(source), follow(own)
    trainer.publish()
    swapped(follower, 1)
    follower._stage._memory[64] ^= 1
    train(source)
    trainer.publish()
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


def test_a_number_that_is_published_again_takes_nothing_away(
    address: str, publisher: Publish, follow: Follow
) -> None:
    """After a call that timed out, though its version arrives."""
    source, own = parameters(), blank()
    trainer = publisher(source)
    goes_on = threading.Event()
    trainer._client._inbox.post(lambda: goes_on.wait(PATIENCE_S))
    with pytest.raises(pccl.PCCLTimeoutError):
        trainer.publish(3, timeout=0)
    goes_on.set()
    with pytest.raises(pccl.PCCLError, match=r"version 3 is (under way|not newer)"):
        trainer.publish(3)
    follower = follow(own)
    swapped(follower, 3)
    assert same(own, source)
    assert trainer.publish().version == 4
    swapped(follower, 4)


def test_a_fetch_that_is_given_up_keeps_no_memory(
    publisher: Publish, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, follower = publisher(parameters()), follow(blank())
    client = follower._client
    monkeypatch.setattr(client, "verified", lambda *_: None)  # so that it never ends
    trainer.publish()
    wait_until(lambda: bool(client._incoming))

    def give_up() -> None:
        machine = client._machine
        assert machine._fetch is not None
        machine._follows = False
        machine._drop(machine._fetch)
        client._perform(machine._take())

    client._inbox.post(give_up)
    wait_until(lambda: not (client._incoming or client._memory))


def test_subscribers_need_a_key_of_the_run(tmp_path: Path) -> None:
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
        wait_until(lambda: not any(one._client._keys for one in (trainer, *followers)))
        for one in (*followers, trainer):
            one.close()


def test_a_subscriber_may_not_connect_after_its_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[tuple[str, ...]] = []
    expect = Engine.expect

    def spy(its: Engine, peer: int, nonce: int, keys: Iterable[str]) -> None:
        admitted.append(tuple(keys))
        expect(its, peer, nonce, admitted[-1])

    assert main(["keys", str(tmp_path)]) == 0
    with pccl.MasterNode("127.0.0.1:0", security=tmp_path) as master:
        trainer = weights.Publisher(master.address, parameters(), security=tmp_path)
        trainer.publish()
        monkeypatch.setattr(trainer._client._engine, "expect", spy.__get__(trainer._client._engine))
        for _ in range(2):
            with weights.Subscriber(master.address, blank(), security=tmp_path) as follower:
                swapped(follower, 1)
        wait_until(lambda: len(admitted) >= 2)
        assert set(admitted) == {()}
        trainer.close()


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
    lacking = SimpleNamespace(Context=no_context, ZMQError=zmq.ZMQError)
    monkeypatch.setattr(control, "zmq", lacking)
    with fails(pccl.PCCLError, "cannot begin: Too many open files: raise"):
        publisher(parameters())
    assert set(threading.enumerate()) <= before, "the engine's thread"


def test_another_version_of_pccl_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(**vars(m) | {"PROTOCOL_VERSION": m.PROTOCOL_VERSION + 1})
    monkeypatch.setattr("pccl.runtime.client.control.m", other)
    with fails(pccl.KickedError, r"the master refused this: .* speaks protocol"):
        weights.Subscriber(address, blank())


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
