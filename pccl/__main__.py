"""`python -m pccl`: the same as the console script `pccl`."""

from __future__ import annotations

import sys

from pccl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
