"""Divides samples among peers that come and go, each exactly once: see `ledger`. Needs no torch."""

from pccl.data.ledger import Ledger, LedgerSampler

__all__ = ["Ledger", "LedgerSampler"]
