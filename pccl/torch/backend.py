"""pccl as one of several backends of a group, each for its own device; torch 2.14 and later.

`init_process_group("cpu:pccl,cuda:nccl")` makes one group of both. Its rank and size are torch's,
and fixed: what a loss or a newcomer changes, only a group of pccl alone shows (`pccl.torch.group`).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from pccl.torch.collectives import Collectives
from pccl.torch.group import ProcessGroup
from pccl.torch.work import CoalescedWork, Work


def is_possible() -> bool:
    """Whether this version of torch calls the methods of a Backend that is written in Python."""
    try:
        type("Probe", (Backend,), {})(0, 1)
    except TypeError:  # it has no constructor
        return False
    return True


def is_one_of_several() -> bool:
    """Whether torch, which has called us, makes a group of several backends.

    It does not tell those whom it asks for a backend, so its own variables are looked at.
    """
    config = _variable("_new_process_group_helper", "backend_config")
    return config is not None and len(set(config.get_device_backend_map().values())) > 1


def is_to_be_reconfigured() -> bool:
    """Whether torch makes a group that begins when it is reconfigured; 2.14 and later."""
    return bool(_variable("init_process_group", "enable_reconfigure"))


def _variable(function: str, name: str) -> Any:
    """Of a function of torch that has called us; None: it has none, or has not called us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


class DeviceBackend(Collectives, Backend):
    """The backend of one device of a group; `group` does the work."""

    def __init__(self, group: ProcessGroup) -> None:
        Backend.__init__(self, group.getRank(), group.getSize())
        self._setup(group.communicator, group.members, group.timeout)
        self.group = group

    def getBackendName(self) -> str:
        """The name that it is registered by."""
        return "pccl"

    @property
    def supports_splitting(self) -> bool:
        """A part of the group is a run of its own, which `new_group` makes."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Several calls are one Work."""
        return True

    @property
    def supports_time_estimate(self) -> bool:
        """Nothing is simulated."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """The group shrinks by itself."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """Rank and size are fixed."""
        return False

    def startCoalescing(self) -> None:
        """Remembers the calls that follow."""
        self._start_coalescing(torch.device("cpu"))

    def endCoalescing(self) -> CoalescedWork:
        """The calls since then, as one Work."""
        return self._end_coalescing(torch.device("cpu"))

    def recvAnysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives a tensor from whoever sends one first."""
        return self.recv_anysource(tensors, tag)

    def monitoredBarrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """Waits for all; an error names those who are missing."""
        self.monitored_barrier(getattr(options, "timeout", None), wait_all_ranks)

    def setTimeout(self, timeout: Any) -> None:
        """How long a collective may take."""
        self.timeout = timeout

    def setSequenceNumberForGroup(self) -> None:
        """Calls are counted already."""

    def getSequenceNumberForGroup(self) -> int:
        """How many calls there have been."""
        return self._next_tag

    def setGroupUid(self, name: str) -> None:
        """torch's name for the group."""
        self.group.setGroupName(name)

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group.shutdown()

    def abort(self) -> None:
        """Leaves the group; what is under way fails."""
        self.group.abort()
