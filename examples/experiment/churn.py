"""Makes a run in which peers are killed: each is a process, and another one takes its place.

A ledger gives the samples of the dead to others, so this run, too, learns each sample once. Peer 0
is never killed; the others are in turn. The process that takes over has been loaded before, like a
machine on standby.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import pccl
from experiment.runs import Result, Run
from experiment.training import SHOWN, Replicas, diloco, show, text_of
from pccl.cli.processes import follow_parent
from pccl.data import Ledger

_LAST = 3  # rounds before the end in which nobody is killed


class Peer:
    """A process that trains, as the one that has started it sees it."""

    def __init__(self, run: Run, address: str) -> None:
        context = multiprocessing.get_context()
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_learn, args=(other, run, address), daemon=True)
        self._process.start()
        other.close()
        self.tx_bytes = 0

    def go(self) -> None:
        """Lets it join the run, as soon as it has loaded all."""
        self.connection.send("go")

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def train(run: Run) -> Result:
    """Makes the run.

    Raises:
        RuntimeError: a peer has failed, or they do not hold the same bits at the end.
    """
    began_s = time.monotonic()
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = [Peer(run, master.address) for _ in range(run.arm.peers)]
        everyone = [*peers, Peer(run, master.address)]  # the last one stands by
        try:
            for peer in peers:
                peer.go()
            kills, ends = 0, {}
            for peer, news in _hear(run, peers):
                peer.tx_bytes = news[1]
                if len(news) > 2:
                    ends[peer] = news[2:]
                if (
                    peer is peers[0]
                    and len(news) == 2
                    and news[0] % max(1, run.size.rounds // SHOWN) == 0
                ):
                    show(run, min(1.0, news[0] / run.size.rounds))  # lost samples take more rounds
                due = run.arm.kill_every * (kills + 1)
                if peer is peers[0] and due <= news[0] <= run.size.rounds - _LAST:
                    slot = 1 + kills % (len(peers) - 1)
                    peers[slot].kill()
                    peers[slot] = everyone[-1]
                    peers[slot].go()
                    everyone.append(Peer(run, master.address))
                    kills += 1
        finally:
            for peer in everyone:
                peer.kill()
    if len({digest for _, digest in ends.values()}) != 1:
        raise RuntimeError(f"{run.label}: the peers do not hold the same bits at the end")
    return Result(
        size=run.size,
        arm=run.arm,
        rates=run.rates,
        seed=run.seed,
        loss=ends[peers[0]][0],
        tx_bytes=sum(peer.tx_bytes for peer in everyone) / run.arm.peers,
        kills=kills,
        seconds=round(time.monotonic() - began_s, 1),
    )


def _hear(run: Run, peers: list[Peer]) -> Iterator[tuple[Peer, tuple[Any, ...]]]:
    """What peers report, until all have ended that were in the run before peer 0 has ended."""
    ended: set[Peer] = set()

    def is_awaited(peer: Peer) -> bool:
        return peer not in ended and (peer.tx_bytes > 0 or peers[0] not in ended)

    while any(map(is_awaited, peers)):
        by_connection = {peer.connection: peer for peer in peers if peer not in ended}
        for connection in wait(by_connection):
            peer = by_connection[connection]
            if peer not in peers:  # killed because of the report before this one
                continue
            try:
                news = connection.recv()
            except EOFError:
                raise RuntimeError(f"{run.label}: a peer has failed: see above") from None
            if len(news) > 2:
                ended.add(peer)
            yield peer, news


def _learn(parent: Connection, run: Run, address: str) -> None:
    """Trains as one peer; reports (outer step, bytes) after each round, and at the end a loss."""
    follow_parent()
    torch.set_num_threads(1)
    size, own = run.size, run.size.batch // run.arm.peers
    text = text_of(size, run.seed)
    replicas = Replicas(run, 1)
    parent.recv()
    with pccl.Communicator(address) as comm:
        ledger = Ledger(size.steps * size.batch, share=own * run.arm.inner_steps)
        trainer = diloco(run, comm, replicas, 0, ledger=ledger)
        while not ledger.finished:
            consumed = ledger.consumed
            numbers = [number for part in ledger.share for number in part]
            batches = [numbers[i : i + own] for i in range(0, len(numbers), own)]
            for batch in trainer.round_of(batches):
                under_way = trainer.inner_step * size.batch
                progress = min(1.0, (consumed + under_way) / ledger.samples)
                replicas.backward(text.samples(batch)[None], progress)
                trainer.step(samples=len(batch))
            parent.send((trainer.outer_step, trainer.tx_bytes))
        trainer.finish()
        loss = replicas.validate(text.validation())
        parent.send((trainer.outer_step, trainer.tx_bytes, loss, trainer.state_digest()))
