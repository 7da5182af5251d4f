"""What a process holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def held(pid: int) -> tuple[int, int, int] | None:
    """What a process holds: descriptors, threads, MiB of memory; only Linux tells."""
    if sys.platform != "linux":
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        files, tasks = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    except OSError:  # it has ended
        return None
    return files, tasks, pages * os.sysconf("SC_PAGE_SIZE") >> 20
