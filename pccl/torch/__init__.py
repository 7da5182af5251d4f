"""pccl as a backend of torch.distributed. Importing this package registers it.

    import pccl.torch
    dist.init_process_group("pccl", init_method="pccl://host:48148", world_size=2)

joins the run of a master (`pccl master`): `world_size` is with how many it begins, and ranks are
given in the order of joining. Under torchrun (`env://`) the ranks are those of torchrun; the master
is that of PCCL_MASTER, or else one in the process of rank 0.
"""

from pccl.torch import hooks
from pccl.torch.creation import register
from pccl.torch.ddp import DistributedDataParallel, Replicas
from pccl.torch.group import ProcessGroup
from pccl.torch.members import communicator

register()

__all__ = ["DistributedDataParallel", "ProcessGroup", "Replicas", "communicator", "hooks"]
