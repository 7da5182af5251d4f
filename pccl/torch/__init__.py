"""pccl as a backend of torch.distributed.

    dist.init_process_group("pccl", init_method="pccl://host:48148", world_size=2)

joins the run of a master (`pccl master`): `world_size` is with how many it begins, and ranks are
given in the order of joining. Under torchrun (`env://`) the ranks are those of torchrun; the master
is that of PCCL_MASTER, or else one in the process of rank 0.
"""

import _pccl_torch
from pccl.torch import hooks
from pccl.torch.creation import (
    is_possible,
    replace_monitored_barrier,
    use_with_accelerate,
)
from pccl.torch.ddp import DistributedDataParallel, Replicas
from pccl.torch.group import ProcessGroup
from pccl.torch.members import communicator

_pccl_torch.register()  # torch may have been told not to look for entry points
if not is_possible():
    replace_monitored_barrier()

__all__ = [
    "DistributedDataParallel", "ProcessGroup", "Replicas", "communicator", "hooks",
    "use_with_accelerate",
]  # fmt: skip
