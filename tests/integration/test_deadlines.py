"""A real master drops who is late for a round, and it may join again."""

from __future__ import annotations

import threading

import pytest
from pages import listed

import pccl
from pccl import extension
from pccl.protocol.rounds import Grace


def test_a_late_peer_is_dropped_on_time_and_may_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On time: nothing else would wake up this master in the next 15 seconds."""
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMEOUT_MS", "60000")
    with pccl.MasterNode("127.0.0.1:0") as master, pccl.Communicator(master.address) as comm:
        late = pccl.Communicator(master.address)
        joining = threading.Thread(target=late.connect)
        joining.start()
        comm.wait_for_peers(2)
        joining.join()
        assert not extension.are_peers_pending(comm, Grace(1, 0.05))
        assert comm.world_size == 1
        with pytest.raises(pccl.KickedError) as caught:
            late.are_peers_pending()
        listed(f"KickedError: {caught.value}")
        again = threading.Thread(target=late.connect)
        again.start()
        assert comm.wait_for_peers(2) == 2
        again.join()
        late.close()
