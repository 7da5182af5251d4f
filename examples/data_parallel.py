"""Data-parallel training with peers that come and go, each sample exactly once.

    pccl master &
    python examples/data_parallel.py &
    python examples/data_parallel.py &

Kill any of them, start more of them. A newcomer gets weights, momentum and the ledger, which
records which peer trains on which samples. It averages gradients in each step, so it needs fast
links; for slow links see examples/diloco.py.
"""

from __future__ import annotations

import torch
from language import Model, Text, options

import pccl
from pccl.data import Ledger, LedgerSampler


def average(comm: pccl.Communicator, tensors: list[object]) -> int:
    """Averages over all peers, or over the survivors of a loss; returns their number."""
    while True:
        try:
            return comm.all_reduce(tensors).world_size
        except pccl.PeerLostError:
            pass  # no tensor has changed: repeat without the lost peer
        except pccl.TooFewPeersError:
            return 1


def main(words: list[str] | None = None) -> None:
    """Trains until all samples are used."""
    args = options(__doc__ or "", samples=20_000, batch=64).parse_args(words)
    model = Model(args.width)
    momentum = {f"momentum.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}
    text = Text(args.text)
    ledger = Ledger(min(args.samples, len(text)), share=args.batch)
    loader = torch.utils.data.DataLoader(text, args.batch, sampler=LedgerSampler(ledger))
    tensors = {**model.state_dict(), **momentum}
    infos = [pccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()]
    shared = pccl.SharedState([*infos, *ledger.entries()])

    with pccl.Communicator(args.master_address) as comm:
        comm.sync_shared_state(shared, min_peers=args.min_peers)  # newcomers meet admit() below
        ledger.claim(comm)
        while not ledger.finished:
            loss = sum((model.loss(batch) for batch in loader), torch.zeros((), requires_grad=True))
            gradients = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
            vote = ledger.vote()
            peers = average(comm, [*gradients, vote])
            ledger.settle(vote)
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), momentum.values(), gradients, strict=True):
                    p -= 0.1 * v.mul_(0.9).add_(g)
            shared.push_revision()
            comm.admit(shared)
            ledger.claim(comm)
            if shared.revision % 20 == 0:
                done = f"{ledger.consumed} of {ledger.samples} samples"
                print(f"{done}: loss {loss.item():.3f}, {peers} peers", flush=True)
        comm.finish()
        print(f"weights {sum(p.sum().item() for p in model.parameters())!r}", flush=True)


if __name__ == "__main__":
    main()
