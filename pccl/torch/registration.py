"""Makes the backend known to torch.distributed."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from pccl.torch.backend import is_possible
from pccl.torch.creation import create
from pccl.torch.group import ProcessGroup
from pccl.torch.rendezvous import SCHEME, meet

NAME = "pccl"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Registers the backend and its URLs. Idempotent."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler(SCHEME, meet)  # type: ignore[no-untyped-call]
    if not is_possible():
        _ask_our_groups_for_a_monitored_barrier()


def _ask_our_groups_for_a_monitored_barrier() -> None:
    """torch asks every group with a backend for the CPU for one; before 2.14, it asks for the name.

    Its function is replaced by one that asks groups of pccl, and does for others what it did.
    """
    before = c10d.monitored_barrier

    @functools.wraps(before)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        found = c10d.group.WORLD if group is None else group
        if not isinstance(found, ProcessGroup):
            before(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        found.monitored_barrier(limit, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
