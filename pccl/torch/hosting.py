"""Masters that this process hosts for groups whose first member it is."""

from __future__ import annotations

import atexit
import logging
import time

from pccl import Communicator, MasterNode, PCCLError

FAREWELL_S = 30.0  # how long others may take to leave
_ASK_S = 2.0
_INTERVAL_S = 0.02

_log = logging.getLogger("pccl.torch")
_hosted: list[HostedMaster] = []


class HostedMaster:
    """A master in this process, for one group.

    The group ends with this process, as torch's own store does; a run that must outlive each of its
    peers has a master of its own (`pccl master`, PCCL_MASTER).
    """

    def __init__(self, host: str) -> None:
        """`host` is where other members reach this process."""
        self._node = MasterNode("0.0.0.0:0")
        self._node.run()
        _hosted.append(self)
        self.own: Communicator | None = None  # by which this process is a member itself
        port = self._node.address.rpartition(":")[2]
        self.address = f"{host}:{port}"

    def end(self) -> None:
        """Stops it when all members have left. Idempotent."""
        if self not in _hosted:
            return
        _hosted.remove(self)
        if self.own is not None:
            self.own.close()
        until_s = time.monotonic() + FAREWELL_S
        while (here := self._members()) and time.monotonic() < until_s:
            time.sleep(_INTERVAL_S)
        if here:
            _log.warning(
                "%d members of the group whose master is in this process have not left within "
                "%.0f s: they lose their master now",
                here,
                FAREWELL_S,
            )
        self._node.interrupt()

    def _members(self) -> int:
        """How many members there are; 0 if the master has ended, as by SIGTERM."""
        try:
            return len(self._node.status(_ASK_S).peers)
        except PCCLError:
            return 0


@atexit.register  # later than pccl.master_node, and so called earlier than it, which serves on
def end_all() -> None:
    """The program ends."""
    for master in list(_hosted):
        master.end()
