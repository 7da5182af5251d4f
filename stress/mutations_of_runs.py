"""Rules of the protocol, and what breaks them: who is in the run, and why things fail."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = [
    Mutant(
        "a team is admitted as a whole",
        "return not info.team or len(self._members[info.team]) == info.team_size",
        "return True",
    ),
    Mutant(
        "a team is lost together",
        "                if number not in lost:\n",
        "                if False:\n",
    ),
    Mutant(
        "all groups have the teams in one order",
        "return [*in_order(whole)]",
        "return [*whole]",
    ),
    Mutant(
        "that is so after a restart, too",
        "in_order({number: resumes[number].info for number in sorted(resumes)})",
        "{number: resumes[number].info for number in sorted(resumes)}",
    ),
    Mutant(
        "half a team does not come back",
        "in halves({number: one.resume.info for number, one in back.items()}):",
        "in ():",
    ),
    Mutant(
        "who is cut off takes its team along into the journal",
        "[*numbers, *self.partners(numbers)]",
        "numbers",
    ),
    Mutant(
        "who has gone with its team is not dropped once more",
        "why for number, why in whys.items() if number in self.membership.peers}",
        "why for number, why in whys.items()}",
    ),
    Mutant(
        "a team has no more members than it says",
        "        if info.team and len(members) == info.team_size:\n",
        "        if False:\n",
    ),
    Mutant(
        "the first tick after an input is recorded",
        "        first, self._news = self._news and (self._timed or recovering), False\n",
        "        first = False\n",
    ),
    Mutant(
        "a record has no contributions",
        'return replace(event, message=replace(vote, data=b""))',
        "return event",
    ),
    Mutant(
        "a record has no keys",
        "        if self._key is None or not KEY.fullmatch(key):\n",
        "        if True:\n",
    ),
    Mutant(
        "a master that begins anew is fed as one",
        "        self.master = inputs.begin(began, _zeros, SECRET)\n",
        "        self.master = self.master or inputs.begin(began, _zeros, SECRET)\n",
    ),
    Mutant(
        "what is said too early is not kept",
        "        if self._restart is not None and not isinstance(message, m.Leave):\n",
        "        if False:\n",
    ),
    Mutant(
        "a failure is told with its cause",
        "m.Finished(running.seq, False, running.why, running.cause)",
        "m.Finished(running.seq, False, running.why)",
    ),
    Mutant(
        "a peer may not give any cause",
        "cause = m.Cause(vote.cause) if vote.cause in CAUSES else m.Cause.OTHER",
        "cause = vote.cause",
    ),
    Mutant(
        "who has failed by itself does not try again",
        "again=not own)",
        "again=True)",
    ),
    Mutant(
        "one peer cannot fill the master's memory with its votes",
        "        if self.held(peer) + vote.held > HELD_MAX:\n",
        "        if False:\n",
    ),
    Mutant(
        "votes that wait no longer take no memory",
        "        voter.held -= round_.votes[peer].held\n",
        "",
    ),
    Mutant(
        "of several runs that come back, that of most goes on",
        "return max(reversed(self._back), key=lambda run: len(self._back[run]))",
        "return next(iter(self._back))",
    ),
    Mutant(
        "who comes back alone is waited with for longer",
        "return waited_s > UNJOURNALED_WAIT_S and not self.missing and not alone",
        "return waited_s > UNJOURNALED_WAIT_S and not self.missing",
    ),
    Mutant(
        "a journal knows its run",
        "        if self._run not in (None, resume.run):\n",
        "        if False:\n",
    ),
    Mutant(
        "what begins with the master's incarnation fits into 32 bits",
        "INCARNATION_MAX = 1 << 15",
        "INCARNATION_MAX = 1 << 18",
    ),
    Mutant(
        "the rings that a peer knows are of the peers that it knows",
        "len(ring.order) == len(known) == len({*ring.order} & known)",
        "True",
    ),
    Mutant(
        "who is lost while it waits for the others does not count",
        "                self._held[run] -= weight(self._back[run].pop(number).resume)\n",
        "                self._held[run] -= weight(self._back[run][number].resume)\n",
    ),
    Mutant(
        "a run that went on after a loss does not take the lost back",
        "        if accepted:\n            self._members.go_on()\n",
        "",
    ),
    Mutant(
        "a round of the whole run that ends goes on without the lost",
        "        if round_.id.group is None:\n            self.membership.go_on()\n",
        "",
    ),
    Mutant(
        "a group that is lost before another one is given up",
        "        if self.size():\n            self._lost = ",
        "        if False:\n            self._lost = ",
    ),
    Mutant(
        "an optimisation that ends goes on without the lost",
        "        self._membership.go_on()\n        self._history",
        "        self._history",
    ),
    Mutant(
        "newcomers to a run that all were lost from begin anew",
        "        self.membership.go_on()\n        heard",
        "        heard",
    ),
    Mutant(
        "a master that was away begins a new incarnation",
        "incarnation, next_peer = self.run.numbers.incarnation + 1, self._members.next_number",
        "incarnation, next_peer = self.run.numbers.incarnation, self._members.next_number",
    ),
    Mutant(
        "streams through which a collective has failed are replaced",
        "        self._groups[running.group].broken = True\n",
        "        pass\n",
    ),
    Mutant(
        "streams that have lost data are replaced",
        "            self._groups[group].broken = True\n",
        "            pass\n",
    ),
    Mutant(
        "nothing starts on streams that have lost data",
        "            self._groups.repair(group_number)\n",
        "            pass\n",
    ),
    Mutant(
        "who hears of a failure has new streams",
        "            self._groups.repair(running.group)\n",
        "            pass\n",
    ),
    Mutant(
        "a master that begins anew while it recovers expects the same peers",
        "        known = self._expected, self._complete, self._refused\n",
        "        known = frozenset(), self._complete, self._refused\n",
    ),
    Mutant(
        "who waits for a master that begins anew while it recovers has to come back",
        "return conn in self.backlog or conn in self.recovery",
        "return False",
    ),
    Mutant(
        "whom the master cannot reach either goes",
        "            if self.dials.get(number):\n",
        "            if False:\n",
    ),
    Mutant(
        "whom several cannot reach goes",
        "            if many and number not in self._dialling:\n",
        "            if False:\n",
    ),
    Mutant(
        "against the master's dial it takes more to go",
        "needed = SEVERAL_AGAINST_DIAL if number in self.dials else SEVERAL",
        "needed = SEVERAL",
    ),
    Mutant(
        "who reaches nobody goes",
        "if len(by[number]) >= needed and alone and not by[number] & self._dialling:",
        "if False:",
    ),
    Mutant(
        "one word removes nobody",
        "SEVERAL = 2\n",
        "SEVERAL = 1\n",
    ),
    Mutant(
        "what the master finds does not count where it is not",
        "if why and not reach.matters(peer.info, peer.seen, accusers):",
        "if False:",
    ),
    Mutant(
        "rings go around what is blocked",
        "                return BARRED\n",
        "                return 3\n",
    ),
    Mutant(
        "suspects are tried on those beyond suspicion",
        "return (0, 1, 3)[",
        "return (0, 1, 2)[",
    ),
    Mutant(
        "links that were blocked long ago get another chance before anybody goes",
        "            blame.forgive()\n",
        "",
    ),
    Mutant(
        "of two that must meet, who only accuses a peer that the master reaches goes",
        "return trouble, bool(refuted) - cleared, number not in proven, number",
        "return trouble, 0, number not in proven, number",
    ),
    Mutant(
        "who was reached before gets some attempts",
        "if attempts < ATTEMPTS and any(",
        "if False and any(",
    ),
    Mutant(
        "accusations end with a success",
        "        self._current.clear()\n",
        "",
    ),
    Mutant(
        "nobody is blamed for who is gone",
        "            blame.forget(number)\n",
        "            pass\n",
    ),
    Mutant(
        "what did not go around the rings shows nothing of them",
        "            if data is None and even and goes_around(work):\n",
        "            if True:\n",
    ),
    Mutant(
        "what only one member gives does not come to that one",
        "    if work.rows and sum(rows > 0 for rows in work.rows) < 2:\n",
        "    if False:\n",
    ),
    Mutant(
        "the bytes of results that peers may lack are bounded",
        "len(small) < self.small_max and held + nbytes <= SMALL_BYTES_MAX",
        "len(small) < self.small_max",
    ),
    Mutant(
        "torn content is no candidate",
        "return offer.strategy != RECEIVE_ONLY and offer.whole",
        "return offer.strategy != RECEIVE_ONLY",
    ),
    Mutant(
        "what a transfer in place may have overwritten is fetched again",
        "vote.payload.overwritten(sync.overwritten.get(number, ()))",
        "vote.payload",
    ),
    Mutant(
        "a restarted master is told of what has failed for all",
        "            tuple(known.failures),\n",
        "            (),\n",
    ),
    Mutant(
        "a restarted master tells of a failure those that have missed it",
        "        yield failure.seq, number, m.Failed(failure)\n    lost",
        "        yield from ()\n    lost",
    ),
    Mutant(
        "a restarted master tells nobody of a failure again",
        "        if resumes[number].last_seq < failure.seq\n",
        "        if True\n",
    ),
    Mutant(
        "what has failed in a group is nothing to others",
        "        and (failure.is_run_wide or resumes[number].info.group == group)\n",
        "",
    ),
    Mutant(
        "what has failed before it joined is nothing to a newcomer",
        "            known.heard(admitted.heard)\n",
        "",
    ),
    Mutant(
        "what was missed is told in order",
        "sorted(_lacked(before), key=lambda one: one[:2])",
        "_lacked(before)",
    ),
    Mutant(
        "what other groups may not have heard of is kept",
        "if one.seq > seq or one.is_run_wide]",
        "if one.seq > seq]",
    ),
    Mutant(
        "an abort does not show that all have heard of its start",
        "        if finished.ok:\n"
        "            if not one.pair:  # all members have voted that they have it\n",
        "        if not one.pair:\n            self._knowledge.all_heard(finished.seq)\n"
        "        if finished.ok:\n            if False:\n",
    ),
    Mutant(
        "nobody is told of a failure that cannot be",
        "        and all(_is_failure(one, resume.last_seq) for one in resume.failed)\n",
        "",
    ),
    Mutant(
        "a restarted master is told of what may have been overwritten",
        "offer = one.vote.offer.overwritten(one.overwritten)",
        "offer = one.vote.offer",
    ),
    Mutant(
        "whose content may be wanted keeps it until the end",
        "in_place = offer.torn or _worthless(offer, revision, last, peer in newcomers)",
        "in_place = True",
    ),
    Mutant(
        "who receives in place is not refused, whatever it has offered",
        "and not (offer.torn or one.overwritten)",
        "and not offer.torn",
    ),
    Mutant(
        "who sends only and is torn is dropped",
        "        elif offer.strategy == SEND_ONLY and offer.torn:\n",
        "        elif False:\n",
    ),
    Mutant(
        "new rings interrupt what runs on the old ones",
        "            self._collectives.interrupt(self._table.of_group(group_number), why)\n"
        "        return True",
        "        return True",
    ),
    Mutant(
        "a wait is shown since its first caller came",
        "        first_s = min(since_s.values(), default=self._now_s)\n",
        "        first_s = max(since_s.values(), default=self._now_s)\n",
    ),
    Mutant(
        "who is waited for is shown",
        "late, why = self._run.voting.absent(round_), entering(self._run, round_)",
        "late, why = [*round_.votes], entering(self._run, round_)",
    ),
    Mutant(
        "what a restarted master has known before is not shown as of old",
        "        running.since_s = now_s\n",
        "",
    ),
    Mutant(
        "the rates of links are shown as they were last measured",
        "        group.rates = {hop: link.rate for hop, link in measured.items()}\n",
        "",
    ),
    Mutant(
        "a plan of who receives what is shown from its beginning",
        "        sync.progress.clear()\n",
        "",
    ),
    Mutant(
        "who holds the result does not say how far it is",
        "        if one.state is State.RUNNING and one.seq in self._by_seq:\n",
        "        if True:\n",
    ),
    Mutant(
        "an abort has cost all since the start of what was aborted",
        "            self._lost_since_s = min(self._lost_since_s, since_s)\n",
        "            self._lost_since_s = since_s\n",
    ),
    Mutant(
        "an aborted collective is counted by what has ended it",
        "                running.reason = REASONS.get(cause, reason)\n",
        "",
    ),
    Mutant(
        "a site is left over the best link that was measured",
        "key=lambda hop: (-measured[hop].rate, hop))",
        "key=lambda hop: (measured[hop].rate, hop))",
    ),
    Mutant(
        "who is entered is not who is left",
        "(alone or a != entry.get(one)) and ",
        "",
    ),
    Mutant(
        "peers that cannot reach each other are at two sites",
        "        if not delays or min(delays) > SITE_US:\n",
        "        if delays and min(delays) > SITE_US:\n",
    ),
    Mutant(
        "two sites are compared once",
        " or other in self._apart[name] or both in done:",
        " or both in done:",
    ),
    Mutant(
        "a link that is not measured is as those between its sites",
        "        if between is not None:\n",
        "        if False:\n",
    ),
    Mutant(
        "who was dropped hears why from the next master",
        "        if number in self._refused:\n",
        "        if False:\n",
    ),
    Mutant(
        "or from this one when it comes back",
        "            known = self.run.refused.get(info.peer, GIVEN_UP)\n",
        "            known = GIVEN_UP\n",
    ),
    Mutant(
        "its waiting calls fail as they would have",
        "        self._dropped(Result(refused.result), why, refused.cause)\n",
        "        self._dropped(Result(refused.result), why, m.Cause.OTHER)\n",
    ),
    Mutant(
        "it is written down why a peer was dropped",
        "        self.outbox.do(Forget(number, refusal))\n",
        "        self.outbox.do(Forget(number))\n",
    ),
]
