"""The master's state machine: events go in, effects come out."""

from pccl.protocol.master.ledger import Journal
from pccl.protocol.master.machine import Master

__all__ = ["Journal", "Master"]
