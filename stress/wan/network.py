"""Emulated long-distance networks of several hosts on one Linux machine; needs root.

A host is a network namespace. The module `wanem` carries the packets if it is installed, otherwise
the kernel's netem.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pccl.cli.chaos import network as network_of_chaos
from pccl.cli.chaos.network import NetworkError, run

QUEUE_MS = 50  # capacity of a link's queue, as time at its rate
_MTU = 1500
_names = itertools.count()


@dataclass(frozen=True)
class Link:
    """The link between any two hosts."""

    mbit: int  # rate of each direction, Mbit/s
    rtt_ms: int
    loss: float = 0.0  # percentage of packets lost at random
    # most bytes in a socket's send and receive buffers, as usual on Linux
    buffers: tuple[int, int] = (4 << 20, 6 << 20)

    def __str__(self) -> str:
        return f"{self.mbit} Mbit/s, {self.rtt_ms} ms, {self.loss:.2g} %"

    def scaled(self, factor: int) -> Link:
        """With a fraction of the rate, and windows that are that fraction of this link's.

        The average window of cubic goes with loss ** -0.75 (RFC 9438, section 5.1).
        """
        send, receive = (size // factor for size in self.buffers)
        loss = self.loss * factor ** (4 / 3)
        return replace(self, mbit=self.mbit // factor, loss=loss, buffers=(send, receive))

    @property
    def sysctls(self) -> dict[str, str]:
        """The limits of sockets' buffers; wanem sets the other values itself."""
        send, receive = self.buffers
        return {
            "net.ipv4.tcp_wmem": f"4096 16384 {send}",
            "net.ipv4.tcp_rmem": f"4096 131072 {receive}",
        }

    def bound_s(self, nbytes: int) -> float:
        """The minimum time in which a peer sends `nbytes` and agrees with a distant master."""
        return nbytes * 8 / (self.mbit * 1e6) + 2 * self.rtt_ms / 1e3


class Network:
    """Running hosts."""

    def __init__(self, spaces: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        self._spaces, self._addresses = spaces, addresses  # of all hosts

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on a host. Returns the command's process."""
        enter = ["nsenter", f"--net=/run/netns/{self._spaces[host]}", "--"]
        return subprocess.Popen([*enter, *argv], text=True, **options)

    @contextlib.contextmanager
    def master(self, **options: Any) -> Iterator[str]:
        """Starts a master on the host "master". Yields its address."""
        address = f"{self._addresses['master']}:48148"
        command = [sys.executable, "-m", "pccl.master", "--listen-address", address]
        process = self.popen("master", command, **options)
        yield address
        process.terminate()
        process.wait()

    def play(
        self, script: str, jobs: Mapping[str, dict[str, Any]], timeout_s: float, *, wait: bool
    ) -> list[Any]:
        """Runs `script --peer JOB` on each host, with a master; the JSON that each prints last.

        A job is JSON, and has the address of the master as "master". With `wait`, each begins when
        the one before it has printed a line.
        """
        with self.master(stdout=subprocess.DEVNULL) as address:
            started = {}
            for host, job in jobs.items():
                words = ["--peer", json.dumps({**job, "master": address})]
                command = [sys.executable, str(Path(script).resolve()), *words]
                started[host] = self.popen(host, command, stdout=subprocess.PIPE, bufsize=1)
                if wait:
                    stdout = started[host].stdout
                    assert stdout is not None
                    stdout.readline()
            return reports(started, timeout_s)


def reports(processes: Mapping[str, subprocess.Popen[str]], timeout_s: float) -> list[Any]:
    """The JSON that the process of each host prints at its end.

    Raises SystemExit: one has failed; the text says which one. Its own error is on stderr.
    """
    found = []
    for host, process in processes.items():
        printed = process.communicate(timeout=timeout_s)[0]
        if process.returncode:
            raise SystemExit(f"host {host}: its process ended with status {process.returncode}")
        found.append(json.loads(printed))
    return found


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Ends with the status of `main`, or with a message if no network can be emulated here."""
    try:
        sys.exit(main())
    except NetworkError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: no emulated network here: {error}")


def kind() -> str:
    """The emulator in use."""
    return "wanem" if importlib.util.find_spec("wanem") else "netem"


def network(
    link: Link,
    hosts: Sequence[str],
    slow: Mapping[str, int] | None = None,
    between: Mapping[tuple[str, str], int] | None = None,
) -> contextlib.AbstractContextManager[Network]:
    """Hosts with that link between any two; they and all that runs there end with the block.

    Hosts that are `slow` send at another rate, in Mbit/s. Pairs of `between` have a link of another
    rate, both ways, which needs the module wanem. Raises NetworkError: the machine cannot emulate a
    network; the text says what is missing.
    """
    if kind() == "wanem":
        return _wanem(link, hosts, slow or {}, between or {})
    if between:
        raise NetworkError("netem has one rate for each host: this needs the module wanem")
    return _netem(link, hosts, slow or {})


@contextlib.contextmanager
def _wanem(
    link: Link,
    hosts: Sequence[str],
    slow: Mapping[str, int],
    between: Mapping[tuple[str, str], int],
) -> Iterator[Network]:
    from wanem import Wan  # type: ignore[import-not-found]

    values = {"rate": f"{link.mbit}mbit", "delay": f"{link.rtt_ms / 2}ms", "loss": f"{link.loss}%"}
    config = {
        "hosts": list(hosts),
        "congestion": "cubic",
        "sysctl": link.sysctls,
        "default": {**values, "queue": f"{QUEUE_MS}ms"},
        "links": [
            *({"from": host, "to": "*", "rate": f"{mbit}mbit"} for host, mbit in slow.items()),
            *({"between": [*pair], "rate": f"{mbit}mbit"} for pair, mbit in between.items()),
        ],
    }
    with Wan(config, name=f"pccl{os.getpid()}_{next(_names)}") as wan:
        yield Network({host: f"{wan.name}.{host}" for host in hosts}, dict(wan.hosts))


@contextlib.contextmanager
def _netem(link: Link, hosts: Sequence[str], slow: Mapping[str, int]) -> Iterator[Network]:
    """Sets delay, rate and loss for the packets that each host sends."""
    with network_of_chaos.Network(len(hosts) - 1) as made:
        spaces = {host: made.name(number) for number, host in enumerate(hosts)}
        for number, (host, name) in enumerate(spaces.items()):
            way = ("10.79.0.0/16", "dev", network_of_chaos.DEVICE, "congctl", "cubic")
            run("ip", "-n", name, "route", "change", *way)
            for key, value in {**link.sysctls, "net.ipv4.tcp_no_metrics_save": "1"}.items():
                run("ip", "netns", "exec", name, "sysctl", "-q", "-w", f"{key}={value}")
            mbit = slow.get(host, link.mbit)
            packets = (QUEUE_MS + link.rtt_ms) * mbit * 125 // _MTU
            netem = f"delay {link.rtt_ms / 2}ms rate {mbit}mbit loss {link.loss}%"
            made.qdisc(number, f"netem limit {packets} {netem}")
        yield Network(spaces, dict(zip(hosts, made.addresses, strict=True)))
