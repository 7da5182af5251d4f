"""A program that calls the whole API; type checkers read it, and no test runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import pccl
import pccl.torch
from pccl.data import Ledger, LedgerSampler
from pccl.diloco import DiLoCo, MuonAndAdamW, OuterRound, Wire, muloco, sparseloco
from pccl.weights import Publication, Publisher, Subscriber

Array = npt.NDArray[np.float32]


def run_of_two() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        names = [peer.name for peer in master.status().peers]
        with pccl.Communicator(master.address, name=names[0], connect_timeout=5.0) as comm:
            there: int = comm.wait_for_peers(2, timeout=60.0)
            print(there, comm.world_size, comm.rank, comm.peers)
            collectives(comm, np.ones(4, np.float32), torch.ones(4))
            membership(comm, np.ones(4, np.float32))
            print(comm.explain(), comm.explain().limits, comm.stats().collectives)
            size: int = comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)
            print(size, master.address)


def collectives(comm: pccl.Communicator, x: Array, t: torch.Tensor) -> None:
    info: pccl.ReduceInfo = comm.all_reduce(x, op="mean", quantization="int8", timeout=3)
    print(info.world_size, info.tx_bytes)
    comm.all_reduce({"weight": t, "bias": t})
    comm.all_reduce([x, x], [x, x], op=pccl.ReduceOp.SUM, tag=1)
    comm.reduce_scatter(x, op="sum")
    comm.reduce(x, root=0, op="max")
    comm.broadcast(t, root=0)
    comm.barrier()
    agreed: bool = comm.commit(ok=True)
    rows: Array = comm.all_gather(x)
    tensors: torch.Tensor = comm.all_gather(t)
    comm.gather(x, root=0)
    comm.scatter(x, root=0)
    comm.all_to_all(x)
    comm.send(x, 1)
    comm.recv(x, 1)
    print(agreed, rows.shape, tensors.shape)
    handle = comm.all_reduce_async(x, op="min")
    succeeded, status, outcome = handle.wait(timeout=1.0)
    print(succeeded, pccl.Result(status), outcome.rx_bytes, handle.done(), handle.error)
    asyncio.run(awaited(comm, x))
    options = pccl.QuantizationOptions.of("int4")
    work = pccl.ReduceDescriptor(
        4, pccl.ReduceOp.AVG, 0, pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT), options
    )
    comm.all_reduce_multiple_with_retry([pccl.ReduceOpDescriptor.from_numpy(x, x, work)])


async def awaited(comm: pccl.Communicator, x: Array) -> int:
    succeeded, _, info = await comm.all_reduce_async(x)
    return info.world_size if succeeded else 0


def membership(comm: pccl.Communicator, x: Array) -> None:
    shared = pccl.SharedState.from_tensors({"x": x})

    def step(number: int) -> None:
        try:
            comm.all_reduce(x)
        except pccl.PeerLostError as error:
            print(number, error.result.name, error.message)

    comm.run(step, shared, steps=3, min_peers=2)
    comm.admit(shared, timeout=1.0)
    if comm.are_peers_pending():
        comm.update_topology()
    comm.optimize_topology(timeout=30.0)
    info = comm.sync_shared_state(shared, pccl.SharedStateSyncStrategy.RECEIVE_ONLY, progress=print)
    print(info.rx_bytes, [one.share for one in info.divergence], shared.revision)
    shared.push_revision()
    shared.save("state.safetensors")
    comm.finish()


def training(comm: pccl.Communicator, model: torch.nn.Module, wire: Wire = "int4") -> None:
    ledger = Ledger(1000, share=240)
    optimizer = MuonAndAdamW(model, lr=1e-3)
    diloco = DiLoCo(
        comm,
        model,
        optimizer,
        inner_steps=30,
        mode="streaming",
        wire=wire,
        fragments=4,
        ledger=ledger,
        state=Path("state.safetensors"),
    )
    for sample in LedgerSampler(ledger, seed=1):
        print(sample)
        outer: OuterRound | None = diloco.step()
        if outer:
            print(outer.contributors, outer.flat(), [peer.compute_s for peer in outer.peers])
        progress: float = diloco.progress(1000)
        print(progress, diloco.outer_step, diloco.state_digest())
    diloco.finish()
    DiLoCo(comm, model, optimizer, **muloco(peers=4, wire="2bit"))
    DiLoCo(comm, model, optimizer, **sparseloco())


def outward(model: torch.nn.Module) -> None:
    with Publisher("127.0.0.1", model.state_dict()) as publisher:
        published: Publication = publisher.publish()
        print(published.version, published.delta_bytes)
    with Subscriber("127.0.0.1", model.state_dict()) as subscriber:
        version: int = subscriber.wait(timeout=1.0)
        print(version)


def data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    dist.init_process_group("pccl", init_method="pccl://127.0.0.1", world_size=2)
    return pccl.torch.DistributedDataParallel(model)
