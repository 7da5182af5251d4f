"""The calls that fail, and the library that makes them fail (fail.c)."""

from __future__ import annotations

import ctypes
import errno
import socket
from dataclasses import asdict, dataclass
from typing import Any

KINDS = {  # as in fail.c
    name: 1 << bit
    for bit, name in enumerate(
        "memory mapping socket pair event accept connect lookup thread bind listen epoll directory "
        "send receive journal_open journal_write journal_sync journal_truncate".split()
    )
}
ERRORS = {
    "memory": errno.ENOMEM,
    "mapping": errno.ENOMEM,
    "connect": errno.ENETUNREACH,
    "lookup": socket.EAI_AGAIN,
    "thread": errno.EAGAIN,
    "bind": errno.EADDRINUSE,
    "listen": errno.EADDRINUSE,
    "directory": errno.ENOSPC,
    "send": errno.ECONNRESET,
    "receive": errno.ECONNRESET,
    "journal_open": errno.ENOSPC,
    "journal_write": errno.ENOSPC,
    "journal_sync": errno.EIO,
    "journal_truncate": errno.ENOSPC,
}  # of all others: EMFILE
FOR_EVER = 1 << 40
MARKER = "journal"  # in the path of the journal


@dataclass(frozen=True)
class Fault:
    """Calls of libc that fail in one process of a run.

    Attributes:
        at: the process: "master", "peer0" to "peer2", "newcomer".
        kinds: of calls, names of KINDS with a + between.
        module: part of the name of the library that calls; empty: any.
        nth: the first call that fails, from 1; 0: none does.
        width: how many fail from there on.
        site: only calls from this place count; 0: from anywhere.
        sites: whether all places are noted.
        tcp: whether peers reach each other by TCP, not by ipc.
    """

    at: str
    kinds: str
    module: str = ""
    nth: int = 0
    width: int = 1
    site: int = 0
    sites: bool = False
    tcp: bool = False

    def __str__(self) -> str:
        where = f" at site {self.site:x}" if self.site else ""
        width = "" if self.width == 1 else f" and {self.width - 1} more"
        way = ", by tcp" if self.tcp else ""
        from_ = f" from {self.module}" if self.module else ""
        return f"{self.at}: call {self.nth}{width} of {self.kinds}{from_}{where}{way}"

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def arm(self) -> None:
        """Arms this process, into which fail.c is preloaded."""
        kinds = self.kinds.split("+")
        number = ERRORS.get(kinds[0], errno.EMFILE)
        mask = sum(KINDS[kind] for kind in kinds)
        library = ctypes.CDLL(None)
        failed = library.fail_arm(
            mask,
            self.module.encode(),
            ctypes.c_uint64(self.site),
            ctypes.c_ulong(self.nth),
            ctypes.c_ulong(self.width),
            number,
            int(self.sites),
            MARKER.encode(),
        )
        assert failed == 0, f"no module {self.module} is loaded"


@dataclass(frozen=True)
class Seen:
    """The report of an armed process: calls that counted, those that failed, and their places."""

    calls: int
    hits: int
    sites: tuple[tuple[int, int, str], ...]  # name, calls, text


def seen() -> dict[str, Any]:
    """The report of this process."""
    library = ctypes.CDLL(None)
    library.fail_disarm()
    library.fail_seen.restype = library.fail_hits.restype = ctypes.c_ulong
    library.fail_site.restype = ctypes.c_uint64
    calls, text = ctypes.c_ulong(), ctypes.c_char_p()
    sites = []
    for index in range(library.fail_sites()):
        name = library.fail_site(index, ctypes.byref(calls), ctypes.byref(text))
        sites.append([name, calls.value, (text.value or b"").decode()])
    return {"calls": library.fail_seen(), "hits": library.fail_hits(), "sites": sites}
