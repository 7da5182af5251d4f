"""A peer process that makes the calls that a test requests: one line of JSON each, in and out.

python puppet.py MASTER GROUP POOL_SIZE
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec
import numpy as np
from peers.waiting import wait_until

import pccl
from pccl.protocol import messages as m
from pccl.runtime import resolve
from pccl.runtime.client.call import Call
from pccl.runtime.client.streams import Streams


class Puppet:
    """The calls that a test can request; every array is filled with `value`."""

    def __init__(self, address: str, group: int, pool_size: int) -> None:
        self.comm = pccl.Communicator(address, group, pool_size)
        self.launched: list[tuple[np.ndarray, pccl.AsyncReduceHandle]] = []

    def connect(self, n_attempts: int = 5, timeout: float | None = None) -> None:
        self.comm.connect(n_attempts, timeout=timeout)

    def gather(self, size: int) -> None:
        while self.comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
            if self.comm.are_peers_pending():
                self.comm.update_topology()

    def update_topology(self, timeout: float | None = None) -> None:
        self.comm.update_topology(timeout=timeout)

    def are_peers_pending(self) -> bool:
        return self.comm.are_peers_pending()

    def optimize_topology(self, timeout: float | None = None) -> None:
        self.comm.optimize_topology(timeout=timeout)

    def world(self) -> list[int]:
        return [self.comm.get_attribute(attribute) for attribute in pccl.Attribute]

    def close(self) -> None:
        self.comm.close()

    def all_reduce(
        self,
        value: float = 1.0,
        count: int = 1000,
        dtype: str = "float32",
        op: str = "SUM",
        tag: int = 0,
        timeout: float | None = None,
    ) -> float:
        array = np.full(count, value, dtype)
        try:
            self.comm.all_reduce(array, array, op=pccl.ReduceOp[op], tag=tag, timeout=timeout)
        except pccl.PCCLError:
            assert (array == value).all(), "the buffer was not restored"
            raise
        assert (array == array[0]).all(), "elements differ"
        return float(array[0])

    def interruptible(self, call: str, **arguments: Any) -> str:
        """A call that Ctrl-C ends as soon as it waits."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
        try:
            return str(getattr(self, call)(**arguments))
        except KeyboardInterrupt:
            return "interrupted"

    def insist(self, value: float, count: int = 1000) -> float:
        while True:
            try:
                return self.all_reduce(value, count)
            except pccl.PeerLostError:
                pass

    def launch(self, value: float, count: int, tag: int) -> None:
        array = np.full(count, value, np.float32)
        handle = self.comm.all_reduce_async(array, array, op=pccl.ReduceOp.SUM, tag=tag)
        self.launched.append((array, handle))

    def wait(self) -> list[float]:
        ends = [(array, handle.wait()) for array, handle in self.launched]
        self.launched.clear()
        return [float(array[0]) if ok else -1.0 for array, (ok, _, _) in ends]

    def retry(self, value: float, count: int, tags: int, max_in_flight: int) -> list[float]:
        arrays = [np.full(count, value, np.float32) for _ in range(tags)]
        work = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
        descriptors = [
            pccl.ReduceOpDescriptor.from_numpy(
                array, array, pccl.ReduceDescriptor(count, pccl.ReduceOp.SUM, tag, work, None)
            )
            for tag, array in enumerate(arrays)
        ]
        self.comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=max_in_flight)
        assert all((array == array[0]).all() for array in arrays), "elements differ"
        return [float(array[0]) for array in arrays]

    def threads(self, value: float, count: int, threads: int, rounds: int) -> float:
        """Threads that make blocking calls, each with a tag of its own, again and again."""
        sums: list[float] = []

        def loop(tag: int) -> None:
            for _ in range(rounds):
                sums.append(self.all_reduce(value, count, tag=tag))

        running = [threading.Thread(target=loop, args=(tag,)) for tag in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert len(sums) == threads * rounds, "a thread has failed"
        return sum(sums)

    def sync(
        self,
        revision: int,
        value: float,
        count: int = 10,
        more: str = "",
        min_peers: int = 1,
        timeout: float | None = None,
    ) -> list[float]:
        array = np.full(count, value)
        shared = pccl.SharedState.from_tensors({"x": array, **dict.fromkeys(more, array.copy())})
        shared.revision = revision
        self.comm.sync_shared_state(shared, min_peers=min_peers, timeout=timeout)
        return [shared.revision, float(array[0])]


def interrupt(thread: int) -> None:
    """Ctrl-C for this process, once that thread waits for the answer to a call."""
    wait_until(lambda: sys._current_frames()[thread].f_code is Call.next.__code__)
    signal.pthread_kill(thread, signal.SIGINT)


def cage() -> None:
    """No stream of this process leads anywhere, as behind a firewall."""
    opened = Streams.open

    def open_nowhere(
        self: Streams, number: int, to: m.PeerInfo, nonce: int, shares: int = 1
    ) -> None:
        opened(self, number, msgspec.structs.replace(to, host="127.0.0.1", port=1, ipc=""), nonce)

    Streams.open = open_nowhere  # type: ignore[method-assign]


def main() -> None:
    if "PUPPET_CAGED" in os.environ:
        cage()
    if "PUPPET_IPV4" in os.environ:  # where this machine is seen by IPv6, nothing listens then
        socket.has_dualstack_ipv6 = lambda: False
        resolve.WORLD = ()
    puppet = Puppet(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"value": getattr(puppet, what)(**arguments)}
        except pccl.PCCLError as error:
            names = {"error": type(error).__name__, "result": error.result.name}
            answer = {**names, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
