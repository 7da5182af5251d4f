"""`python -m pccl.cli.demo`, for where the console script is not installed."""

import sys

from pccl.cli.demo import main

if __name__ == "__main__":
    sys.exit(main())
