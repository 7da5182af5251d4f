"""Rules of what is sent before a collective starts, and what breaks them: see mutants.py."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = [
    Mutant(
        "what is sent before the start names the call of its sender, which the start repeats",
        "for before, number in hops(ring.order):",
        "for number, before in hops(ring.order):",
    ),
    Mutant(
        "a start says of which calls the predecessors' data may be",
        "before = tuple(calls.get(number, ()))",
        "before = ()",
    ),
    Mutant(
        "the engine is told the predecessors' calls",
        "started.nonce, *self._way(one), started.calls)",
        "started.nonce, *self._way(one))",
    ),
    Mutant(
        "nothing is sent early before a collective of the epoch has committed",
        "self.epoch == self.proven == self._knowledge.plan.epoch",
        "self.epoch == self._knowledge.plan.epoch",
    ),
    Mutant(
        "nothing is sent early on streams of an epoch that is over",
        "self.epoch == self.proven == self._knowledge.plan.epoch",
        "self.epoch == self.proven",
    ),
    Mutant(
        "only a collective that has committed proves an epoch",
        "self._streams.proven = one.epoch if finished.ok else 0",
        "self._streams.proven = one.epoch",
    ),
    Mutant(
        "what proves an epoch has started in it",
        "self._streams.proven = one.epoch if finished.ok else 0",
        "self._streams.proven = self._streams.epoch if finished.ok else 0",
    ),
    Mutant(
        "what has no part of its own to send does not begin",
        "if not rings or work.what in EXCHANGES or work.what == CollectiveKind.BARRIER:",
        "if not rings:",
    ),
    Mutant(
        "who knows other ranks than the plan's does not begin",
        "return work.members in (0, len(order)) and work.ring in (0, checksum(order))",
        "return True",
    ),
]
