"""DiLoCo, distributed low-communication training (arXiv 2311.08105), for peers that come and go.

docs/internals/diloco.md has the equations of all modes, and what happens when peers come and go.
Decisions that must be the same on all peers depend on the outcome of a round or on shared state,
never on the current world size, which two peers may see differently.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

import torch
import xxhash

from pccl import Communicator, KickedError, ReduceInfo, Result, SharedState, TensorInfo
from pccl.data import Ledger
from pccl.diloco.averaging import Selector, averager_of
from pccl.diloco.checkpoint import Checkpoint, read_state
from pccl.diloco.exchange import Exchange, LedgerHooks, Weight
from pccl.diloco.membership import Group
from pccl.diloco.misuse import Misuse, warn_unfinished
from pccl.diloco.model import Buffers, Frozen, InnerState, check_team, memory, replica_of
from pccl.diloco.modes import Delayed, Fragment, Schedule, Streaming, Synchronous
from pccl.diloco.muon import is_muon
from pccl.diloco.outer import Eager, Outer, OuterOptimizer, View, split
from pccl.diloco.pace import pace_of
from pccl.diloco.settings import (
    AlonePolicy,
    BufferMode,
    InnerSteps,
    Mode,
    Pattern,
    Rate,
    Settings,
    WeightBy,
    checked_steps,
    encode,
    layout_digest,
    rates,
)
from pccl.diloco.stats import Meter, Outcome, OuterRound, PeerShare, Stopwatch, gather_shares
from pccl.kernels import Wire
from pccl.runtime.checkpoint import replacing

_REJOINS_MAX = 3  # without a round between them
_log = logging.getLogger("pccl.diloco")

T = TypeVar("T")
State = Mapping[str, Any] | str | os.PathLike[str] | Callable[[dict[str, Any]], object]


class DiLoCo:
    """Trains a model with DiLoCo (arXiv 2311.08105), together with the peers of a communicator.

        with pccl.Communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)
            for batch in batches:
                loss = model(batch).loss
                loss.backward()
                diloco.step()

    Or around a loop as it is, which steps the optimizer itself:

        with DiLoCo(comm, model, optimizer, inner_steps=50):
            for batch in batches:
                optimizer.zero_grad()
                model(batch).loss.backward()
                optimizer.step()

    With w the parameters of `model`, theta and v the shared outer parameters and momentum, eta
    `outer_lr` and mu `outer_momentum`, every `inner_steps`-th step ends in

        D = mean over peers of (theta - w)
        v <- mu v + D
        theta <- theta - eta (D + mu v)        (outer_momentum without nesterov: theta - eta v)
        w <- theta

    theta, v and the counter k are one `SharedState`: fp32 on the CPU, whatever the model's dtype
    and device, and compared bit by bit on all peers after each outer step. pccl's own kernels
    update them, because torch rounds differently from one CPU to the next. Memory: four fp32 copies
    of the trained parameters.

    What is not trained:
        Parameters that do not require a gradient when this object is constructed are frozen: they
        must not change afterwards. They are compared when a peer joins; a peer whose frozen
        parameters differ in content receives those of the run. The model's persistent buffers
        (such as batch-norm statistics) are shared as `buffers` says; buffers that are not in its
        `state_dict` are not touched.

    What is not shared:
        Each peer has its own inner optimizer state: a newcomer starts with a fresh one, and may
        need to warm up its learning rate. Derive a schedule that all peers share from `outer_step`,
        never from a counter of the script, which would be zero on a newcomer.

    Sharded models:
        Of a model that torch's FSDP2 (`fully_shard`) shards over several processes, each process
        makes this object, with its own of `pccl.torch.communicator`, and all make the same calls.
        theta and v are the shards of this process. The mesh has one dimension. Not with
        deadline_peers or a ledger. With weight="samples", a replica weighs what its processes have
        trained on together; with inner_seconds, the first of them has the clock.

    Clip and accumulate gradients before `step`, as with any optimizer. The model's parameters must
    not be replaced by other tensors afterwards.

    A peer that has lost all others takes no outer step, so `while diloco.outer_step < steps` does
    not end until another peer joins. If it should end, pass `alone="step"`.

    Build the model and the optimizer first and connect last: as soon as `connect` has returned, the
    others wait for this constructor.

    Args:
        comm: a connected communicator. All peers of its group train the same model with the same
            settings. Other groups of the run must take part in the same rounds of admission, which
            they do if they use this class.
        model: the module to train. Its initial parameters matter only on the first peer of a run;
            all other peers receive the shared ones in this constructor.
        inner_optimizer: optimizer of the parameters of `model`; usually AdamW.
        inner_steps: H, calls of `step` between outer steps. A number; or points (k, steps), between
            which it is linear in the outer step k, rounded down, and beyond which constant:
            [(0, 30), (500, 30), (1000, 100)]. See also `quadratic_steps`. Not points with
            mode="streaming".
        inner_seconds: instead of that, the seconds between outer steps: each peer takes the inner
            steps that it can. Not with mode="streaming".
        outer_lr: eta. A number; or points (k, value), between which it is linear in the outer step
            k, and beyond which constant: [(0, 1.0), (900, 1.0), (901, 0.65)]. None: 0.4 for a mean
            of one peer, 0.6 of 2 to 4, up to 0.8 of 8 or more (arXiv 2503.09799); without momentum
            0.7 with mode="delayed", 1 with "eager"; 1 with wire="sparse".
        outer_momentum: mu, likewise. None: 0.9; 0.5 with fewer than 20 inner steps, else 0.6 if the
            inner optimizer is Muon; 0 with mode="delayed", "eager" or wire="sparse". With 0 the
            outer step is plain averaging.
            eta, mu and the effective gain eta / (1 - mu) are logged at INFO whenever they change.
        nesterov: whether the outer momentum is Nesterov's.
        min_peers: number of peers that a run needs to start, or to resume from `state`; the
            constructor waits for them. A started run continues with any number, unless `alone` is
            "wait".
        state: the `state_dict` of an earlier run to resume, or the path of a file that `save` has
            written. When a run starts, the latest state among its first `min_peers` wins. A
            newcomer to a run in progress receives the state of the others, and is refused if its
            own state is later than theirs. Each inner optimizer resumes from its own state. Or a
            function that fills in such a state, for a checkpoint of torch.distributed.checkpoint:
            `partial(dcp.load, checkpoint_id=path)`.
        buffers: "mean": the changes of the buffers are averaged together with the pseudo-gradients,
            with integers rounded towards zero, so that all peers have the same statistics. "first":
            in each outer step all peers take the buffers of the peer that joined the run first.
            "local": each peer keeps its own; a newcomer receives those of one other peer.
        alone: what to do in an outer round without other peers. "continue": keep training, without
            outer steps, until another peer joins. "step": take the outer step with this peer's
            pseudo-gradient. "wait": admit others until there are `min_peers`, at least 2; a group
            that has shrunk below that waits as well. The log has a WARNING in each case.
        mode: "sync": a round ends when the progress of all peers is averaged and applied.
            "delayed": it is averaged while the next round trains, and applied at the end of that.
            "eager": the same, but each peer applies its own part at once. Memory: three more fp32
            copies of the trained parameters. "streaming": one part of the model after the other is
            averaged while all of it trains, and applied some inner steps later.
        wire: how pseudo-gradients are sent. "fp32": as they are, around the ring. "int8", "int4",
            "e3m0" (4 bits: a sign and a power of two), "2bit" (four levels from the statistics of
            each block), "sparse" (the 64 largest of each 4,096, with 2 bits): quantized once by
            each peer; what that takes away is added to the next one (error feedback). They are
            gathered, or averaged in two stages, or go around the ring in fp32, by what receives the
            fewest bytes: see `OuterRound.algorithm`, and the log at INFO. Memory: three more fp32
            copies of the trained parameters.
        fragments: P, with mode="streaming": the parts of the model, at most H. The layers of the
            model stay whole if there are enough of them.
        pattern: "strided": layer i is in fragment i mod P. "sequential": a fragment is a run of
            layers.
        overlap: tau, with mode="streaming": inner steps from the launch of a mean to its
            application, less than floor(H / P). 0: training pauses for it.
        alpha: with mode="streaming", the part that a peer keeps of its own parameters when it takes
            over theta, in [0, 1).
        weight: "peers": all pseudo-gradients weigh the same in a mean. "samples": each weighs as
            many samples as `step` was told that it is of. Not with mode="eager".
        deadline_peers: K, not with mode="streaming": a round does not wait for all, but for K peers
            and the grace. When K must have taken their inner steps, by what all have told of the
            round before, and the grace is over, a peer that has not comes to the round as it is,
            late. Its progress weighs nothing there, and is in the next round, in which it is not
            late. Who does not come is dropped when K are there and the grace is over, and joins
            again by itself, with its progress. None: a round waits for all.
        grace: seconds. With deadline_peers: see there; None: as much as the time in which K peers
            were ready has varied in the last 8 rounds, and at least one inner step or a tenth of
            that time. With inner_seconds: a peer begins no step that would end so much later; None
            is 0 there, and not with deadline_peers.
        late_decay: what a late peer keeps of its progress, from 0 to 1.
        ledger: gives each peer its samples, each exactly once; see `pccl.data` and `round_of`. Not
            with mode="streaming".

    Raises:
        ValueError: a setting is out of range, no parameter requires a gradient, `state` belongs to
            another model or optimizer or is damaged, or the settings differ from those of the run.
        OSError: the file `state` cannot be read.
        PCCLError: the communicator cannot be used (not connected, kicked, master lost, another
            model in the run); INVALID_ARGUMENT: the revision of `state` is later than the run's.
    """

    def __init__(
        self,
        comm: Communicator,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        inner_steps: InnerSteps | None = None,
        inner_seconds: float | None = None,
        outer_lr: Rate | None = None,
        outer_momentum: Rate | None = None,
        nesterov: bool = True,
        min_peers: int = 1,
        state: State | None = None,
        buffers: BufferMode = "mean",
        alone: AlonePolicy = "continue",
        mode: Mode = "sync",
        wire: Wire = "fp32",
        fragments: int = 1,
        pattern: Pattern = "strided",
        overlap: int = 0,
        alpha: float = 0.0,
        weight: WeightBy = "peers",
        deadline_peers: int | None = None,
        grace: float | None = None,
        late_decay: float = 1.0,
        ledger: Ledger | None = None,
    ) -> None:
        if inner_steps is not None:
            inner_steps = checked_steps(inner_steps)
        settings = Settings(
            inner_steps=inner_steps,
            inner_seconds=inner_seconds,
            deadline_peers=deadline_peers,
            grace=grace,
            late_decay=late_decay,
            weight=weight,
            rates=rates(
                outer_lr,
                outer_momentum,
                mode=mode,
                inner_steps=inner_steps,
                sparse=wire == "sparse",
                muon=is_muon(inner_optimizer),
            ),
            nesterov=nesterov,
            buffers=buffers,
            mode=mode,
            wire=wire,
            fragments=fragments,
            pattern=pattern,
            overlap=overlap,
            alpha=alpha,
            min_peers=min_peers,
            alone=alone,
        )
        settings.check(ledger=ledger is not None)
        self._comm = comm
        self._optimizer = inner_optimizer
        self._settings = settings
        self._ledger = LedgerHooks(ledger, counted=settings.ends_early)
        self._replica = replica_of(model)
        if self._replica.size > 1:
            settings.check_sharded(ledger=ledger is not None)
            check_team(comm, self._replica)
        self._stepping = False  # in `step`, which counts the inner step itself
        self._entered = False  # a `with` block, in which the script steps the optimizer
        self._rejoins = 0  # since the last round that this peer was in
        self._last_round: OuterRound | None = None
        self._build(model)
        self._inner = InnerState(inner_optimizer, self._replica)
        if state is not None:
            self._load(self._given(state))
        self._group.join(self._config, settings.min_peers)
        self._check_whole()
        self._inner_step = self._begin()
        self._trained = _Trained()
        self._stopwatch = Stopwatch(self._meter)
        self._watch(model)
        self._pace.begin()

    def _watch(self, model: torch.nn.Module) -> None:
        """Is told of the optimizer's steps, and tells of the script's mistakes."""
        self._misuse = Misuse(model, self._settings)
        own = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            diloco = own()
            if diloco is not None:
                diloco._optimizer_stepped()

        weakref.finalize(self, self._optimizer.register_step_post_hook(hook).remove)
        weakref.finalize(self, warn_unfinished, self._misuse)

    def _optimizer_stepped(self) -> None:
        if self._stepping:
            return
        if not self._entered:
            self._misuse.optimizer_stepped()
            return
        self._count(None)
        self._misuse.inner_step()
        self._after_inner_step(None)

    # ---- its parts ----

    def _build(self, model: torch.nn.Module) -> None:
        """Makes the parts, from below."""
        settings, replica = self._settings, self._replica
        named = _trained(model)
        self._meter = Meter()
        self._frozen = Frozen(model, replica)
        self._buffers = Buffers(model, settings.buffers)
        self._outer = Outer(
            named,
            split(named, settings.fragments, settings.pattern),
            OuterOptimizer(settings.rates, settings.nesterov),
            replica,
        )
        self._config = encode(
            {
                **settings.config(),
                # dtypes are left out: a bf16 peer on a GPU and an fp32 one on a CPU may be in a run
                "parameters": layout_digest([(name, list(p.shape)) for name, p in named]),
                "not_trained": layout_digest([*self._frozen.layout(), *self._buffers.layout()]),
                "shard": [replica.index, replica.size],
            }
        )
        self._selector = Selector()
        outer = self._outer
        self._pace = pace_of(settings, replica, lambda: outer.outer_step)
        self._exchanges = self._exchanges_of()
        self._schedule = self._schedule_of()
        self._group = self._group_of()
        self._checkpoint = Checkpoint(
            self._config,
            self._frozen,
            self._buffers,
            self._ledger,
            self._outer,
            self._exchanges,
            self._schedule,
            self._group,
        )

    def _exchanges_of(self) -> list[Exchange]:
        """One for each fragment; the buffers are averaged with the last one."""
        settings = self._settings
        # means are sums where one who is late weighs nothing, or where counts are added up
        always = settings.deadline_peers is not None or self._ledger.counted
        fragments = self._outer.fragments
        none = Buffers(torch.nn.Module(), settings.buffers)
        return [
            Exchange(
                self._comm,
                fragment,
                self._buffers if fragment is fragments[-1] else none,
                averager_of(settings.wire, fragment.theta.numel(), self._selector),
                Weight(settings.weight, always, self._replica),
                self._meter,
                self._ledger,
                self._replica,
            )
            for fragment in fragments
        ]

    def _schedule_of(self) -> Schedule:
        settings, exchange = self._settings, self._exchanges[-1]
        if settings.mode == "sync":
            return Synchronous(exchange, self._pace, settings.late_decay)
        if settings.mode != "streaming":
            view = Eager(self._outer.fragments[0]) if settings.mode == "eager" else View()
            return Delayed(exchange, self._pace, view, settings.late_decay)
        own = self._outer.entries()
        if settings.buffers != "local":
            own[-1].extend(self._buffers.entries())
        fragments = [
            Fragment(exchange, SharedState([*self._common_entries(), *entries]))
            for exchange, entries in zip(self._exchanges, own, strict=True)
        ]
        return Streaming(fragments, settings.steps_at(0), settings.overlap, settings.alpha)

    def _common_entries(self) -> list[TensorInfo]:
        return [
            TensorInfo.from_torch(self._config, "diloco.config"),
            TensorInfo.from_torch(self._outer.clock, "diloco.clock"),
            *self._selector.entries(),
        ]

    def _group_of(self) -> Group:
        always = [*self._common_entries(), *chain.from_iterable(self._outer.entries())]
        always += self._ledger.entries()
        at_joins = [*self._frozen.entries, *self._schedule.entries()]
        (at_joins if self._settings.buffers == "local" else always).extend(self._buffers.entries())
        shared = SharedState(always)
        return Group(
            self._comm,
            shared,
            SharedState(always + at_joins) if at_joins else shared,
            self._settings,
            self._frozen,
            self._buffers,
            self._ledger,
            self._meter,
            self._replica,
        )

    def _begin(self) -> int:
        """Trains from the shared state. Returns at which inner step this peer goes on."""
        position = self._schedule.begin()
        self._outer.adopt()
        self._buffers.put()
        return position

    def _check_whole(self) -> None:
        """All processes of this replica have taken over what one other replica has.

        They have not if that one was lost when the first of them had its part, and the others then
        took over what another one has; but only in the first synchronization of a run.
        """
        own = [*self._outer.clock.tolist(), self._group.shared.revision]
        if any(said != own for said in self._replica.exchange(own)):
            raise RuntimeError(
                "a replica was lost at the moment when the run began, and only some of its shards "
                "were taken over: start all replicas again"
            )

    # ---- what a script reads ----

    @property
    def outer_step(self) -> int:
        """k, the outer steps that the run has taken: equal on all peers, made for schedules."""
        return self._outer.outer_step

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer round, below `inner_steps`; see also "streaming"."""
        return self._inner_step

    def progress(self, outer_steps: int) -> float:
        """How far a run of `outer_steps` outer steps has come: from 0 to 1, made for schedules.

        It never falls, and is the same on all peers after the same inner step, whatever the mode. A
        round that has taken no outer step moves it no further than one that has. With
        inner_seconds it stands still within a round.

        Raises:
            ValueError: `outer_steps` is not positive.
        """
        if outer_steps < 1:
            raise ValueError(f"outer_steps={outer_steps} must be at least 1")
        return self._schedule.progress(self._inner_step, outer_steps)

    @property
    def last_round(self) -> OuterRound | None:
        """The result of the last outer round; None before the first."""
        return self._last_round

    @property
    def world_size(self) -> int:
        """Peers of the group at this moment, this one included."""
        return self._comm.world_size

    @property
    def shared_state(self) -> SharedState:
        """theta, v, k, the settings, and buffers unless they are local.

        Its revision counts the synchronizations of the run.
        """
        return self._group.shared

    @property
    def last_reduce(self) -> ReduceInfo | None:
        """Info of the last all-reduce that committed; None before the first."""
        return self._meter.last_reduce

    @property
    def tx_bytes(self) -> int:
        """Payload bytes that this peer has sent in committed all-reduces and synchronizations."""
        return self._meter.tx_bytes

    @property
    def rx_bytes(self) -> int:
        """Payload bytes that this peer has received in them."""
        return self._meter.rx_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of theta, which is what one all-reduce averages."""
        return self._outer.nbytes

    def state_digest(self) -> str:
        """The XXH3-128, in hex, of everything that peers have in common between outer rounds.

        That is theta, v, k, the frozen parameters as they are in the model now, and the buffers as
        of the last round, unless they are local.
        """
        digest = xxhash.xxh3_128()
        for tensor in self._outer.tensors():
            digest.update(memory(tensor))
        self._frozen.hash_into(digest)
        if self._settings.buffers != "local":
            for tensor in self._buffers.shared:
                digest.update(memory(tensor))
        return digest.hexdigest()

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """A copy of the training's state for a checkpoint, for the `state` of a later constructor.

        It holds theta and v as flat fp32 tensors on the CPU, k, the settings, frozen parameters,
        buffers, and the states of this peer's inner optimizer and of its wire. Inner steps since
        the last outer round are not in it, so the place to take it is right after one. Without
        "optimizer", or with None there, the next inner optimizer begins anew. With mode="delayed"
        it also holds the mean that is under way, and this call waits for it. With mode="streaming"
        neither a mean under way nor other progress since a fragment's last step is in it, nor that
        of a late peer.

        Of a model that is sharded, all processes of the replica make this call. Each gets the whole
        state, which another number of processes can resume from, or one; or, with `sharded`, the
        same with DTensors for `torch.distributed.checkpoint`, of which each has its part, and theta
        and v by the names of the parameters. The buffers are those of this process.
        """
        return {
            **self._checkpoint.state_dict(sharded),
            "optimizer": self._inner.state_dict(sharded),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `state_dict` to a file for the `state` of a later constructor, atomically.

        The file is complete and on disk when this returns. If it fails, or the process dies
        meanwhile, the previous file is unchanged. Of a model that is sharded, all processes of the
        replica make this call, and the first one writes.

        Raises:
            OSError: it cannot be written.
        """
        state = self.state_dict()
        if self._replica.index == 0:
            with replacing(path) as file:
                torch.save(state, file)

    # ---- training ----

    def step(
        self, scaler: torch.amp.GradScaler | None = None, *, samples: int | None = None
    ) -> OuterRound | None:
        """Takes one inner step and clears the gradients; every H-th call runs the outer round too.

        Args:
            samples: with weight="samples", how many (or tokens) the gradients are of. None: one.
                Required with a `ledger` and inner_seconds or deadline_peers, where it is samples of
                the ledger. A step in a `with` block, taken by the optimizer itself, has None.
            scaler: steps the inner optimizer, and is updated then. A step that it skips counts as
                one all the same, so that the peers stay together.

        Returns:
            What happened in the outer round, or None if this call did not come to one. After a
            round the model's parameters equal theta (rounded to their dtype), unless this peer was
            alone and took no outer step, or with mode="delayed" has just become alone. With
            mode="eager" they equal theta_m. With mode="streaming" that holds for the parameters of
            the fragment, and alpha = 0.

        Raises:
            PCCLError: the communicator cannot go on (kicked, master lost). Lost peers do not raise.
            ValueError: `samples` is negative, missing, or more than the ledger has given.
        """
        self._count(samples)
        self._misuse.inner_step()
        self._stepping = True
        try:
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)
                scaler.update()
        finally:
            self._stepping = False
        self._optimizer.zero_grad()
        return self._after_inner_step(samples)

    def _count(self, samples: int | None) -> None:
        """This peer has trained on `samples` more; None: unknown, which counts as one step."""
        if samples is None and self._ledger.counted:
            raise ValueError(
                "a ledger whose rounds may end early must know how many samples a step has trained "
                "on: diloco.step(samples=len(batch))"
            )
        samples = 1 if samples is None else samples
        for exchange in self._exchanges:
            exchange.weight.count(samples)
        self._ledger.train(samples)

    def _after_inner_step(self, samples: int | None) -> OuterRound | None:
        self._trained.count(1 if samples is None else samples)
        self._inner_step += 1
        at = self._inner_step
        due = self._schedule.due(at)
        if self._settings.mode == "streaming":
            self._inner_step %= self._settings.steps_at(0)
        elif due:
            self._inner_step = 0
        if not due:
            self._poll()
            return None
        return self._round(at)

    def _round(self, at: int) -> OuterRound | None:
        self._misuse.unfinished = False  # if it fails, something else is
        try:
            with self._stopwatch.round():
                outcome = self._schedule.round(self._group, at)
                self._group.claim()
                self._replica.all(True)  # one that left now would take the others along
            if outcome is None:
                return None
            self._last_round = self._report(outcome)
            self._rejoins = 0
        except KickedError as error:
            self._last_round = self._report(self._rejoin(error))
        return self._last_round

    def _poll(self) -> None:
        try:
            self._schedule.poll()
        except KickedError:
            if self._settings.deadline_peers is None:
                raise  # else the round that comes will find it, too, and join again

    def _rejoin(self, error: KickedError) -> Outcome:
        """The run has gone on without this peer, which joins it once more."""
        while True:
            self._rejoins += 1
            given_up = error.result is Result.RANK_CONNECTION_FAILED
            if self._settings.deadline_peers is None or not given_up:
                raise error
            if self._rejoins > _REJOINS_MAX:
                raise error
            _log.warning("the run has gone on without this peer, which joins again: %s", error)
            try:
                with self._stopwatch.round():
                    self._join_again()
                return Outcome(contributors=0, retries=0, admitted=True, rejoined=True)
            except KickedError as again:
                error = again

    def _join_again(self) -> None:
        exchange = self._exchanges[-1]
        rescued = self._schedule.rescue()
        if not self._ledger.rejoin():
            exchange.weight.drop()
            rescued = False
        self._outer.rename()  # all others may have ended
        self._group.rejoin(self._config)
        self._begin()
        exchange.adopt()
        if rescued:
            exchange.reclaim(self._settings.late_decay)
        self._pace.rejoin()

    def _report(self, outcome: Outcome) -> OuterRound:
        trained, self._trained = self._trained, _Trained()
        own = self._stopwatch.share(trained.steps, trained.samples, self._pace.late)
        shares: tuple[PeerShare, ...] = (own,)
        if self._settings.unlike and not outcome.admitted:  # newcomers are not at this place
            with self._stopwatch.round():
                shares = gather_shares(self._comm, own)
            self._pace.heard([(share.compute_s, share.inner_steps) for share in shares])
        algorithm = self._exchanges[outcome.fragment].averager.algorithm
        report = self._stopwatch.report(self.outer_step, outcome, algorithm, shares)
        self._misuse.round(outcome, self._exchanges[outcome.fragment])
        self._pace.begin()
        return report

    def round_of(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of one round, which ends after them, however many they are.

        For a `ledger`, which in the last rounds has fewer samples. With inner_seconds or
        deadline_peers a round may end before all batches: the next one begins with the others.

            while not ledger.finished:
                for batch in diloco.round_of(loader):
                    loss_of(batch).backward()
                    diloco.step(samples=len(batch))

        Raises:
            ValueError: there are more batches than inner steps in a round of a fixed number.
            PCCLError: as for `step`.
        """
        before = self._last_round
        for batch in loader:
            if self._last_round is not before and self._settings.ends_early:
                return
            if self._last_round is not before:
                raise ValueError(
                    "a round has more batches than inner steps: give the ledger a smaller share, "
                    f"or more than inner_steps={self._settings.inner_steps}"
                )
            yield batch
        if self._last_round is before:
            self._inner_step = 0
            self._pace.late = False  # there is nothing more to train on
            self._round(self._settings.steps_at(self.outer_step))

    def __enter__(self) -> DiLoCo:
        """From here on, each step of the inner optimizer does what `step` does.

        It does not clear the gradients. A step that a GradScaler skips is not seen, and not
        counted; `step(scaler)` counts it.
        """
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Up to here; then `finish`, unless an exception has ended the block."""
        self._entered = False
        if kind is None:
            self.finish()
        self._misuse.finished()

    def finish(self) -> None:
        """Ends the training: waits for the mean that is under way, and applies it.

        For mode="delayed", "eager" and "streaming": call it after the last round, on all peers, in
        place of another one; the model is theta then. In mode="sync" nothing is under way, and it
        does nothing. The end of a `with` block calls it.

        Raises:
            PCCLError: as for `step`.
        """
        self._schedule.finish(self._group)
        self._replica.all(True)
        self._misuse.finished()

    # ---- checkpoints ----

    def _given(self, state: State) -> Mapping[str, Any]:
        if isinstance(state, Mapping):
            return state
        if not callable(state):
            return read_state(state)
        self._inner.fill()
        template = self.state_dict(sharded=True)
        state(template)
        return template

    def _load(self, state: Mapping[str, Any]) -> None:
        """Loads a state that matches, or raises and changes nothing."""
        self._checkpoint.check(state)
        optimizer = state.get("optimizer")
        if optimizer is not None:
            self._inner.load(optimizer)
        self._checkpoint.load(state)


@dataclass(slots=True)
class _Trained:
    """Of this peer, since the last round."""

    steps: int = 0
    samples: int = 0

    def count(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that requires a gradient")
    if any(not p.is_floating_point() for _, p in named):
        raise ValueError("parameters must be real floating-point tensors")
    return named
