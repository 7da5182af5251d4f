"""Rules of the protocol, and what breaks them: see mutants.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken rule: what is replaced by what, in a file of pccl/protocol."""

    rule: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "the members of a collective are those of the plan under which it starts",
        "        if self._counted is not self.plan:",
        "        if not self._members:",
    ),
    Mutant(
        "patient callers are answered when a peer registers",
        "        self.evaluate(self.open.get(PENDING))\n",
        "        pass\n",
    ),
    Mutant(
        "a caller in a hurry is answered although the others are patient",
        "self.id == PENDING and all(vote.payload",
        "self.id == PENDING and any(vote.payload",
    ),
    Mutant(
        "a caller whose patience has ended is answered",
        "            self._outbox.say(m.Hurry(call))",
        "            pass",
    ),
    Mutant(
        "who is told of a start that it had missed is told once",
        "        self.knowledge.fails(failure)\n        transfer",
        "        transfer",
    ),
    Mutant(
        "a link that is measured again, with all others, does not change",
        "        if hop in optimisation.links:",
        "        if False:",
    ),
    Mutant(
        "nobody waits for the measurements of who is lost",
        "            if number not in lost and not lost >= {*senders}\n",
        "            if number not in lost\n",
    ),
    Mutant(
        "who is lost is no longer a member of an optimisation",
        "            optimisation.calls.pop(number, None)\n",
        "            pass\n",
    ),
    Mutant(
        "an optimisation ends when all is measured",
        "        if not optimisation.measuring:\n"
        "            self._probe(optimisation)\n\n    def has",
        "        self._probe(optimisation)\n\n    def has",
    ),
    Mutant(
        "a measurement of an earlier probe does not count",
        "            or optimisation.seq != measured.seq\n",
        "",
    ),
    Mutant(
        "the ring that was chosen is installed",
        "            group.rings = rings\n",
        "",
    ),
    Mutant(
        "a restarted master goes on with the rings as they were",
        "group.epoch, group.rings = resume.epoch, resume.rings",
        "group.epoch = resume.epoch",
    ),
    Mutant(
        "who missed the end of an optimisation is told it by the next master",
        "if before.optimized < done.optimized:",
        "if False:",
    ),
    Mutant(
        "an optimisation that one gives up ends for all",
        "if optimisation is None or optimisation.calls.get(number) != call:",
        "if True:",
    ),
    Mutant(
        "what is measured ends with its optimisation",
        "        one = self._transfers.by(seq)\n        if one is not None:\n",
        "        one = self._transfers.current\n        if one is not None and one.seq == seq:\n",
    ),
    Mutant(
        "who missed a small result is told it by the next master",
        "    for number, small in before.missed:\n",
        "    for number, small in ():\n",
    ),
    Mutant(
        "a small result is kept until nobody lacks it",
        "stable = min(peers[number].heard for number in round_.votes)",
        "stable = max(peers[number].heard for number in round_.votes) + 1",
    ),
    Mutant(
        "a peer keeps its small results",
        "        self._small.append(small)\n",
        "",
    ),
    Mutant(
        "a small result that is not final is voted on",
        "        self._outbox.say(m.FinishVote(one.seq, True))\n\n    def missed",
        "        self._keep(one, m.Small(one.seq, one.tag, (), data))\n\n    def missed",
    ),
    Mutant(
        "a collective commits only if all survivors hold the result",
        "ok = all(running.votes.values())",
        "ok = any(running.votes.values())",
    ),
    Mutant(
        "tensors that lie in different orders do not meet",
        "    return vote.payload, vote.data is None, vote.rows is None\n",
        "    work = vote.payload\n"
        "    parts = tuple(replace(part, layout='') for part in work.parts)\n"
        "    work = replace(work, layout='', parts=parts)\n"
        "    return work, vote.data is None, vote.rows is None\n",
    ),
    Mutant(
        "shared state that lies in another order does not fit",
        '            ("order in memory", described(elected.layout), described(own.layout)),\n',
        "",
    ),
    Mutant(
        "ranks of a ring that has changed unseen are an error",
        "if work.ring and work.ring != checksum(group.planned[0].order):",
        "if False:",
    ),
    Mutant(
        "rows that are given are those that are taken",
        "        found = misfit(rows)\n",
        "        found = None\n",
    ),
    Mutant(
        "rows go by ranks, and those are positions in the ring",
        "order = [number for number in rings[0].order if votes",
        "order = [number for number in sorted(votes) if votes",
    ),
    Mutant(
        "who says how many rows meets only who says so too",
        "    return vote.payload, vote.data is None, vote.rows is None\n",
        "    return vote.payload, vote.data is None\n",
    ),
    Mutant(
        "numbers of rows are as many as there are members",
        "len(gives) == len(takes) == work.members",
        "len(gives) == len(takes)",
    ),
    Mutant(
        "uneven rows do not show that a ring works",
        "if data is None and even and goes_around(work):",
        "if data is None and goes_around(work):",
    ),
    Mutant(
        "ranks that have changed unseen are an error",
        "work.members not in (0, len(round_.votes))",
        "work.members == 1",
    ),
    Mutant(
        "a vote says how many members it goes by where that decides how the data travels",
        "return replace(work, members=members), nbytes <= limit(members)",
        "return work, nbytes <= limit(members)",
    ),
    Mutant(
        "who does not say so is not merely out of date",
        "return self.what == other.what and both and mine != theirs",
        "return self.what == other.what and mine != theirs",
    ),
    Mutant(
        "peers that go by different ranks do not meet, and may try again",
        "            if any(sees_others(other, mine) for other in others):\n",
        "            if False:\n",
    ),
    Mutant(
        "the outcome waits for all survivors",
        "if len(running.votes) < len(running.members):",
        "if not running.votes:",
    ),
    Mutant(
        "a lost member is no longer waited for in a collective",
        "            one.members.difference_update(lost)\n",
        "",
    ),
    Mutant(
        "a lost member interrupts the running collectives",
        "self.interrupt(running, why, reason=Reason.PEER_LOST)",
        "pass",
    ),
    Mutant(
        "a failed vote interrupts the others",
        "if ok or running.why:",
        "if True:",
    ),
    Mutant(
        "a lost member's vote does not count in a round",
        "        self.voting.take_back(numbers)\n",
        "",
    ),
    Mutant(
        "rounds are looked at again when a member is lost",
        "            if round_ in self.open:  # it may have ended since\n",
        "            if False:\n",
    ),
    Mutant(
        "pending peers are accepted when nobody is left to admit them",
        "        if not self.membership.size():\n            self.admit()\n\n    def _leave_group",
        "\n    def _leave_group",
    ),
    Mutant(
        "the election is repeated when a member is lost",
        "        if gone:\n            self._elect(sync)\n",
        "",
    ),
    Mutant(
        "revisions start anew when the last holder is gone",
        "        state.revision = None\n        return True",
        "        return True",
    ),
    Mutant(
        "a synchronisation ends only when all receivers have verified",
        "            if not sync.fetching:\n                self._end(sync)",
        "            self._end(sync)",
    ),
    Mutant(
        "a plan is replaced even when the next election moves nothing",
        "if sync.fetching or sync.seq:",
        "if sync.fetching:",
    ),
    Mutant(
        "a vote that is withdrawn does not count",
        "                self.open.take_back(number, round_)\n                self._outbox.fail",
        "                self._outbox.fail",
    ),
    Mutant(
        "a new plan makes what was fetched before void",
        "one.planned and one.content == content",
        "one.planned",
    ),
    Mutant(
        "an interrupted collective is voted on",
        "self._outbox.say(m.FinishVote(one.seq, False, why[:WHY_MAX], cause))",
        "pass",
    ),
    Mutant(
        "a call is answered only when the engine has let go",
        "if one.outcome is None or not one.settled:",
        "if one.outcome is None:",
    ),
    Mutant(
        "the highest revision wins",
        "top = electors[top_peer].revision\n    if",
        "top = min(offered)\n    if",
    ),
    Mutant(
        "newcomers do not stand against those who were there",
        "electors = (veterans or standing) if last is not None",
        "electors = standing if last is not None",
    ),
    Mutant(
        "who offers too high a revision takes nothing",
        "receives = peer != elected and peer not in refused and",
        "receives = peer != elected and",
    ),
    Mutant(
        "who was refused holds nothing",
        "state.holders = set(sync.members) - sync.refused",
        "state.holders = set(sync.members)",
    ),
    Mutant(
        "a peer knows that it was refused",
        "if stood and offer.revision > result.revision:",
        "if False:",
    ),
    Mutant(
        "a refused peer does not say later that it holds the content",
        "            holds=without is None and ",
        "            holds=",
    ),
    Mutant(
        "nothing begins with fewer peers than are wanted",
        "if self._history.of(group).revision is None and len(members) < needed:",
        "if False:",
    ),
    Mutant(
        "a run that has begun goes on with any number",
        "if self._history.of(group).revision is None and len(members) < needed:",
        "if len(members) < needed:",
    ),
    Mutant(
        "who missed that nothing began is told so by the next master",
        "done.plan, short=done.short)",
        "done.plan)",
    ),
    Mutant(
        "nobody holds what has not begun",
        "            group.holders.clear()\n",
        "            pass\n",
    ),
    Mutant(
        "a group that begins anew repeats no number of a synchronisation",
        "        state.syncs = self._syncs\n",
        "        state.syncs += 1\n",
    ),
    Mutant(
        "an unchanged revision is legal once when somebody has joined",
        "            self.history.of(group).grown = True\n",
        "",
    ),
    Mutant(
        "what peers say is cut before it is told to others",
        "return text if len(text) <= WHY_MAX else",
        "return text if True else",
    ),
    Mutant(
        "a peer is one connection, and comes back once",
        '        if self._known(conn, "it came back twice"):\n',
        "        if False:\n",
    ),
    Mutant(
        "a group that is empty is forgotten",
        "            self.groups.forget(group)\n",
        "",
    ),
    Mutant(
        "the same tag with other work is noticed",
        "                self._mixed[round_.id] = None\n",
        "                pass\n",
    ),
    Mutant(
        "calls that can never meet are noticed",
        "                self._barred[round_.id, other.id] = None\n",
        "                pass\n",
    ),
    Mutant(
        "veterans decide, and not newcomers",
        "{number for number in all_ if self._peers[number].veteran} or all_",
        "all_",
    ),
    Mutant(
        "who has completed a collective is a veteran",
        "            peer.veteran |= ok\n",
        "",
    ),
    Mutant(
        "so is who has completed a small one",
        "                self._membership.peers[number].veteran = True\n",
        "                pass\n",
    ),
    Mutant(
        "and who has synchronised",
        "            self._membership.peers[number].veteran = True\n        for",
        "            pass\n        for",
    ),
    Mutant(
        "a peer that comes back says whether it is a veteran",
        "            known.veteran,\n        )\n",
        "        )\n",
    ),
    Mutant(
        "a restarted master knows veterans",
        "        peer.veteran = number in before.veterans\n",
        "",
    ),
    Mutant(
        "also those that have only missed the news",
        "    veterans.update(*(each.open for each in collectives.values() if each.outcome))\n",
        "",
    ),
    Mutant(
        "half of those who decide are no majority",
        "        is_decided = 2 * most > len(electors)\n",
        "        is_decided = 2 * most >= len(electors)\n",
    ),
    Mutant(
        "nor are they among calls that exclude each other",
        "            if 2 * self._agreed(mine, theirs, electors) > len(electors):\n",
        "            if 2 * self._agreed(mine, theirs, electors) >= len(electors):\n",
    ),
    Mutant(
        "a dispute waits for who is on its way",
        "        return sum(beside or PENDING not in self.open.of(number) for number in free)\n",
        "        return 0\n",
    ),
    Mutant(
        "and for nobody who may wait for others",
        "        free = electors - round_.votes.keys() - are_held(self.open, self.absent)\n",
        "        free = electors - round_.votes.keys()\n",
    ),
    Mutant(
        "a dispute of two calls waits for a third one that may have most",
        "            if {one.id for one in each} & {*pair}\n",
        "            if {one.id for one in each} == {*pair}\n",
    ),
    Mutant(
        "most must ask for the same",
        "        if mine.id not in self._mixed:\n",
        "        if True:\n",
    ),
    Mutant(
        "a loss may settle a dispute",
        "        self._settle()\n        for round_ in self.open:\n",
        "        for round_ in self.open:\n",
    ),
    Mutant(
        "a round whose votes differ does not commit",
        "            and round_.id not in self._mixed\n",
        "",
    ),
    Mutant(
        "who stands alone hears of a mismatch",
        "        self._dismissals.dismiss_all(texts, result, m.Cause.MISMATCH)\n",
        "        self._dismissals.dismiss_all(texts, result)\n",
    ),
    Mutant(
        "who left before the result holds nothing",
        "            transfer.vote = msgspec.structs.replace(transfer.vote, holds=holds)\n",
        "            pass\n",
    ),
    Mutant(
        "peers that are stuck in different calls are noticed",
        "if mine.votes[peer].stuck:",
        "if False:",
    ),
    Mutant(
        "a call of one group is in nobody's way in another",
        "scope = None if mine.id.group is None and kind in RUN_WIDE else voter.group",
        "scope = None",
    ),
    Mutant(
        "a loss in one group interrupts no other",
        "if running.group == group and not running.paired",
        "if not running.paired",
    ),
    Mutant(
        "a group's round ends when those of the group have voted",
        "return 2 if round_.id.pair else self._membership.size(round_.id.group)",
        "return 2 if round_.id.pair else self._membership.size()",
    ),
    Mutant(
        "a peer that was given up cannot come back",
        "self._complete and number not in self._expected",
        "False",
    ),
    Mutant(
        "a journal that could not be written does not shut out those who came after",
        "            known = journal.accepted, journal.complete, journal.refused\n",
        "            known = journal.accepted, True, journal.refused\n",
    ),
    Mutant(
        "nor does it where nobody had been accepted yet",
        "(journal.accepted or not journal.complete)",
        "journal.accepted",
    ),
    Mutant(
        "a run that went on without a peer does not take it back after a restart",
        "for number in outdated({number: one.resume for number, one in back.items()}):",
        "for number in ():",
    ),
    Mutant(
        "epochs do not begin anew with the master",
        "        self._epoch = incarnation << EPOCH_SHIFT\n",
        "",
    ),
    Mutant(
        "a start that was lost with the master fails for all",
        "if resumes[number].last_seq < seq:",
        "if False:",
    ),
    Mutant(
        "a caller who gives up while the master is away is told at once",
        "        elif not self._outbox.known:\n",
        "        elif False:\n",
    ),
    Mutant(
        "a caller who gave up before the master was lost is told when it is lost",
        "for call, reason in self._withdrawals.all():",
        "for call, reason in ():",
    ),
    Mutant(
        "no peer goes on whose caller was told of a failure of what has succeeded",
        "if self._ghosts.late(call) and self.over is None:",
        "if False:",
    ),
    Mutant(
        "patience that ends while a ghost is in the way has ended",
        "        self._ghosts.follow(call, lambda: self.votes.hurry(call))\n",
        "",
    ),
    Mutant(
        "a peer that leaves for one ghost looks for no other",
        "            if self.over is not None:\n                return  # one of them",
        "            if False:\n                return  # one of them",
    ),
    Mutant(
        "no peer goes on whose caller was told of a failure of a round that has succeeded",
        'return found.get(str(self._places[call]), "")',
        'return ""',
    ),
    Mutant(
        "a call waits until the ghost in its place is gone, whose caller left",
        "        if place not in self._places.values():\n            return False",
        "        if True:\n            return False",
    ),
    Mutant(
        "the memory of a caller who has gone is not written to",
        "        if one.parting is None:\n            self._store(",
        "        if True:\n            self._store(",
    ),
    Mutant(
        "what is complete ends too when its caller leaves",
        "        Event.LEFT: State.ABORTING,\n    },\n    State.ABORTING",
        "    },\n    State.ABORTING",
    ),
    Mutant(
        "a caller who has gone is not voted for again",
        "            if one.unstarted and one.parting is None:\n",
        "            if one.unstarted:\n",
    ),
    Mutant(
        "what others agreed on without a caller who has gone is not missed twice",
        "            self._syncs.missed(done)\n",
        "            pass\n",
    ),
    Mutant(
        "the start of what a caller has left gets a no",
        "            self._outbox.say(m.FinishVote(seq, False, why, one.cause))",
        "            self._outbox.say(m.FinishVote(seq, True, why, one.cause))",
    ),
    Mutant(
        "who is told to stop, or has no more time, gives up what runs",
        "        Event.STOPPED: State.ABORTING,\n",
        "",
    ),
    Mutant(
        "a peer votes that it holds the result once it does",
        "        Event.HELD: State.COMPLETE,\n",
        "",
    ),
    Mutant(
        "who knows of the end of its synchronisation takes nothing back",
        "        one = self.open\n        return one if one is not None and one.call == call",
        "        one = self._current\n        return one if one is not None and one.call == call",
    ),
    Mutant(
        "who loses a stream after its own part is done says so",
        "            self._outbox.say(m.Stalled(self._streams.epoch, 0, why[:WHY_MAX]))\n",
        "            pass\n",
    ),
    Mutant(
        "a stream counts also when the engine has forgotten the op",
        "self.state is State.COMPLETE and self.outcome is None and self.data is None",
        "self.state is State.COMPLETE and self.outcome is None and not self.settled",
    ),
    Mutant(
        "a collective that stalls is interrupted",
        "if others and stalled.epoch == self._groups[group].epoch:",
        "if False:",
    ),
    Mutant(
        "a stall of an earlier epoch counts no more",
        "if others and stalled.epoch == self._groups[group].epoch:",
        "if others:",
    ),
    Mutant(
        "who can no longer serve shared state says so",
        "            self._outbox.say(m.Stalled(one.group.epoch, one.seq, why[:WHY_MAX]))\n",
        "            pass\n",
    ),
    Mutant(
        "a synchronisation that stalls is planned anew",
        "            self._outbox.note(why)\n            self._elect(sync)\n        else:\n",
        "            self._outbox.note(why)\n        else:\n",
    ),
    Mutant(
        "a synchronisation that stalls again and again ends",
        "        if sync.stalls < STALLS_MAX:\n",
        "        if True:\n",
    ),
    Mutant(
        "a stall of an earlier plan counts no more",
        "if sync is None or sync.seq != stalled.seq:",
        "if sync is None:",
    ),
    Mutant(
        "stragglers are those that others wait for",
        "            yield round_.id, self.absent(round_), ",
        "            yield round_.id, round_.votes, ",
    ),
    Mutant(
        "who is not admitted does not learn the run's number",
        "m.Welcome(info.peer, plain(warning))",
        "m.Welcome(info.peer, str(self.number))",
    ),
    Mutant(
        "who comes back knows the run's number",
        "        if self._run not in (None, resume.run):\n",
        "        if False:\n",
    ),
    Mutant(
        "who was not accepted has nothing to come back to",
        "        if not self.accepted:  # and so it",
        "        if False:  # and so it",
    ),
    Mutant(
        "two members send each other everything only if both do",
        "direct = is_direct(one.work, plan.rings, plan.peers)",
        "direct = is_direct(one.work, plan.rings, plan.peers) and number != plan.peers[0].peer",
    ),
    Mutant(
        "the shares of the rings are those of the plan, for all alike",
        "position, *share, root, named))",
        "position, *share, position, named))",
    ),
    Mutant(
        "each call has a nonce of its own",
        'b"call %d" % seq',
        'b"call"',
    ),
    Mutant(
        "each epoch has a nonce of its own",
        'b"epoch %d" % epoch',
        'b"epoch"',
    ),
    Mutant(
        "nonces cannot be computed without the master's secret",
        "key=self._secret, ",
        "",
    ),
]
