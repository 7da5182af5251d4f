"""The demo's master process: prints its address and serves until stdin ends, with the
orchestrator."""

from __future__ import annotations

import signal
import sys

import pccl


def main() -> int:
    """Serves on a free port of this machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to handle
    with pccl.MasterNode("127.0.0.1:0") as master:
        print(master.address, flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
