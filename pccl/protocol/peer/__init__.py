"""The peer's state machine: calls, messages and events of the engine go in, effects come out."""

from pccl.protocol.peer.machine import Peer

__all__ = ["Peer"]
