"""Measures the cost of a run whose peers make no calls: memory, threads, processor time, traffic.

The master and the peers are processes of this machine, connected by TCP, as on several machines.
Each peer has reduced one array. The traffic is the bytes that a peer sends and receives, with 52
bytes of TCP and IP headers per segment; the processor time is counted in ticks of 10 ms. Linux
only.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

import pccl
from pccl.cli.arguments import option, whole_number
from pccl.cli.bench.options import PEERS_MAX
from pccl.cli.processes import WorkerError, collect, free_address, held, start_master, workers
from pccl.cli.terminal import Refused
from pccl.runtime import tcp

SETTLE_S = 3.0  # after a collective, until links are measured and memory is released
HEADER_BYTES = 52  # TCP with timestamps, and IPv4
_TCP_INFO = struct.Struct("120xQQII")  # linux/tcp.h: bytes acked, received; segments out, in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--peers N", "processes", 2, whole_number(2, PEERS_MAX))
    option(parser, "--seconds N", "how long to measure", 60, whole_number(1))


def run(args: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise Refused("idle needs Linux: it reads /proc and TCP_INFO")
    os.environ.setdefault("PCCL_LOG_LEVEL", "ERR")
    os.environ["PCCL_TRANSPORT"] = "tcp"
    address = free_address()
    with (
        start_master(address) as master,
        workers(args.peers, _idle, address, args.peers, args.seconds) as results,
    ):
        began = [(pid, _cpu_s(pid)) for pid in (master.pid, *collect(results))]
        traffic = collect(results)
        costs = [(*_held(pid), _cpu_s(pid) - before) for pid, before in began]
    print(f"# {args.peers} peers, {args.seconds} s; medians of the peers")
    print("#         memory  threads  processor time  traffic")
    print("#          (MiB)               (ms/minute)   (KiB/hour)")
    for name, rows in (("master", costs[:1]), ("peer", costs[1:])):
        threads, memory, cpu_s = (median(column) for column in zip(*rows, strict=True))
        ms = 6e4 * cpu_s / args.seconds
        kib = f"{median(traffic) / 1024 * 3600 / args.seconds:.0f}" if name == "peer" else ""
        print(f"{name:8}  {memory:6.0f}  {threads:7.0f}  {ms:14.0f}  {kib:>10}")
    return 0


def _idle(number: int, address: str, peers: int, seconds: int) -> Iterator[int]:
    """A peer: yields its process number when it is idle, then its traffic in that time."""
    with pccl.Communicator(address) as comm:
        comm.wait_for_peers(peers)
        comm.all_reduce(np.ones(1 << 20, np.float32))
        time.sleep(SETTLE_S)
        yield os.getpid()
        before = _traffic()
        time.sleep(seconds)
        found = _traffic() - before
        comm.barrier()  # who leaves closes the connections that the others still measure
        yield found


def _traffic() -> int:
    """The bytes that this process's TCP connections have carried, with their headers."""
    total = 0
    for name in os.listdir(tcp.DESCRIPTORS):
        # an error: it is no TCP connection, or is closed
        with suppress(OSError, struct.error), tcp.borrowed(int(name)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            acked, received, sent_segments, received_segments = _TCP_INFO.unpack(info)
            total += acked + received + HEADER_BYTES * (sent_segments + received_segments)
    return total


def _held(pid: int) -> tuple[int, int]:
    found = held(pid)
    if found is None:
        raise WorkerError(f"process {pid} ended before it had been measured")
    return found[1:]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
