"""`python -m pccl.cli.demo`, for use without the console script."""

import sys

from pccl.cli.demo import main

if __name__ == "__main__":
    sys.exit(main())
