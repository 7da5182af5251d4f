"""A peer's part in an optimisation: it measures links by a transfer whose content is arbitrary."""

from __future__ import annotations

from dataclasses import replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail, Measure
from pccl.protocol.peer.ghosts import Ghosts
from pccl.protocol.peer.knowledge import Knowledge
from pccl.protocol.peer.outbox import Outbox
from pccl.protocol.peer.transfers import Transfer, Transfers
from pccl.protocol.rounds import WITHDRAWN, Kind


class Optimisations:
    """Handles probes and results of optimisations."""

    def __init__(
        self, knowledge: Knowledge, outbox: Outbox, ghosts: Ghosts, transfers: Transfers
    ) -> None:
        self._knowledge, self._outbox = knowledge, outbox
        self._ghosts, self._transfers = ghosts, transfers
        self._holders: tuple[int, ...] = ()

    # ---- probes ----

    def probed(self, probe: m.Probe) -> None:
        """The master wants the rate from other peers, which measure likewise."""
        one = self._transfers.of(probe.call)
        if one is not None:
            self._transfers.void_fetch(one)
            self._transfers.plan(one, probe.seq, probe.nonce, None, probe.peers)
            self._holders = probe.peers
            self._outbox.do(Measure(one.call, probe.seq, probe.peers))

    def fetch(self, op: int, seq: int) -> None:
        """The caller has memory for a probe; ignored if the probe is not the current one."""
        one = self._transfers.by(seq)
        if one is not None and one.optimises:
            self._transfers.fetch(one, op, self._holders)

    def measured(self, seq: int, rate: int, delay_us: int) -> None:
        """The caller reports the result of a probe, which ends."""
        one = self._transfers.by(seq)
        if one is not None:
            self._transfers.void_fetch(one)
            self._outbox.say(m.Measured(seq, rate, delay_us))

    # ---- the end ----

    def optimized(self, result: m.OptimizeResult) -> None:
        """The optimisation has ended."""
        self._knowledge.learn(optimized=result.round)
        self._ghosts.lay(result.call)
        one = self._transfers.current
        if one is not None and one.call == result.call:
            self._transfers.end(one, result)

    def release(self, one: Transfer, fail: Fail) -> None:
        """A caller leaves before its optimisation has ended."""
        result = WITHDRAWN[Kind.OPTIMIZE]
        self._transfers.release(one, replace(fail, result=result, phase=one.phase))

    # ---- a restarted master ----

    def missed(self, done: m.Done) -> None:
        """The optimisation that others have completed since, if this peer's caller has left."""
        self._knowledge.learn(optimized=done.optimized)

    def resume(self, one: Transfer, before: m.Done, done: m.Done) -> None:
        """Continues with a restarted master, which knows `done`; this peer knew `before`."""
        if before.optimized < done.optimized:
            self.optimized(m.OptimizeResult(one.call, done.optimized))
            return
        if one.planned:  # the next probes begin anew
            self.probed(m.Probe(one.call, 0, ()))
        self._outbox.say(one.vote)
