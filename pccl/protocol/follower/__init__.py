"""What an associate does: it publishes weights or follows them, and serves them to others."""

from pccl.protocol.follower.machine import Follower

__all__ = ["Follower"]
