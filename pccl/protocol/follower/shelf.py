"""The packages that an associate serves, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.follower import effects
from pccl.protocol.peer.effects import AbortOp, CloseStream, End, StartTransfer

SEQ = 1  # of all transfers: an op has one package


@dataclass(slots=True)
class Held:
    """A package that is served."""

    package: m.Package
    op: int
    receivers: dict[int, int] = field(default_factory=dict)  # and the streams to them


class Shelf:
    """All packages that are served.

    Args:
        number: gives the next number of an op or stream.
        do: takes an effect.
    """

    def __init__(self, number: Callable[[], int], do: Callable[[effects.Effect], None]) -> None:
        self._number, self._do = number, do
        self._held: dict[tuple[int, int], Held] = {}

    @property
    def packages(self) -> Sequence[m.Package]:
        """What is served."""
        return [one.package for one in self._held.values()]

    def put(self, package: m.Package) -> None:
        """Serves a package from now on."""
        if package.key not in self._held:
            self._held[package.key] = held = Held(package, self._number())
            self._do(effects.Offer(held.op, package))

    def drop(self, package: m.Package) -> None:
        """Serves a package no more."""
        held = self._held.pop(package.key, None)
        if held is None:
            return
        for stream in held.receivers.values():
            self._do(CloseStream(stream))
        self._do(AbortOp(held.op))
        self._do(effects.Forgotten(package))

    def drop_unused(self, packages: Sequence[m.Package]) -> bool:
        """Drops those that nobody fetches. Returns whether there are any."""
        unused = [one for one in packages if not self._held[one.key].receivers]
        for package in unused:
            self.drop(package)
        return bool(unused)

    def fail(self, op: int) -> bool:
        """An op that serves has failed. Returns whether it is one."""
        failed = [held.package for held in self._held.values() if held.op == op]
        for package in failed:
            self.drop(package)
        return bool(failed)

    def serve(self, serve: m.Serve) -> None:
        """Serves a receiver, which fetches nothing else from here: else `served` came before."""
        held = self._held.get((serve.version, serve.base))
        if held is None:
            return  # the master knows by now
        stream = held.receivers[serve.receiver.peer] = self._number()
        self._do(effects.Reach(stream, serve.receiver, serve.nonce))
        ends = (End(stream, serve.slot),)
        self._do(StartTransfer(held.op, SEQ, nonce_of(held.package), ends))

    def served(self, receiver: int) -> None:
        """A receiver needs nothing from here any more."""
        for held in self._held.values():
            stream = held.receivers.pop(receiver, 0)
            if stream:
                self._do(CloseStream(stream))

    def lose(self, stream: int) -> None:
        """A stream is lost, perhaps one of these: its receiver tells the master."""
        for held in self._held.values():
            for receiver, own in list(held.receivers.items()):
                if own == stream:
                    del held.receivers[receiver]
                    self._do(CloseStream(stream))

    def forget_receivers(self) -> None:
        """None of the receivers counts any more."""
        for held in self._held.values():
            for stream in held.receivers.values():
                self._do(CloseStream(stream))
            held.receivers.clear()


def nonce_of(package: m.Package) -> int:
    """The number that all requests for a package carry, and all of its data."""
    return int.from_bytes(package.body[:8])
