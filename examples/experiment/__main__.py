"""Measures what DiLoCo costs in loss and saves in bytes."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from experiment import main

    sys.exit(main())
