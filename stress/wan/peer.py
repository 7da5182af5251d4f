"""One host's process of stress/wan/bench.py: reduces in one way after the other, and reports times.

Arguments: a JSON object, see `main`. Prints one JSON object: seconds of each iteration, by way.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl

Way = Callable[[], object]
PARTS = 16
SUM = pccl.ReduceOp.SUM


def one_stream(number: int, other: str, port: int, nbytes: int) -> Way:
    """As many bytes to and from the other over one TCP connection, all at once."""
    if number == 0:
        with socket.create_server(("", port)) as server:
            connection, _ = server.accept()
    else:
        connection = connect(other, port)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outgoing, incoming = bytes(nbytes), memoryview(bytearray(nbytes))

    def exchange() -> None:
        sender = threading.Thread(target=connection.sendall, args=(outgoing,))
        sender.start()
        at = 0
        while at < nbytes:
            at += connection.recv_into(incoming[at:])
        sender.join()

    return exchange


def connect(host: str, port: int) -> socket.socket:
    """A connection to a server that may be about to listen."""
    give_up_at = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)


def gloo(number: int, address: str, other: str, array: Any) -> Way:
    """all_reduce of torch.distributed; `address` is rank 0's."""
    import torch
    import torch.distributed as dist

    del other
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=number, world_size=2)
    tensor = torch.as_tensor(array)
    return lambda: dist.all_reduce(tensor)


def parallel(comm: pccl.Communicator, x: Any, y: Any) -> Way:
    """The same bytes in 16 collectives at once."""

    def reduce() -> None:
        handles = [
            comm.all_reduce_async(a, b, op=SUM, tag=100 + tag)
            for tag, (a, b) in enumerate(
                zip(np.array_split(x, PARTS), np.array_split(y, PARTS), strict=True)
            )
        ]
        for handle in handles:
            ok, status, _ = handle.wait()
            assert ok, status

    return reduce


def main() -> None:
    job = json.loads(sys.argv[1])
    number, nbytes = job["number"], job["bytes"]
    x = np.random.default_rng(number).standard_normal(nbytes // 4, np.float32)
    y = np.zeros_like(x)
    with pccl.Communicator(job["master"], 0, job["lanes"]) as comm:
        comm.wait_for_peers(2)
        made: dict[str, Callable[[], Way]] = {
            "pccl": lambda: lambda: comm.all_reduce(x, y, op=SUM, tag=1),
            "pccl-int8": lambda: lambda: comm.all_reduce(x, y, op=SUM, tag=2, quantization="int8"),
            "pccl-16": lambda: parallel(comm, x, y),
            "tcp": lambda: one_stream(number, job["other"], 7100, nbytes),
            "gloo": lambda: gloo(number, f"{job['first']}:7200", job["other"], y.copy()),
        }
        ways = {name: made[name]() for name in job["ways"]}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in ways.items():  # not in turns: connections that pause lose their windows
            for iteration in range(job["warmups"] + job["iterations"]):
                began = time.perf_counter()
                way()
                if iteration >= job["warmups"]:
                    times[name].append(time.perf_counter() - began)
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
