"""Makes the backend known to torch.distributed."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from pccl.torch.creation import create
from pccl.torch.rendezvous import SCHEME, meet

NAME = "pccl"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Registers the backend and its URLs. Idempotent."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler(SCHEME, meet)  # type: ignore[no-untyped-call]
