"""The store that torch wants of a run: keys and values that all members see."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from pccl.support.text import address_text, parse_address

PATIENCE = timedelta(seconds=300)


def serve(host: str) -> tuple[TCPStore, str]:
    """Serves a store in this process; the store, and the address at which `host` offers it."""
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return served, address_text(host, served.port)


class RunStore(Store):
    """A store of the run's members, which torch's rank 0 serves.

    It is connected to when it is first used: most programs never do. It is lost with the process
    that serves it, and with it what was in it; collectives go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._address = ""
        self._reason = "the group has not begun"
        self._store: Store | None = None
        self._patience = PATIENCE

    def use(self, address: str, served: Store | None, reason: str) -> None:
        """Where it is, if this process does not serve it; without an address, why there is none."""
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

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store, here and below."""
        self._reach().set(key, value)

    def get(self, key: str) -> bytes:
        return self._reach().get(key)

    def add(self, key: str, value: int) -> int:
        return self._reach().add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._reach().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._reach().delete_key(key)

    def num_keys(self) -> int:
        return self._reach().num_keys()

    def check(self, keys: list[str]) -> bool:
        return self._reach().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        store = self._reach()
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        return self._patience
