"""Facts of the kernel about a TCP connection."""

from __future__ import annotations

import os
import socket
import struct
import sys

import pytest

from pccl.runtime import tcp


def test_the_fields_of_a_struct_tcp_info() -> None:
    data = bytearray(range(200))
    for offset, kind, value in (
        (52, "I", 1500),  # last_data_recv, ms
        (68, "I", 20_000),  # rtt, us
        (100, "I", 7),  # total_retrans
        (148, "I", 10_000),  # min_rtt, us
        (160, "Q", 125_000_000),  # delivery_rate
        (168, "Q", 3_000_000),  # busy_time, us
        (176, "Q", 1_000_000),  # rwnd_limited, us
    ):
        struct.pack_into(f"={kind}", data, offset, value)
    assert tcp.parse(bytes(data)) == (1.5, 0.02, 7, 0.01, 125_000_000, 3.0, 1.0)
    assert tcp.parse(bytes(data[:191])) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_facts_of_a_connection_and_of_other_descriptors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there:
            here.sendall(bytes(100_000))
            there.recv(1)
            info = tcp.of_descriptor(there.fileno())
            assert info is not None and info == tcp.of(there)._replace(silent_s=info.silent_s)  # type: ignore[union-attr]
            assert 0 <= info.silent_s < 60 and info.rtt_s > 0
            there.recv(1)  # it was not closed
            gone = os.dup(there.fileno())
    os.close(gone)
    assert tcp.of_descriptor(gone) is None
    with socket.socket(socket.AF_UNIX) as other, open(os.devnull) as file:
        assert tcp.of_descriptor(other.fileno()) is None is tcp.of_descriptor(file.fileno())
