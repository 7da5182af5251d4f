"""Data that peers divide among themselves: every sample once, while peers come and go.

`ledger` says how. It needs numpy, and torch only for those who use it.
"""

from pccl.data.ledger import Ledger, LedgerSampler

__all__ = ["Ledger", "LedgerSampler"]
