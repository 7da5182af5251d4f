"""A package of weights in memory: one that is served, or one that arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pccl.ext import ffi
from pccl.protocol import messages as m
from pccl.runtime.client.memory import Pieces
from pccl.runtime.client.staging import Region, Staging, Verdict, served
from pccl.runtime.digest import Digest, digests

ENTRIES = 2  # the head and the body, whose tables are the pieces below this


@dataclass(frozen=True, slots=True)
class Parcel:
    """A package and its two parts, in memory that does not change."""

    package: m.Package
    head: memoryview
    body: memoryview
    found: tuple[Digest, ...]

    @classmethod
    def of(
        cls, version: int, base: int, content: bytes, head: memoryview, body: memoryview
    ) -> Parcel:
        """Makes a package; its digests are computed here."""
        found = digests([(_address(part), part.nbytes) for part in (head, body)])
        package = m.Package(
            version, base, content, head.nbytes, found[0].root, body.nbytes, found[1].root
        )
        return cls(package, head, body, tuple(found))

    def pieces(self) -> tuple[Pieces, object]:
        """What is served, and what keeps it in memory."""
        pieces, tables = served(_regions(self.package, self.head, self.body), self.found)
        return pieces, (self, tables)


class Incoming:
    """A package that is being fetched: memory for it, and the verification of its leaves."""

    def __init__(self, package: m.Package) -> None:
        self.package = package
        plan = m.SyncPlan(0, 0, (), (), (0, 1), (package.head, package.body))
        self._staging = Staging(plan, _regions(package))

    def pieces(self) -> Pieces:
        """The memory into which the engine writes."""
        return self._staging.pieces()

    def judge(self, piece: int, leaf: int) -> list[Verdict]:
        """As Staging.judge."""
        return self._staging.judge(piece, leaf)

    def parcel(self) -> Parcel:
        """What has arrived, when all of it is proven."""
        head, body = (memoryview(self._staging.content(i)) for i in range(ENTRIES))
        found = digests([(_address(part), part.nbytes) for part in (head, body)])
        return Parcel(self.package, head, body, tuple(found))


def _regions(package: m.Package, *parts: memoryview) -> list[Region]:
    addresses = [_address(part) for part in parts] or [0, 0]
    sizes = (package.head_bytes, package.body_bytes)
    return [
        Region("", 0, nbytes, False, address, nbytes)
        for address, nbytes in zip(addresses, sizes, strict=True)
    ]


def _address(part: memoryview) -> int:
    array: Any = ffi.from_buffer("char[]", part)
    return int(ffi.cast("uintptr_t", array))
