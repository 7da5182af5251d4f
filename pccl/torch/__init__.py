"""pccl as a backend of torch.distributed.

    dist.init_process_group("pccl", init_method="pccl://host:48148", world_size=2)

joins the run of a master (`pccl master`). The run begins with `world_size` members, whose ranks
follow the order of joining. Under torchrun (`env://`) the ranks are torchrun's, and the master is
that of PCCL_MASTER, or else runs in the process of rank 0.
"""

import _pccl_torch
from pccl.torch import hooks, recorder
from pccl.torch.creation import (
    is_possible,
    keep_works_of_join,
    replace_monitored_barrier,
    use_with_accelerate,
)
from pccl.torch.ddp import DistributedDataParallel, Replicas
from pccl.torch.group import ProcessGroup
from pccl.torch.members import communicator

_pccl_torch.register()  # if TORCH_DEVICE_BACKEND_AUTOLOAD=0, no entry point has done it
if not is_possible():
    replace_monitored_barrier()
recorder.complete_dumps()
keep_works_of_join()

__all__ = [
    "DistributedDataParallel", "ProcessGroup", "Replicas", "communicator", "hooks",
    "use_with_accelerate",
]  # fmt: skip
