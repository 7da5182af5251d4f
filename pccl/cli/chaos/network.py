"""Hosts (network namespaces) for the copies, and faults of their network. Linux, as root.

A cut is silent: the host sends to a hardware address that no interface has. So cuts need only a
bridge; `slow-link`, `delay` and `loss` need the kernel's tbf and netem.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from pccl.cli.chaos import kinds
from pccl.support import Closing

NOBODY = "02:00:00:00:00:ff"
DEVICE = "wan0"
QDISCS = {
    kinds.RATE: "tbf rate 4mbit burst 32kb latency 100ms",
    kinds.DELAY: "netem delay 200ms 50ms",
    kinds.LOSS: "netem loss 10%",
}
_names = itertools.count()
Undo = Callable[[], None]


class NetworkError(Exception):
    """This machine cannot have such hosts; the text says why."""


class Network(Closing):
    """Hosts: number 0 for the master, and one for each copy that runs at once.

    Raises NetworkError: this machine cannot have them.
    """

    def __init__(self, copies: int) -> None:
        for tool in ("ip", "nsenter"):
            if sys.platform != "linux" or shutil.which(tool) is None:
                raise NetworkError(f"it takes Linux, and the program {tool}")
        self.addresses = [f"10.79.{host // 200}.{host % 200 + 1}" for host in range(copies + 1)]
        self._prefix = f"pccl{os.getpid()}_{next(_names)}"
        self._hosts = range(copies + 1)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """A command line that runs on a host; the process is the command's own."""
        return ["nsenter", f"--net=/run/netns/{self.name(host)}", "--", *command]

    def kinds(self) -> tuple[dict[str, kinds.Kind], dict[str, str]]:
        """The possible kinds of faults, and why the others are impossible."""
        why = {}
        for what in (*QDISCS, kinds.RESET):
            try:
                if (undo := self.harm(what, 1)) is not None:
                    undo()
            except NetworkError as error:
                why[what] = str(error)
        found = {n: kind for n, kind in kinds.KINDS.items() if kind.network and n not in why}
        return found, why

    def harm(self, what: str, host: int) -> Undo | None:
        """Disturbs the network of a host. Returns a function that ends a lasting fault.

        Raises NetworkError.
        """
        if what in QDISCS:
            return self.qdisc(host, QDISCS[what])
        if what == kinds.RESET:  # all its established connections
            if shutil.which("ss") is None:
                raise NetworkError("it takes the program ss")
            run(*self.command(host, ["ss", "-K", "-t", "state", "established"]))
            return None
        others = [other for other in self._hosts if other != host]
        out, into = [(host, other) for other in others], [(other, host) for other in others]
        return self._cut(out * (what != kinds.CUT_IN) + into * (what != kinds.CUT_OUT))

    def close(self) -> None:
        """Removes the hosts, and ends their processes."""
        for name in [*map(self.name, self._hosts), self.name("switch")]:
            with contextlib.suppress(NetworkError):  # it was not made
                for pid in run("ip", "netns", "pids", name).split():
                    run("kill", "-9", pid)
                run("ip", "netns", "delete", name)

    def _make(self) -> None:
        switch = self.name("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "up", "type", "bridge")
        for host in self._hosts:
            name = self.name(host)
            run("ip", "netns", "add", name)
            peer = ("peer", "name", f"to{host}", "netns", switch)
            mac = ("address", self._mac(host))
            run("ip", "-n", name, "link", "add", DEVICE, *mac, "up", "type", "veth", *peer)
            run("ip", "-n", switch, "link", "set", f"to{host}", "master", "br0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/16", "dev", DEVICE)

    def _cut(self, pairs: Sequence[tuple[int, int]]) -> Undo:
        """Drops all data from the first host of a pair to the second."""

        def set_cut(cut: bool) -> None:
            for source, target in pairs:
                neighbor = ("ip", "-n", self.name(source), "neigh", "replace")
                mac = ("lladdr", NOBODY if cut else self._mac(target))
                run(*neighbor, self.addresses[target], *mac, "dev", DEVICE, "nud", "permanent")

        set_cut(True)
        return partial(set_cut, False)

    def qdisc(self, host: int, qdisc: str) -> Undo:
        """Sets a host's queueing discipline for sending. Returns a function that removes it."""
        where = ("tc", "-n", self.name(host), "qdisc")
        try:
            run(*where, "replace", "dev", DEVICE, "root", *qdisc.split())
        except NetworkError as error:
            module = f"sch_{qdisc.split()[0]}"
            text = f"{error} (it takes the kernel's module {module}: try `modprobe {module}`)"
            raise NetworkError(text) from None

        def undo() -> None:
            with contextlib.suppress(NetworkError):  # another fault has replaced it, and ended
                run(*where, "del", "dev", DEVICE, "root")

        return undo

    def name(self, host: int | str) -> str:
        return f"{self._prefix}.{host}"

    @staticmethod
    def _mac(host: int) -> str:
        return f"02:00:00:01:{host >> 8:02x}:{host & 255:02x}"


def run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, text=True, capture_output=True, check=False)
    except OSError as error:
        raise NetworkError(f"{argv[0]}: {error.strerror}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()
        raise NetworkError(f"{' '.join(argv[:4])} ...: {why[0] if why else done.returncode}")
    return done.stdout
