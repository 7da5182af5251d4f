"""Breaks one rule at a time, and demands that simulated runs or tests of single rules fail.

    python stress/mutants.py [--seeds 1000] [--only WORD]

Each mutant is a copy of the package with one line changed. The exit code is 1 when one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_FAILURE = """
import random
import sys
import hostile
import programs
import test_blame
import test_master_rules
import test_recovery
import test_simulation
import test_sync_rules
modules = (test_master_rules, test_sync_rules, test_blame, test_recovery)
for name, test in [each for module in modules for each in vars(module).items()]:
    if name.startswith("test_") and not test.__code__.co_argcount:
        try:
            test()
        except BaseException as error:
            print(f"{name}: {type(error).__name__}"[:90])
            sys.exit()
for seed in range(int(sys.argv[1])):
    try:
        programs.play(programs.draw(seed))
        test_simulation.simulate(seed)
        hostile.siege(hostile.draw_script(random.Random(seed)), seed)
    except BaseException as error:
        print(f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0][:90])
        break
else:
    print("SURVIVED")
"""


@dataclass(frozen=True)
class Mutant:
    """One broken rule: what is replaced by what, in a file of pccl/protocol."""

    rule: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "patient callers are answered when a peer registers",
        "            self._evaluate(self._rounds.get(PENDING))",
        "            self._rounds.get(PENDING)",
    ),
    Mutant(
        "a caller in a hurry is answered although the others are patient",
        "self.id == PENDING and all(vote.payload",
        "self.id == PENDING and any(vote.payload",
    ),
    Mutant(
        "a caller whose patience has ended is answered",
        "            self._calls[call] = m.PendingVote(call, vote.stuck)\n            self._say",
        "            self._calls[call] = m.PendingVote(call, vote.stuck)\n            repr",
    ),
    Mutant(
        "who is told of a start that it had missed is told once",
        "        self._last_seq = max(self._last_seq, refusal.seq)",
        "        pass",
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
        "            self._probe(optimisation)\n\n    def _opt",
        "        self._probe(optimisation)\n\n    def _opt",
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
        "if syncing.optimises and before.optimized < done.optimized:",
        "if False:",
    ),
    Mutant(
        "an optimisation that one gives up ends for all",
        "        elif self._optimises(number, call):\n",
        "        elif False:\n",
    ),
    Mutant(
        "what is measured ends with its optimisation",
        "plan = None if syncing is None or syncing.outcome is not None else syncing.plan\n"
        "        if syncing is not None and plan is not None and plan.seq == seq:\n"
        "            self._void_fetch(syncing)\n",
        "plan = None if syncing is None else syncing.plan\n"
        "        if syncing is not None and plan is not None and plan.seq == seq:\n"
        "            self._void_fetch(syncing)\n",
    ),
    Mutant(
        "who missed a small result is told it by the next master",
        "        for number, small in before.missed:\n",
        "        for number, small in ():\n",
    ),
    Mutant(
        "a small result is kept until nobody lacks it",
        "stable = min(self.peers[number].heard for number in round_.votes)",
        "stable = max(self.peers[number].heard for number in round_.votes) + 1",
    ),
    Mutant(
        "a peer keeps its small results",
        "        self._small.append(small)\n",
        "",
    ),
    Mutant(
        "a small result that is not final is voted on",
        "        self._say(m.FinishVote(started.seq, True))\n",
        "        self._keep(collective, m.Small(started.seq, collective.tag, (), started.data))\n",
    ),
    Mutant(
        "a collective commits only if all survivors hold the result",
        "ok = all(running.votes.values())",
        "ok = any(running.votes.values())",
    ),
    Mutant(
        "ranks that have changed unseen are an error",
        "work.members not in (0, len(round_.votes))",
        "work.members == 1",
    ),
    Mutant(
        "peers that go by different ranks do not meet, and may try again",
        "if asked.sees_others_than(wanted):",
        "if False:",
    ),
    Mutant(
        "the outcome waits for all survivors",
        "if len(running.votes) == len(running.members):",
        "if running.votes:",
    ),
    Mutant(
        "a lost member is no longer waited for in a collective",
        "            running.members -= lost.keys()\n",
        "",
    ),
    Mutant(
        "a lost member interrupts the running collectives",
        'self._interrupt(self._of_group(group_number), "lost " + "; ".join(lost.values()))',
        "pass",
    ),
    Mutant(
        "a failed vote interrupts the others",
        "if ok or running.why:",
        "if True:",
    ),
    Mutant(
        "a lost member's vote does not count in a round",
        "                    self._rounds.take_back(number, round_)\n        for group_number",
        "                    pass\n        for group_number",
    ),
    Mutant(
        "rounds are looked at again when a member is lost",
        "            if round_ in self._rounds:  # or it has ended since\n",
        "            if False:\n",
    ),
    Mutant(
        "pending peers are accepted when nobody is left to admit them",
        "        if not self._size():\n            self._admit()\n\n    def _leave_group",
        "\n    def _leave_group",
    ),
    Mutant(
        "the election is repeated when a member is lost",
        "            self._elect(group_number, sync)\n        if not self._size(",
        "            pass\n        if not self._size(",
    ),
    Mutant(
        "revisions start anew when the last holder is gone",
        "            group.revision = None\n            self._note(",
        "            self._note(",
    ),
    Mutant(
        "a synchronisation ends only when all receivers have verified",
        "            if not sync.fetching:\n                self._end_sync(group, sync)",
        "            self._end_sync(group, sync)",
    ),
    Mutant(
        "a plan is replaced even when the next election moves nothing",
        "if sync.fetching or sync.seq:",
        "if sync.fetching:",
    ),
    Mutant(
        "a vote that is withdrawn does not count",
        "                self._rounds.take_back(number, round_)\n                self._fail",
        "                self._fail",
    ),
    Mutant(
        "a new plan makes what was fetched before void",
        "and (old.fetch, old.digests) == (plan.fetch, plan.digests)",
        "",
    ),
    Mutant(
        "an interrupted collective is voted on",
        "self._say(m.FinishVote(collective.seq, False, why[:1000]))",
        "pass",
    ),
    Mutant(
        "a call is answered only when the engine has let go",
        "if collective.outcome is None or not collective.settled:",
        "if collective.outcome is None:",
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
        "group.holders = set(sync.members) - sync.refused",
        "group.holders = set(sync.members)",
    ),
    Mutant(
        "a peer knows that it was refused",
        "offer.strategy != RECEIVE_ONLY and offer.revision > result.revision",
        "False",
    ),
    Mutant(
        "a refused peer does not say later that it holds the content",
        "            holds=without is None,",
        "            holds=True,",
    ),
    Mutant(
        "nothing begins with fewer peers than are wanted",
        "if group.revision is None and len(members) < wanted:",
        "if False:",
    ),
    Mutant(
        "a run that has begun goes on with any number",
        "if group.revision is None and len(members) < wanted:",
        "if len(members) < wanted:",
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
        "        group.syncs = self._syncs\n",
        "        group.syncs += 1\n",
    ),
    Mutant(
        "an unchanged revision is legal once when somebody has joined",
        "            self._groups[group].grown = True\n",
        "",
    ),
    Mutant(
        "what peers say is cut before it is told to others",
        "return text if len(text) <= WHY_MAX else",
        "return text if True else",
    ),
    Mutant(
        "a peer is one connection, and comes back once",
        'if conn in self._by_conn:\n            self._remove(self._by_conn[conn], "it came back',
        'if False:\n            self._remove(self._by_conn[conn], "it came back',
    ),
    Mutant(
        "a group that is empty is forgotten",
        "            self._groups.pop(group_number, None)\n",
        "            pass\n",
    ),
    Mutant(
        "the same tag with other work is noticed",
        "asked, wanted = first.payload, mine.payload",
        "asked = wanted = mine.payload",
    ),
    Mutant(
        "calls that can never meet are noticed",
        "other = self._rounds.in_the_way(number, mine)",
        "other = None",
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
        "if running.group == group_number]",
        "if True]",
    ),
    Mutant(
        "a group's round ends when those of the group have voted",
        "if len(round_.votes) == self._size(round_.id.group):",
        "if len(round_.votes) == self._size():",
    ),
    Mutant(
        "a peer that was given up cannot come back",
        "recovery.journaled and number not in recovery.expected",
        "False",
    ),
    Mutant(
        "a journal that could not be written does not shut out those who came after",
        "journaled=journal.complete)",
        "journaled=True)",
    ),
    Mutant(
        "nor does it where nobody had been accepted yet",
        "(journal.accepted or not journal.complete)",
        "journal.accepted",
    ),
    Mutant(
        "a run that went on without a peer does not take it back after a restart",
        "for number in sorted(outdated(recovery.resumes)):",
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
        "        elif not self._linked:\n",
        "        elif False:\n",
    ),
    Mutant(
        "a caller who gave up before the master was lost is told when it is lost",
        "for call, late in list(self._withdrawn.items()):",
        "for call, late in ():",
    ),
    Mutant(
        "no peer goes on whose caller was told of a failure of what has succeeded",
        "if self._ghosts.late(call) and self.over is None:",
        "if False:",
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
        "        if collective.parting is None:\n            self._store(",
        "        if True:\n            self._store(",
    ),
    Mutant(
        "what is complete ends too when its caller leaves",
        "        Event.LEFT: State.ABORTING,\n    },\n    State.ABORTING",
        "    },\n    State.ABORTING",
    ),
    Mutant(
        "a caller who has gone is not voted for again",
        "            if collective.unstarted and collective.parting is None:\n",
        "            if collective.unstarted:\n",
    ),
    Mutant(
        "what others agreed on without a caller who has gone is not missed twice",
        "            self._missed_sync(done)\n",
        "            pass\n",
    ),
    Mutant(
        "the start of what a caller has left gets a no",
        "            self._say(m.FinishVote(seq, False, GONE if gone",
        "            self._say(m.FinishVote(seq, True, GONE if gone",
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
        "all(len(ring.order) == len(known) == len({*ring.order} & known) for ring in resume.rings)",
        "True",
    ),
    Mutant(
        "who is lost while it waits for the others does not count",
        "                self._held[run] -= weight(self._back[run].pop(number).resume)\n",
        "                self._held[run] -= weight(self._back[run][number].resume)\n",
    ),
    Mutant(
        "a run that went on after a loss does not take the lost back",
        "            self._lost.clear()\n        if isinstance",
        "            pass\n        if isinstance",
    ),
    Mutant(
        "a round of the whole run that ends goes on without the lost",
        "                self._lost.clear()  # the run goes on without them\n",
        "                pass\n",
    ),
    Mutant(
        "an optimisation that ends goes on without the lost",
        "        self._lost.clear()\n        self._optimize_rounds",
        "        self._optimize_rounds",
    ),
    Mutant(
        "newcomers to a run that all were lost from begin anew",
        "        self._lost.clear()\n        for number in fresh:",
        "        for number in fresh:",
    ),
    Mutant(
        "a master that was away begins a new incarnation",
        "incarnation = (self._next_seq >> INCARNATION_SHIFT) + 1\n        accepted",
        "incarnation = self._next_seq >> INCARNATION_SHIFT\n        accepted",
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
        "            group.blame.forget(number)\n",
        "            pass\n",
    ),
    Mutant(
        "what did not go around the rings shows nothing of them",
        "            if data is None and goes_around(work):\n",
        "            if True:\n",
    ),
    Mutant(
        "new rings interrupt what runs on the old ones",
        "            self._interrupt(self._of_group(group_number), why)\n        return True",
        "        return True",
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
        "syncing if syncing and syncing.call == call and syncing.outcome is None else None",
        "syncing if syncing and syncing.call == call else None",
    ),
    Mutant(
        "who loses a stream after its own part is done says so",
        "            self._say(m.Stalled(self._streams_epoch, 0, why[:1000]))\n",
        "            pass\n",
    ),
    Mutant(
        "a stream counts also when the engine has forgotten the op",
        "self.state is State.COMPLETE and self.outcome is None and self.data is None",
        "self.state is State.COMPLETE and self.outcome is None and not self.settled",
    ),
    Mutant(
        "a collective that stalls is interrupted",
        "        elif running and stalled.epoch == self._groups[group_number].epoch:\n",
        "        elif False:\n",
    ),
    Mutant(
        "a stall of an earlier epoch counts no more",
        "        elif running and stalled.epoch == self._groups[group_number].epoch:\n",
        "        elif running:\n",
    ),
    Mutant(
        "who can no longer serve shared state says so",
        "            self._say(m.Stalled(syncing.group.epoch, plan.seq, why[:1000]))\n",
        "            pass\n",
    ),
    Mutant(
        "a synchronisation that stalls is planned anew",
        "            self._note(why)\n            self._elect(group_number, sync)\n        else:\n",
        "            self._note(why)\n        else:\n",
    ),
    Mutant(
        "a synchronisation that stalls again and again ends",
        "        if sync.stalls < STALLS_MAX:\n",
        "        if True:\n",
    ),
    Mutant(
        "a stall of an earlier plan counts no more",
        "if sync is None or sync.seq != stalled.seq or number not in sync.members:",
        "if sync is None or number not in sync.members:",
    ),
    Mutant(
        "stragglers are those that others wait for",
        "            yield round_.id, self._absent(round_), ",
        "            yield round_.id, round_.votes, ",
    ),
    Mutant(
        "who is not admitted does not learn the run's number",
        "m.Welcome(number, plain(warning))",
        "m.Welcome(number, str(self.run))",
    ),
    Mutant(
        "who comes back knows the run's number",
        "        if resume.run != self.run:\n",
        "        if False:\n",
    ),
    Mutant(
        "who was not accepted has nothing to come back to",
        "        if not self.accepted:  # and so it",
        "        if False:  # and so it",
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


def survives(mutant: Mutant, seeds: int) -> str:
    """What the simulation says of a mutant."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory, "pccl")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pccl", package, ignore=ignore)
        texts = {path: path.read_text(encoding="utf-8") for path in package.glob("protocol/*.py")}
        if sum(text.count(mutant.old) for text in texts.values()) != 1:
            return f"SURVIVED: {mutant.old!r} does not stand in the protocol just once"
        for path, text in texts.items():
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        search = os.pathsep.join([directory, str(ROOT / "tests")])
        done = subprocess.run(
            [sys.executable, "-P", "-c", FIRST_FAILURE, str(seeds)],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return done.stdout.strip() or f"it does not even start: {done.stderr.strip()[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000, help="simulated runs for each mutant")
    parser.add_argument("--only", default="", help="only mutants whose rule contains this")
    args = parser.parse_args()
    survivors = 0
    for mutant in (mutant for mutant in MUTANTS if args.only in mutant.rule):
        verdict = survives(mutant, args.seeds)
        survivors += verdict.startswith("SURVIVED")
        print(f"{mutant.rule:70} {verdict}", flush=True)
    print(f"{survivors} of {len(MUTANTS)} mutants survived {args.seeds} runs")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
