"""Runs `pccl master` with limits that can be changed from outside, by lines on its stdin.

    python -m pccl.cli.chaos.steered MASTER'S OPTIONS

"fsize N" and "nofile N" set a limit, as if the disk were full or no descriptors were left; without
N they lift it. The master sets its own limits, because only Linux lets another process do that.
"""

from __future__ import annotations

import os
import sys
import threading

from pccl.master import main

if sys.platform != "win32":
    import resource

    LIMITS = {"fsize": resource.RLIMIT_FSIZE, "nofile": resource.RLIMIT_NOFILE}


def apply_limits() -> None:
    """Sets limits as the lines on stdin say. Ends when stdin does, because the parent has ended."""
    rest = b""
    while data := os.read(0, 4096):  # not sys.stdin, whose lock could block the exit
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, *numbers = line.decode().split()
            if sys.platform != "win32":
                hard = resource.getrlimit(LIMITS[name])[1]
                resource.setrlimit(LIMITS[name], (int(numbers[0]) if numbers else hard, hard))
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=apply_limits, daemon=True).start()
    sys.exit(main())
