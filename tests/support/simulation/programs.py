"""Random programs for the simulator: any calls in any order, and what befalls those who make them.

A *scenario* is plain data, drawn from a seed: what each peer calls, in one or two threads; when
peers join, die, freeze, are cut off; when the master is killed; what strangers say in between.
`play` plays it to the end and demands of every call that it ends, and of every round that it has
one outcome. Programs that do not fit together are legal: then nobody may wait for what can never
happen, and who waits for what still may happen gives up when nothing does.

A scenario that fails is made small by `shrink`: it takes parts away as long as it still fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail, Fault
from pccl.protocol.ring import checksum
from pccl.protocol.rounds import Grace
from pccl.runtime.client import call
from pccl.types import Result
from simulation.hostile import OUTVOTED, Blow, HostileRun, draw_script
from simulation.peer import WORK, End, Program, SimPeer, Tag, Thread, Waits
from simulation.run import EXCLUSIVE

CALLS = (
    "all_reduce",
    "small",
    "launch",
    "wait",
    "insist",
    "sync",
    "begin",
    "update_topology",
    "are_peers_pending",
    "optimize_topology",
)
SENDS = ("send", "recv", "swap")  # to and from those beside it, and both at once
EVENTS = (
    "kill",
    "freeze",
    "thaw",
    "sever",
    "restart",
    "doze",
    "outage",
    "impatience",
    "withdraw",
    "abandon",
)
RETRIES_MAX = 20
STEPS_MAX = 20_000
MIDDLING = 150_000  # bytes, which travel with the votes of three members and not of four
CHECKPOINT = 1000  # a revision that no run comes to by itself
OTHER_WORK = (
    m.Spec("all_reduce", 0, 10, 999),
    m.Spec("all_reduce", 0, 11, 1000),
    m.Spec("all_reduce", 3, 10, 1000),
)


@dataclass(frozen=True)
class Call:
    """One call of a program. `variant` 0 is what everybody does; others differ in what they ask."""

    what: str
    tag: int = 0
    variant: int = 0


@dataclass(frozen=True)
class Event:
    """An event after some steps; most concern one peer."""

    wait: int
    what: str
    peer: int = 0
    blow: Blow | None = None


Calls = tuple[Call, ...]
Handle = tuple[call.Call, Tag]  # a collective that was launched


@dataclass(frozen=True)
class Script:
    """A peer: its group, and the calls of its threads."""

    group: int
    threads: tuple[Calls, ...]
    walled: bool = False  # no peer can open a stream to it
    revision: int = 0  # of the checkpoint that it comes with
    caged: bool = False  # it can open no stream
    cut_from: tuple[int, ...] = ()  # peers of the scenario that it can open none to
    dialled: str | None = ""  # what comes of the master's dial to it
    team: int = 0  # the team that it joins with; 0: none
    outgoing: bool = False  # as PCCL_OUTGOING_ONLY: no peer can open a stream to it
    relay: bool = False  # two of these can meet at it
    odd: bool = False  # it does not make the calls of the others, and pays for that


@dataclass(frozen=True)
class Scenario:
    """A whole run. `schedule` is the seed of what happens in which order."""

    schedule: int
    peers: tuple[Script, ...]
    events: tuple[Event, ...] = ()
    journaled: bool = True
    straggler_s: float | None = None
    failure_rate: float = 0.0
    loss_rate: float = 0.0
    lawful: bool = False  # all peers make the same calls: nothing may ever fail to meet
    graces: bool = False  # callers of are_peers_pending do not wait for others without end
    middling: bool = False  # how the data of "small" ones travels depends on the members
    rows: bool = False  # large collectives are all_to_alls, or quantized


# ---- scenarios from seeds ----


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 1, 2, 3])
    lawful = rng.random() < 0.4
    tags = rng.choice([1, 2, 5])
    # what is sent depends on the ranks, which a peer of a lawful program may not know yet
    pool = CALLS if lawful else CALLS + SENDS
    shared = tuple(rng.choice(pool) for _ in range(rng.randint(2, 10)))
    scripts = []
    for _ in range(rng.randint(1, 6)):
        threads = []
        for _ in range(1 if rng.random() < 0.7 else 2):
            if lawful or rng.random() < 0.3:
                calls = [Call(what, i % tags) for i, what in enumerate(shared)]
                if not lawful and rng.random() < 0.5:
                    rng.shuffle(calls)
            else:
                calls = [_call(rng, tags) for _ in range(rng.randint(1, 10))]
            threads.append(tuple(calls))
        chosen = tuple(threads[:1] if lawful else threads)
        age = rng.choice([0, 0, 0, 0, CHECKPOINT, 2 * CHECKPOINT])
        walled, *links = _links(rng)
        scripts.append(Script(rng.randrange(groups), chosen, walled, age, *links))
    scripts = _in_teams(scripts, random.Random(f"teams of {seed}"))
    scripts = _behind_nat(scripts, random.Random(f"NAT of {seed}"))
    rows = random.Random(f"rows of {seed}")
    all_to_all = rows.random() < 0.25
    if all_to_all:
        scripts = _together(scripts, rows)
    if lawful:
        scripts = _with_an_odd_one(scripts, random.Random(f"the odd one of {seed}"))
    joins = [i for i in range(1, len(scripts)) if rng.random() < 0.4]
    events = [Event(rng.randint(0, 60), "join", i) for i in joins]
    for _ in range(rng.choice([0, 0, 1, 2, 4, 8])):
        what = rng.choice(EVENTS[:-2] if lawful else EVENTS)
        events.append(Event(rng.randint(0, 60), what, rng.randrange(len(scripts))))
    if rng.random() < 0.15 and not lawful:
        script = draw_script(rng, rng.randint(3, 20))
        events += [Event(blow.wait, "blow", 0, blow) for blow in script]
    rng.shuffle(events)
    if rng.random() < 0.15:  # it comes back to a master that has not seen it go
        late = rng.randrange(len(scripts))
        for what in ("freeze", "sever", "restart", "thaw"):
            events.append(Event(rng.randint(0, 30), what, late))
    if random.Random(f"end of {seed}").random() < 0.25 and all(
        len(s.threads) == 1 for s in scripts
    ):
        end = (Call("finish"),)
        scripts = [replace(script, threads=(script.threads[0] + end,)) for script in scripts]
    return Scenario(
        rng.getrandbits(32),
        tuple(scripts),
        tuple(events),
        journaled=rng.random() < 0.7,
        straggler_s=rng.choice([None, None, 10.0]),
        failure_rate=rng.choice([0.0, 0.0, 0.02, 0.1]),
        loss_rate=rng.choice([0.0, 0.0, 0.01, 0.05]),
        lawful=lawful,
        graces=rng.random() < 0.3,
        middling=random.Random(f"sizes of {seed}").random() < 0.3,
        rows=all_to_all,
    )


def _in_teams(scripts: list[Script], rng: random.Random) -> list[Script]:
    """The scripts, some of them in teams with peers of any group."""
    if rng.random() < 0.6:
        return scripts
    count = rng.randint(1, 3)
    return [replace(script, team=rng.choice([0, *range(1, count + 1)])) for script in scripts]


def _behind_nat(scripts: list[Script], rng: random.Random) -> list[Script]:
    """The scripts, some of them behind NAT; others may relay for these."""
    if rng.random() < 0.7:
        return scripts
    relays = rng.choice([0.0, 0.3])
    hidden = [rng.random() < 0.5 for _ in scripts]
    return [
        replace(script, outgoing=out, relay=not out and rng.random() < relays)
        for script, out in zip(scripts, hidden, strict=True)
    ]


def _together(scripts: list[Script], rng: random.Random) -> list[Script]:
    """The scripts in one group, some without a link to one of the others."""
    return [
        replace(script, group=0, cut_from=(rng.randrange(6),) if rng.random() < 0.2 else ())
        for script in scripts
    ]


def _with_an_odd_one(scripts: list[Script], rng: random.Random) -> list[Script]:
    """The scripts; one may get another call, or one with other arguments."""
    if rng.random() < 0.5:
        return scripts
    index = rng.randrange(len(scripts))
    calls = list(scripts[index].threads[0])
    at = rng.randrange(len(calls))
    was = calls[at]
    others = [Call("all_reduce", was.tag)]
    if was.what in ("all_reduce", "small", "launch", "insist"):
        others = [Call(was.what, was.tag, rng.randint(1, len(OTHER_WORK)))]
        others += [Call("update_topology"), Call("optimize_topology")]
    calls[at] = rng.choice(others)
    return [
        replace(one, threads=(tuple(calls),), odd=True) if i == index else one
        for i, one in enumerate(scripts)
    ]


def _links(rng: random.Random) -> tuple[bool, bool, tuple[int, ...], str | None]:
    """The links that a peer lacks, and the result of the master's dial."""
    walled, caged = rng.random() < 0.05, rng.random() < 0.05
    cut_from = (rng.randrange(6),) if rng.random() < 0.05 else ()
    dialled = rng.choice(["refused", "refused", None, ""] if walled else ["", "", None])
    return walled, caged, cut_from, dialled


def _call(rng: random.Random, tags: int) -> Call:
    odd = rng.random() < 0.05
    return Call(rng.choice(CALLS + SENDS), rng.randrange(tags), rng.randint(1, 3) if odd else 0)


# ---- what a script does ----


class Facade:
    """The rules that `Communicator` keeps before it says anything to anybody."""

    def __init__(
        self, peer: SimPeer, calls: tuple[Calls, ...], play: ProgramRun, odd: bool = False
    ) -> None:
        self.peer, self.play = peer, play
        self.lawful, self.positions = play.scenario.lawful and not odd, play.positions
        self.threads = len(calls)
        peer.programs = tuple(self.program(thread) for thread in calls)

    def program(self, calls: Calls) -> Program:
        """One thread of the peer; the last one to end leaves."""

        def thread(peer: SimPeer) -> Thread:
            handles: list[Handle] = []
            try:
                for call in self._from_here(calls):
                    yield from self._perform(call, handles)
                yield from self._wait(handles)
            finally:
                self.threads -= 1
            if self.threads == 0:
                peer.leave()

        return thread

    def _from_here(self, calls: Calls) -> Iterator[Call]:
        """All calls; of a lawful newcomer, those that come after the one that admitted it."""
        positions, machine = self.positions, self.peer.machine
        begin = (
            positions.get((machine.knowledge.run, machine.knowledge.done.topology), 0)
            if self.play.scenario.lawful
            else 0
        )
        for i in range(begin, len(calls)):
            if calls[i].what == "update_topology" and self.lawful:
                positions[machine.knowledge.run, machine.knowledge.done.topology + 1] = i + 1
            yield calls[i]

    def _perform(self, call: Call, handles: list[Handle]) -> Waits[None]:
        peer = self.peer
        synchronize = "sync_shared_state"
        exclusive = {"sync": synchronize, "begin": synchronize}.get(call.what, call.what)
        stands_in = {what for what, _ in peer.stands_in}
        if stands_in & (EXCLUSIVE | {exclusive}) - {"all_reduce"}:
            return  # INVALID_USAGE: another thread stands there
        if self.lawful and exclusive in EXCLUSIVE:
            yield from self._wait(handles)
        match call.what:
            case "wait":
                yield from self._wait(handles)
            case _ if exclusive in EXCLUSIVE and peer.tags:
                pass  # PENDING_ASYNC_OPS
            case "optimize_topology" if peer.machine.knowledge.world.global_size < 2:
                pass  # INVALID_USAGE
            case "optimize_topology":
                self._check((yield from peer.optimize_topology()))
            case "update_topology":
                self._check((yield from peer.update_topology()))
            case "finish":
                self._check((yield from peer.finish()))
            case "are_peers_pending":
                self._check((yield from peer.are_peers_pending()))
            case "sync" | "begin":
                yield from self._sync(call)
            case "send" | "recv" | "swap":
                yield from self._send(call, handles)
            case _ if call.tag in peer.tags or peer.machine.knowledge.world.local_size < 2:
                pass  # INVALID_ARGUMENT or TOO_FEW_PEERS
            case "launch":
                handles.append((peer.launch(call.tag, self._work(call)), call.tag))
            case "small" if not call.variant:
                size = MIDDLING if self.play.scenario.middling else 8
                data = b"%*d" % (size, call.tag)
                self._check((yield from peer.all_reduce(call.tag, data=data)))
            case "all_reduce" | "small":
                self._check((yield from peer.all_reduce(call.tag, self._work(call))))
            case "insist":
                for _ in range(RETRIES_MAX):
                    end = yield from peer.all_reduce(call.tag, self._work(call))
                    self._check(end)
                    lost = isinstance(end, Fail) and end.fault is Fault.PEER_LOST
                    if (
                        not lost
                        or call.tag in peer.tags
                        or peer.machine.knowledge.world.local_size < 2
                    ):
                        break

    def _wait(self, handles: list[Handle]) -> Waits[None]:
        while handles:
            self._check((yield from self.peer.awaits(*handles.pop(0))))

    def _send(self, call: Call, handles: list[Handle]) -> Waits[None]:
        """To the one after it, or from the one before it, as it knows them."""
        peer, swap = self.peer, call.what == "swap"
        numbers = [info.peer for info in peer.machine.knowledge.plan.peers]
        if len(numbers) < 2:
            return  # TOO_FEW_PEERS
        at = numbers.index(peer.machine.number)
        pairs = {
            "send": (numbers[at], numbers[(at + 1) % len(numbers)]),
            "recv": (numbers[at - 1], numbers[at]),
        }
        for what, pair in pairs.items():
            key = (*pair, call.tag)
            if call.what not in (what, "swap") or key in peer.tags:
                continue
            work = m.Spec("send", 0, 10, 1000 + call.variant)
            stuck = peer.single and not swap
            handle = peer.launch_send(*key, work, stuck), key
            if swap:
                handles.append(handle)
            else:
                self._check((yield from peer.awaits(*handle)))

    def _sync(self, call: Call) -> Waits[None]:
        peer = self.peer
        revision, before = peer.content
        text = f"of peer {peer.name} at {revision}" if call.tag % 2 else before
        advance = {1: 0, 3: 5}.get(call.variant, 1)  # the same again, or too much, is an error
        if not advance and text != before:
            self.play.disown(peer)
        peer.content = (revision + advance, text)
        wanted = 2 + call.tag % 2 if call.what == "begin" else 0
        self.play.begun |= wanted > 0
        end = yield from peer.sync("y" if call.variant == 2 else "x", min_peers=wanted)
        if isinstance(end, Fail):
            peer.content = (revision, text)
            if text != before:
                self.play.disown(peer)
            if self.lawful and not self.play.split:  # only with what another run has left
                assert self.play.begun or end.result is not Result.TOO_FEW_PEERS, end
                assert end.result is not Result.INVALID_ARGUMENT or revision >= CHECKPOINT, end
        self._check(end)

    def _work(self, call: Call) -> m.Spec:
        plan = self.peer.machine.knowledge.plan
        if call.variant or not (self.play.scenario.rows and plan.rings):
            return OTHER_WORK[call.variant - 1] if call.variant else WORK
        if call.tag % 2:
            return m.Spec("all_reduce", 0, 10, 1000, algorithm=4)
        order = plan.rings[0].order
        return m.Spec("all_to_all", 0, 10, 1000, members=len(order), ring=checksum(order))

    def _check(self, end: End) -> None:
        if self.lawful and isinstance(end, Fail) and not self.play.forgetful:
            assert end.fault is not Fault.MISMATCH or self.play.split, end
        if isinstance(end, Fail) and not self.play.timed_out:
            assert end.fault is not Fault.TIMEOUT, end
        if isinstance(end, Fail) and end.fault is Fault.PEER_LOST:
            assert self.play.lossy(self.peer.group), end


class ProgramRun(HostileRun):
    """A run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.schedule, [], scenario.journaled, scenario.straggler_s)
        self.scenario = scenario
        self.patience, self.failure_rate = [0], scenario.failure_rate
        self.loss_rate = scenario.loss_rate
        if scenario.graces:
            self.graces = [None, *(Grace(n, s) for n in (1, 2) for s in (0.0, 0.05, 2.0))]
        self.timed_out = False  # whether a caller's time was ever up
        self.abandoned = False  # whether a caller ever left by an exception
        self.begun = False  # whether any has wanted some peers to begin with; all in it are told
        self.positions: dict[tuple[int, int], int] = {}  # in lawful calls, after an admission
        self._of: dict[int, SimPeer] = {}  # peers by their number in the scenario
        self._events = list(reversed(scenario.events))
        self._in = self._events[-1].wait if self._events else 0
        late = {event.peer for event in scenario.events if event.what == "join"}
        for index in range(len(scenario.peers)):
            if index not in late:
                self._join(index)

    def _join(self, index: int) -> None:
        if index in self._of or index >= len(self.scenario.peers):
            return
        script = self.scenario.peers[index]
        size = sum(one.team == script.team for one in self.scenario.peers) if script.team else 0
        peer = self.add(
            group=script.group,
            team=(script.team, size),
            nat=(script.outgoing, script.relay),
        )
        peer.walled, peer.caged, peer.dialled = script.walled, script.caged, script.dialled
        peer.content = (script.revision, peer.content[1])
        Facade(peer, script.threads, self, script.odd)
        self._of[index] = peer
        for i, one in self._of.items():
            others = self.scenario.peers[i].cut_from
            one.cut_from = {self._of[other].name for other in others if other in self._of}

    @property
    def split(self) -> bool:
        """Whether those who make other calls than one may have been no majority, and know it."""
        return self.splits > 0 and any(script.odd for script in self.scenario.peers)

    @property
    def forgetful(self) -> bool:
        """Whether a restarted master may not know what some peers have been told.

        That a peer was given up: without a journal, when of its group nobody else is back in time.
        """
        severed = not self.journaled and any(p.severed for p in self.peers)
        return bool(self.incarnation) and severed

    def lossy(self, group: int) -> bool:
        """Whether a collective of the group may have lost a peer, or its data."""
        others = [p for p in self.peers if p.group == group]
        return bool(
            self.failure_rate
            or self.losses
            or self.timed_out
            or self.abandoned
            or self.incarnation
            or self.members_max
            or any(p.left or not p.alive or p.machine.over or p.severed for p in others)
            or any(p.walled or p.caged or p.cut_from or p.outgoing for p in others)
            or any(p.machine.number and not self.master.knows(p.conn) for p in others)
        )

    def step(self) -> bool:
        """A step of the run, after the next event if it is due."""
        moved = super().step()
        self._in -= 1
        if self._events and (self._in <= 0 or not moved):
            self._happens(self._events.pop())
            return True
        return moved

    def _happens(self, event: Event) -> None:
        self._in = self._events[-1].wait if self._events else 0
        peer = self._of.get(event.peer)
        match event.what:
            case "join":
                self._join(event.peer)
            case "restart":
                self.restart_master()
            case "doze":
                self.doze()
            case "outage":
                self.outage()
            case "impatience":
                self.impatience()
            case "blow":
                assert event.blow is not None
                self._strike(event.blow)
            case _ if peer is None or not peer.alive or peer.left:
                pass
            case "kill":
                self.kill(peer)
            case "freeze":
                self.freeze(peer)
            case "thaw":
                self.thaw(peer)
            case "sever":
                self.sever(peer)
            case "withdraw":
                self._give_up([peer])
            case "abandon":
                self._give_up([peer], taken=True)
        if not self._events:
            self.hang_up()

    def unblock(self) -> bool:
        """Somebody thaws, or gives up."""
        frozen = self.frozen
        if frozen and self.random.random() < 0.5:
            self.sever(self.random.choice(frozen))
        return super().unblock() or self._give_up([p for p in self.peers if p.present])

    def _give_up(self, peers: list[SimPeer], taken: bool = False) -> bool:
        """A caller with limited patience, if there is one, times out or is interrupted."""
        calls = [
            (peer, call)
            for peer in peers
            for call in peer.waiters
            if not peer.frozen and call not in peer.given_up | (set() if taken else peer.stuck)
        ]
        calls = [(peer, call) for peer, call in calls if peer.calls_open[call].what != "connect"]
        if calls:
            peer, call = self.random.choice(calls)
            if taken:
                self.abandoned = True
                peer.cancel(call)
            else:
                self.timed_out = True
                peer.time_out(call)
        return bool(calls)


def play(scenario: Scenario, trace: list[str] | None = None) -> ProgramRun:
    """Plays a scenario to the end.

    Raises:
        AssertionError: a rule was broken; or a state machine failed.
    """
    run = ProgramRun(scenario)
    run.trace = trace
    run.finish(STEPS_MAX)
    run.check_empty()
    return run


# ---- making a failure small ----


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one part less, large parts first."""
    for i in range(len(scenario.peers)):
        peers = scenario.peers[:i] + scenario.peers[i + 1 :]
        events = tuple(
            replace(e, peer=e.peer - (e.peer > i)) for e in scenario.events if e.peer != i or e.blow
        )
        yield replace(scenario, peers=peers, events=events)
    size = len(scenario.events)
    while size:
        for begin in range(0, len(scenario.events), size):
            events = scenario.events[:begin] + scenario.events[begin + size :]
            yield replace(scenario, events=events)
        size //= 2
    odd = [i for i, script in enumerate(scenario.peers) if script.odd]
    if scenario.lawful and not odd:  # all scripts are the same, and must stay so
        for threads in _shorter(scenario.peers[0].threads if scenario.peers else ()):
            peers = tuple(replace(script, threads=threads) for script in scenario.peers)
            yield replace(scenario, peers=peers)
    for i, script in enumerate(scenario.peers):
        smaller = [] if scenario.lawful else [*_shorter(script.threads)]
        changed = [replace(script, threads=threads) for threads in smaller]
        if script.group:
            changed.append(replace(script, group=0))
        if script.walled:
            changed.append(replace(script, walled=False))
        if script.caged:
            changed.append(replace(script, caged=False))
        if script.cut_from:
            changed.append(replace(script, cut_from=()))
        if script.outgoing:
            changed.append(replace(script, outgoing=False))
        if script.relay:
            changed.append(replace(script, relay=False))
        if script.team:
            changed.append(replace(script, team=0))
        for one in changed:
            yield replace(scenario, peers=(*scenario.peers[:i], one, *scenario.peers[i + 1 :]))
    if scenario.failure_rate:
        yield replace(scenario, failure_rate=0.0)
    if scenario.loss_rate:
        yield replace(scenario, loss_rate=0.0)
    if scenario.graces:
        yield replace(scenario, graces=False)


def _shorter(threads: tuple[Calls, ...]) -> Iterator[tuple[Calls, ...]]:
    for i, calls in enumerate(threads):
        if len(threads) > 1:
            yield threads[:i] + threads[i + 1 :]
        for j in range(len(calls)):
            yield (*threads[:i], calls[:j] + calls[j + 1 :], *threads[i + 1 :])


def failure(scenario: Scenario) -> str:
    """The error of a run of the scenario; empty if it is right."""
    try:
        play(scenario)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(
    scenario: Scenario, tries: int = 20, told: Callable[[Scenario], None] = lambda _: None
) -> Scenario:
    """A small scenario that fails too, if perhaps in another way.

    A part less is another schedule, so each candidate gets `tries` of them.
    """
    assert failure(scenario)
    while True:
        for candidate in smaller(scenario):
            found = next(
                (
                    again
                    for again in (replace(candidate, schedule=n) for n in range(tries))
                    if failure(again)
                ),
                None,
            )
            if found is not None:
                scenario = found
                told(scenario)
                break
        else:
            return scenario


def describe(scenario: Scenario) -> str:
    """The scenario in words."""
    lines = [
        f"schedule {scenario.schedule}, {'with' if scenario.journaled else 'without'} a journal, "
        f"straggler limit {scenario.straggler_s}, failure rate {scenario.failure_rate}, "
        f"loss rate {scenario.loss_rate}{', with graces' if scenario.graces else ''}"
    ]
    for i, script in enumerate(scenario.peers):
        for calls in script.threads:
            told = ", ".join(
                f"{c.what}({c.tag}{', variant ' + str(c.variant) if c.variant else ''})"
                for c in calls
            )
            wall = ", which nobody can reach" if script.walled else ""
            wall += ", which can reach nobody" if script.caged else ""
            wall += f", which cannot reach {script.cut_from}" if script.cut_from else ""
            wall += ", which connects itself" if script.outgoing else ""
            wall += ", which relays" if script.relay else ""
            wall += f", of team {script.team}" if script.team else ""
            lines.append(f"peer {i} of group {script.group}{wall}: {told or 'nothing'}")
    lines += [f"after {e.wait} steps: {e.what} {e.blow or e.peer}" for e in scenario.events]
    return "\n".join(lines)


__all__ = ["OUTVOTED", "Scenario", "describe", "draw", "failure", "play", "shrink", "smaller"]
