"""Data that peers share out among themselves: every sample once, whoever comes and goes.

`ledger` says how. It needs numpy, and torch only for those who use it.
"""

from pccl.data.ledger import Ledger, LedgerSampler

__all__ = ["Ledger", "LedgerSampler"]
