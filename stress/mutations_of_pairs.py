"""Rules of sends between two peers, and what breaks them: see mutants.py."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = [
    Mutant(
        "a send starts when its two peers have voted",
        "return 2 if round_.id.pair else self._membership",
        "return self._membership",
    ),
    Mutant(
        "a send to somebody who is gone fails at once",
        "gone = [one for one in round_id.pair or ()",
        "gone = [one for one in ()",
    ),
    Mutant(
        "the loss of one ends a send for the other",
        "        if titles:\n            self.open.close(round_)\n",
        "        if False:\n            self.open.close(round_)\n",
    ),
    Mutant(
        "the loss of a third ends no send that waits",
        "for one in round_.id.pair or () if one in all_]",
        "for one in all_]",
    ),
    Mutant(
        "sends of different arrays do not start",
        "        if round_.id.kind in (Kind.START, Kind.PAIR) and len(round_.votes) > 1:\n",
        "        if round_.id.kind is Kind.START and len(round_.votes) > 1:\n",
    ),
    Mutant(
        "a vote for a send names two peers, and its voter among them",
        "return len(vote.pair) == 2 and len({*vote.pair}) == 2 and number in vote.pair",
        "return True",
    ),
    Mutant(
        "no other vote names any",
        "return not vote.pair",
        "return True",
    ),
    Mutant(
        "the loss of a third, or a failed collective, interrupts no send",
        "if running.group == group and not running.paired",
        "if running.group == group",
    ),
    Mutant(
        "the loss of one interrupts a send",
        "if one.paired and one.members & lost]",
        "if False]",
    ),
    Mutant(
        "a send that fails interrupts nothing else",
        "        if running.paired:\n            return [running]\n",
        "",
    ),
    Mutant(
        "a send commits only if both are left",
        "and not (running.paired and len(running.members) < 2)",
        "",
    ),
    Mutant(
        "what was sent and is lost interrupts the send",
        "            self.interrupt([running], why)\n            return True\n",
        "            return True\n",
    ),
    Mutant(
        "a send is stalled by its own peers alone",
        "if running is None or not running.paired or number not in running.members:",
        "if running is None or not running.paired:",
    ),
    Mutant(
        "who loses what it has sent says so",
        "self._outbox.say(m.Stalled(self._streams.epoch, one.seq, why[:WHY_MAX]))",
        "pass",
    ),
    Mutant(
        "a stream that is lost is used no more",
        "            self._lost.add(self._direct.pop(peer))\n",
        "            self._lost.add(self._direct[peer])\n",
    ),
    Mutant(
        "streams to those who have left are closed",
        "        self.close(self._direct.pop(peer) for peer in sorted(gone))\n",
        "",
    ),
    Mutant(
        "a send has a tag of its own for each pair",
        'return f"{self.tag} of {self.pair}" if self.pair else self.tag',
        "return self.tag",
    ),
    Mutant(
        "peers that wait for each other in sends are told",
        "            if self.open.any_pair and (ends",
        "            if False and (ends",
    ),
    Mutant(
        "a circle may have several members",
        "                    todo.append(other)\n",
        "                    pass\n",
    ),
    Mutant(
        "who has several threads may come yet",
        "and pairs and (held or other.id.kind in EXCLUSIVE):",
        "and pairs:",
    ),
    Mutant(
        "a send that was launched keeps its peer from an exclusive call",
        "if _holds(each, awaited) or (exclusive and each.id.kind is Kind.PAIR):",
        "if _holds(each, awaited):",
    ),
    Mutant(
        "a peer that waits in a send is in the way of those alone who wait for it",
        "            if kind is Kind.PAIR:\n                continue\n",
        "",
    ),
    Mutant(
        "a peer that is stuck in a send is not in the way of all",
        "if vote.stuck and round_id.pair is None:",
        "if vote.stuck:",
    ),
    Mutant(
        "only those who are to come to a failed send are told of it later",
        "            for number in self._members(round_):\n",
        "            for number in self._membership.accepted(round_.id.group):\n",
    ),
    Mutant(
        "a restarted master knows a send from a collective",
        "was.tag, was.pair or ()",
        "was.tag, ()",
    ),
    Mutant(
        "a restarted master commits a send only if both are back",
        "running.paired = was.pair is not None",
        "pass",
    ),
]
