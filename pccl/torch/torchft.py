"""pccl for torchft's Manager. Only this module imports torchft.

    manager = torchft.Manager(pg=ProcessGroupPCCL(timeout=timedelta(seconds=30)), ...)

torchft's own mechanism applies: a loss fails the collective, the step is not committed, and the
next quorum makes a new group. `pccl.torch.DistributedDataParallel` does not need torchft.
"""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper  # type: ignore[import-not-found]

from pccl.torch.creation import by_store
from pccl.torch.group import ProcessGroup


class ProcessGroupPCCL(ProcessGroupWrapper):  # type: ignore[misc]
    """A pccl process group that torchft reconfigures for each quorum."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        return by_store(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        return "torchft-pccl"

    def shutdown(self) -> None:
        """Leaves the group; a master that this process hosts ends with it."""
        self.abort(errored=False)
