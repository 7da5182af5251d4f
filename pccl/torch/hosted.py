"""The servers that a process runs for other members of a group: a master, and a torch store."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from pccl import Communicator, MasterNode, PCCLError
from pccl.support import address_text, parse_address

KEY = "pccl/master"  # key in a group's store: the address of its master; empty: it has ended
FAREWELL_S = 30.0  # how long to wait for the other members to leave
_ASK_S = 2.0
_LOOK_S = 0.02
_STORE_PATIENCE = timedelta(seconds=300)

_log = logging.getLogger("pccl.torch")
_hosted: list[HostedMaster] = []


class HostedMaster:
    """A master in this process, for one group.

    The group ends with this process, as torch's own store does. A run that must outlive each of its
    peers needs a separate master (`pccl master`, PCCL_MASTER).

    Attributes:
        address: where other members reach it.
        own: this process's own communicator in the group.
    """

    def __init__(self, host: str, store: Any) -> None:
        """`host` is the host at which other members reach this process; they find it in `store`."""
        self.own: Communicator | None = None
        self._store = store
        self._node = MasterNode("0.0.0.0:0")
        self._node.run()
        _hosted.append(self)
        self.address = f"{host}:{self._node.address.rpartition(':')[2]}"
        store.set(KEY, self.address)

    def end(self, patience_s: float | None = None) -> None:
        """Stops it when all members have left, or after that time. Idempotent.

        A recreated group with the same store no longer finds its address.
        """
        if self in _hosted:
            with contextlib.suppress(RuntimeError):  # the store has ended, with the address in it
                self._store.compare_set(KEY, self.address, "")
        self.stop(time.monotonic() + (FAREWELL_S if patience_s is None else patience_s))

    def stop(self, until_s: float) -> None:
        """Stops it when all members have left, or at a time of `time.monotonic`. Idempotent."""
        if self not in _hosted:
            return
        _hosted.remove(self)
        members = self._members()  # later ones belong to a recreated group
        if self.own is not None:
            self.own.close()
        while (here := members & self._members()) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        if here:
            _log.warning(
                "%d members of the group whose master is in this process have not left in time: "
                "they lose their master now",
                len(here),
            )
        self._node.interrupt()

    def _members(self) -> set[int]:
        """The numbers of the members; none if the master has ended, for example by SIGTERM."""
        try:
            return {peer.peer for peer in self._node.status(_ASK_S).peers if peer.accepted}
        except PCCLError:
            return set()


@atexit.register  # registered after that of pccl.master_node, so it runs before it
def end_all() -> None:
    until_s = time.monotonic() + FAREWELL_S
    for master in list(_hosted):
        master.stop(until_s)


def serve(host: str) -> tuple[TCPStore, str]:
    """Serves a store in this process; returns it, and its address on `host`."""
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return served, address_text(host, served.port)


class RunStore(Store):
    """A store of the run's members, which torch's rank 0 serves.

    It connects on first use, which most programs never make. The store and its content are lost
    with the process that serves it; collectives continue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._address = ""
        self._reason = "the group has not begun"
        self._store: Store | None = None
        self._patience = _STORE_PATIENCE

    def use(self, address: str, served: Store | None, reason: str) -> None:
        """Sets the store's address, or the reason for its absence, and the store if served here."""
        with self._lock:
            if address != self._address:
                self._store = None
            self._address, self._reason = address, reason
            self._store = served or self._store

    def _reach(self) -> Store:
        with self._lock:
            if self._store is None:
                if not self._address:
                    raise RuntimeError(f"this run has no store: {self._reason}")
                host, port = parse_address(self._address)
                self._store = TCPStore(host, port, is_master=False, timeout=self._patience)
            return self._store

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._reach().wait(keys, *([] if timeout is None else [timeout]))

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        return self._patience


def _forward(name: str) -> Any:
    def call(self: RunStore, *given: Any) -> Any:
        return getattr(self._reach(), name)(*given)

    return call


for _name in ("set", "get", "add", "compare_set", "delete_key", "num_keys", "check"):
    setattr(RunStore, _name, _forward(_name))
