"""CURVE, end to end: peers with allowed keys take part, and others cannot join or disturb."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from peers.cluster import Cluster, grow, in_threads
from peers.strangers import Proxy

import pccl
from pccl.cli.main import main
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.encryption import new_keys

POSIX = pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A run's directory: the master's, with the key that its peers share."""
    assert main(["keys", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


@pytest.fixture
def foreign(tmp_path: Path, keys: Path) -> Path:
    """The directory of a peer that knows the master, but that the master does not know."""
    assert main(["keys", str(tmp_path / "foreign")]) == 0
    (tmp_path / "foreign" / "master.key").write_bytes((keys / "master.key").read_bytes())
    return tmp_path / "foreign"


@pytest.fixture
def run(backend: str, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two connected peers of an encrypted run."""
    monkeypatch.setenv("PCCL_CURVE_DIR", str(keys))
    with Cluster(2) as made:
        monkeypatch.delenv("PCCL_CURVE_DIR")
        yield made


def reduce(run: Cluster, count: int = 100_000) -> None:
    def job(index: int, comm: pccl.Communicator) -> None:
        x = np.full(count, 2.0**index, np.float32)
        comm.all_reduce(x, x, op=pccl.ReduceOp.SUM)
        assert (x == 2.0 ** len(run.comms) - 1).all()

    run.each(job)


# ---- those who may ----


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_allowed_peers_reduce_and_synchronize(
    backend: str, keys: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_TRANSPORT", transport)
    monkeypatch.setenv("PCCL_CURVE_DIR", str(keys))

    def sync(index: int, comm: pccl.Communicator) -> int:
        x = np.full(500_000, float(index), np.float32)
        info = comm.sync_shared_state(pccl.SharedState.from_tensors({"x": x}))
        assert (x == 0).all()
        return info.rx_bytes

    with Cluster(3) as run:
        reduce(run)
        assert run.each(sync) == [0, 2_000_000, 2_000_000]
        run.join()
        reduce(run)


def admit(first: pccl.Communicator, second: pccl.Communicator) -> None:
    in_threads([second.connect, lambda: grow(first, 2)])


def mean(*comms: pccl.Communicator) -> None:
    inputs = [np.full(1000, float(i)) for i in range(len(comms))]
    in_threads(
        [
            lambda c=c, x=x: c.all_reduce(x, x, op=pccl.ReduceOp.AVG)  # type: ignore[misc]
            for c, x in zip(comms, inputs, strict=True)
        ]
    )
    assert all((x == (len(comms) - 1) / 2).all() for x in inputs)


def test_a_key_for_each_peer_and_another_later(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path), "--peers", "1"]) == 0
    with pccl.MasterNode("127.0.0.1:0", security=tmp_path) as master:
        first = pccl.Communicator(master.address, security=tmp_path / "peer-1")
        first.connect()
        assert main(["keys", str(tmp_path), "--peers", "2"]) == 0  # the master reads it when asked
        second = pccl.Communicator(master.address, security=str(tmp_path / "peer-2"))
        admit(first, second)
        mean(first, second)
        first.close()
        second.close()


def test_a_restarted_master_knows_its_peers_by_their_keys(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path), "--peers", "2"]) == 0
    state = tmp_path / "state"
    with pccl.MasterNode("127.0.0.1:0", security=tmp_path, state=state) as master:
        address = master.address
        comms = [pccl.Communicator(address, security=tmp_path / f"peer-{i}") for i in (1, 2)]
        comms[0].connect()
        admit(*comms)
    with pccl.MasterNode(address, security=tmp_path, state=state):
        mean(*comms)  # over new streams: it is a new epoch
        for comm in comms:
            comm.close()


# ---- those who may not ----


def refused(address: str, security: Path | None) -> pccl.PCCLError:
    comm = pccl.Communicator(address, security=security)
    with pytest.raises(pccl.PCCLError) as caught:
        comm.connect(n_attempts=1)
    return caught.value


def test_a_foreign_key_cannot_join(run: Cluster, foreign: Path) -> None:
    error = refused(run.master.address, foreign)
    assert error.result is pccl.Result.INVALID_USAGE
    public = (foreign / "peer.secret").read_text().split()[0]
    assert f"its list `allowed` does not have this peer's key, {public}" in str(error)
    assert not any(run.each(lambda _, comm: comm.are_peers_pending()))
    reduce(run)


def test_no_key_at_all_cannot_join(run: Cluster) -> None:
    error = refused(run.master.address, None)
    assert error.result is pccl.Result.MASTER_CONNECTION_FAILED
    assert "the master wants encryption (pass security=, or set PCCL_CURVE_DIR)" in str(error)
    reduce(run)


def test_keys_but_a_master_without(keys: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        assert "the master does not encrypt" in str(refused(master.address, keys))


def test_another_master_s_key(run: Cluster, keys: Path, foreign: Path) -> None:
    (foreign / "master.key").write_text(new_keys().public)
    (foreign / "peer.secret").write_bytes((keys / "peer.secret").read_bytes())
    assert "master.key is not its key" in str(refused(run.master.address, foreign))


def test_a_key_that_is_no_longer_allowed(run: Cluster, keys: Path) -> None:
    (keys / "allowed").write_text("# nobody any more\n\n")
    assert "does not have this peer's key" in str(refused(run.master.address, keys))
    reduce(run)  # connections that stand are let be
    (keys / "allowed").write_text("half a key")
    assert "does not have this peer's key" in str(refused(run.master.address, keys))


# ---- the wire ----


@pytest.mark.parametrize("encrypted", [True, False])
def test_messages_of_a_peer_are_encrypted(keys: Path, encrypted: bool) -> None:
    security = keys if encrypted else None
    with pccl.MasterNode("127.0.0.1:0", security=security) as master:
        with (
            Proxy(master.address) as proxy,
            pccl.Communicator(proxy.address, security=security) as comm,
        ):
            comm.update_topology()
    hello = pccl.__version__.encode()
    assert len(proxy.seen) > 200
    assert (hello in proxy.seen) is not encrypted


# ---- files ----


@POSIX
@pytest.mark.parametrize("name", ["master.secret", "peer.secret"])
def test_secrets_that_others_can_read_are_refused(keys: Path, name: str) -> None:
    assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    (keys / name).chmod(0o640)
    security = pccl.Security.from_dir(keys)
    read = security.master_keys if name == "master.secret" else security.peer_keys
    with pytest.raises(pccl.PCCLError, match=r"other users can read .* \(mode 0640\): chmod 600"):
        read()


@POSIX
def test_unsafe_keys_stop_master_and_peer(keys: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0", security=keys) as master:
        (keys / "peer.secret").chmod(0o644)
        with pytest.raises(pccl.PCCLError, match="INVALID_USAGE: other users can read"):
            pccl.Communicator(master.address, security=keys).connect()
    (keys / "master.secret").chmod(0o644)
    with pytest.raises(pccl.PCCLError, match="INVALID_USAGE: other users can read"):
        pccl.MasterNode("127.0.0.1:0", security=keys).run()


def test_files_that_hold_no_keys_are_named_and_not_quoted(keys: Path) -> None:
    (keys / "peer.secret").write_text("half-a-secret")
    with pytest.raises(pccl.PCCLError, match=r"peer\.secret does not hold a key pair") as caught:
        pccl.Security.from_dir(keys).peer_keys()
    assert "half-a-secret" not in str(caught.value)
    (keys / "allowed").unlink()
    with pytest.raises(pccl.PCCLError, match=r"cannot read .*allowed"):
        pccl.MasterNode("127.0.0.1:0", security=keys).run()
    with pytest.raises(pccl.PCCLError, match="is not a directory"):
        pccl.Security.from_dir(keys / "allowed")


@pytest.mark.parametrize(("public", "secret"), [(40, 0), (0, 40), (39, 40), (40, 41), (48, 48)])
def test_an_engine_refuses_half_a_key(backend: str, public: int, secret: int) -> None:
    with pytest.raises(ValueError, match="an engine cannot work with"):
        Engine(EngineOptions(curve_public=b"k" * public, curve_secret=b"s" * secret))


def test_keys_are_not_shown(keys: Path) -> None:
    pair = pccl.Security.from_dir(keys).peer_keys()
    assert pair.secret not in repr(pair)
    assert pair.secret not in repr(EngineOptions(curve_secret=pair.secret.encode()))


def test_keys_that_exist_are_kept(keys: Path) -> None:
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    assert main(["keys", str(keys)]) == 0
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before
    assert before.keys() == {"master.secret", "master.key", "allowed", "peer.secret"}
