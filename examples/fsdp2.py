"""DiLoCo between machines. Within each machine, FSDP2 shards the model over processes.

    pccl master &
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --seed 1 --checkpoints one &
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --seed 2 --checkpoints two &

Within a machine, torch shards parameters, gradients and optimizer state, with nccl or gloo. Between
machines, each process averages its shard with the same shard of the others. Kill a machine, or one
of its processes: the others continue. Restart it: it receives their state.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language import Model, Text, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccl.torch
from pccl.diloco import DiLoCo


def main(words: list[str] | None = None) -> None:
    """Trains until the run has taken `--steps` outer steps."""
    parser = options(__doc__ or "", steps=60, inner_steps=50, save_every=5)
    parser.add_argument("--checkpoints", type=Path, default="checkpoints", help="of this machine")
    args = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()  # the processes of this machine: nccl for GPUs, else gloo
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = Model(args.width).to(device)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # the metadata of a checkpoint is written last
    saved = sorted(args.checkpoints.glob("*/.metadata"), key=lambda path: int(path.parent.name))
    with pccl.torch.communicator(args.master_address) as comm:
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            inner_steps=args.inner_steps,
            min_peers=args.min_peers,  # machines
            alone="step",  # a machine that has lost all others finishes, too
            state=partial(dcp.load, checkpoint_id=saved[-1].parent) if saved else None,
        )
        begin = diloco.outer_step
        for batch in Text(args.text).batches(32, args.seed * 1000 + dist.get_rank() + begin):
            if diloco.outer_step >= args.steps:
                break
            loss = model.loss(batch.to(device))
            loss.backward()
            outer = diloco.step()
            if outer and dist.get_rank() == 0:
                print(f"outer step {outer.outer_step}: loss {loss.item():.3f}", flush=True)
            if outer and outer.outer_step % args.save_every == 0:
                directory = args.checkpoints / str(outer.outer_step)
                dcp.save(diloco.state_dict(sharded=True), checkpoint_id=directory)
        comm.finish()
        print(f"shard {dist.get_rank()}: {diloco.state_digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
