"""The master's state machine: events go in, effects come out."""

from pccl.protocol.master.history import Journal
from pccl.protocol.master.machine import Master
from pccl.protocol.master.status import Status

__all__ = ["Journal", "Master", "Status"]
