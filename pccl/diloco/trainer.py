"""DiLoCo, distributed low-communication training (arXiv 2311.08105), with peers that come and go.

docs/internals/diloco.md has the equations of all modes, and what happens when a peer is lost.
Decisions that must be the same on all peers depend on the outcome of a round or on shared state,
never on the current world size, which two peers may see differently.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch.nn.parameter import is_lazy

from pccl import (
    Communicator,
    KickedError,
    PCCLError,
    ReduceInfo,
    Result,
    SharedState,
    TensorInfo,
    extension,
)
from pccl.data import Ledger
from pccl.diloco.averaging import Selector, averager_of
from pccl.diloco.checkpoint import Checkpoint, Checkpoints, Saver, read_parts, read_state
from pccl.diloco.decoupled import Decoupled, Learner, start
from pccl.diloco.exchange import Exchange, LedgerHooks, Quarantine, Weight
from pccl.diloco.membership import Group
from pccl.diloco.misuse import Misuse, warn_unfinished
from pccl.diloco.model import (
    Buffers,
    Frozen,
    InnerState,
    Named,
    check_team,
    copied,
    memory,
    replica_of,
)
from pccl.diloco.muon import is_muon
from pccl.diloco.outer import Outer, OuterOptimizer, Radial, split, view_of
from pccl.diloco.pace import Forecast, pace_of
from pccl.diloco.schedule import Fragment, Schedule
from pccl.diloco.settings import (
    AlonePolicy,
    BufferMode,
    InnerSteps,
    Merge,
    Outliers,
    Pattern,
    Rate,
    Settings,
    WeightBy,
    checked_steps,
    encode,
    layout_digest,
    rates,
)
from pccl.diloco.stats import Meter, Outcome, OuterRound, PeerShare, Work, gather_shares
from pccl.insight import LogMetrics
from pccl.kernels import Wire
from pccl.runtime.checkpoint import replacing
from pccl.support import require, whole
from pccl.types import Mode

_REJOINS_MAX = 3  # in a row, without a round between them
_log = logging.getLogger("pccl.diloco")

T = TypeVar("T")
State = Mapping[str, Any] | str | os.PathLike[str] | Callable[[dict[str, Any]], object]


class DiLoCo:
    """Trains a model with DiLoCo (arXiv 2311.08105), together with the peers of a communicator.

        with pccl.Communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)
            for batch in batches:
                model(batch).loss.backward()
                diloco.step()
            diloco.finish()

    Or put `with DiLoCo(...):` around an existing loop that steps the optimizer itself.

    After each round all peers hold the same bits of theta, the outer parameters (fp32 on the CPU,
    whatever the model's dtype and device), of v, their momentum, and of the count of outer steps.
    docs/howto/diloco.md explains the settings, and docs/internals/diloco.md has the equations.
    Memory: four fp32 copies of the trained parameters; five with mode="decoupled" and "delayed";
    three more with a quantized wire.

    Build the model and the optimizer first, and connect last: as soon as `connect` has returned,
    the others wait for this constructor. Clip and accumulate gradients before `step`, as with any
    optimizer, and derive learning rates from `progress`, never from a counter of the script. Do not
    replace the parameters with other tensors afterwards. Parameters that do not require a gradient
    now are frozen, and must not change.

    If FSDP2 (`fully_shard`) shards the model, each of its processes creates this object with its
    own `pccl.torch.communicator`, and all make the same calls. Each process then has its shards of
    theta and v, and weights count the samples of a whole replica.

    Args:
        comm: a connected communicator. All peers of its group train the same model with the same
            settings, except `min_peers`, `state`, `log_metrics`, and `alone` unless it is "wait".
            Other groups of the run must use this class, too.
        model: the module to train. Its parameters matter only on the first peer of a run; all other
            peers receive the shared ones in this constructor.
        inner_optimizer: optimizer of the parameters of `model`; usually AdamW.
        inner_steps: H, calls of `step` between outer steps: a number, or points (k, steps). H is
            linear in the outer step k between points, rounded down, and constant beyond them. See
            also `quadratic_steps`.
        inner_seconds: instead of `inner_steps`, the seconds between outer steps.
        outer_lr: eta, a number or points. None: by the number of contributors, 0.4 for 1, 0.6 for 2
            to 4, up to 0.8 for 8 or more; with its default momentum 0.6 with mode="delayed"; 1 with
            wire="sparse".
        outer_momentum: mu, a number or points. None: 0.9; 0.5 with fewer than 20 inner steps, else
            0.6 if the inner optimizer is Muon; at most 0.85 with mode="delayed"; 0 with
            wire="sparse".
        nesterov: whether the outer momentum is Nesterov's.
        min_peers: peers that a run needs to start, or to resume; the constructor waits for them. A
            started run continues with any number, unless `alone` is "wait".
        state: the `state_dict` of an earlier run to resume; the path of a file that `save` has
            written, or of a checkpoint of `Checkpoints`; or a function that fills in a state, such
            as `partial(dcp.load, checkpoint_id=path)`. When a run starts, the latest state among
            its first `min_peers` wins. A newcomer to a run in progress receives the state of the
            others, and is refused if its own state is later than theirs.
        buffers: persistent buffers. "mean": their changes are averaged with the pseudo-gradients,
            integers rounded towards zero. "first": all take those of the peer that joined the run
            first. "local": each peer keeps its own; a newcomer receives those of another.
        alone: what to do in a round without other peers. "continue": train on without outer steps,
            until another peer joins. "step": take the outer step. "wait": admit others until there
            are `min_peers`, at least 2.
        mode: when a mean is applied. "sync": at once. "delayed" (or "eager"): at the end of the
            next round; until then peers train from a guess of it. "streaming": some inner steps
            later, one fragment of the model after the other. "decoupled": likewise, by a thread
            beside the training, which waits for no other peer.
        wire: how pseudo-gradients are sent: "fp32"; or quantized by each peer, with error feedback,
            as "int8", "int4", "e3m0", "2bit" or "sparse". See `OuterRound.algorithm`.
        fragments: P, with mode="streaming" or "decoupled": the parts of the model, at most H.
        pattern: "strided": layer i is in fragment i mod P. "sequential": fragments are runs of
            layers.
        overlap: tau, with mode="streaming": inner steps from the launch of a mean to its
            application, less than floor(H / P). A peer keeps what it has learned meanwhile.
        alpha: with mode="streaming", the part that a peer keeps of its own parameters when it takes
            over theta, in [0, 1).
        weight: of a pseudo-gradient. "peers": all the same. "samples": as passed to `step`.
            "rate": the square of the samples, divided by the number of inner steps. None: "rate"
            with mode="decoupled", else "peers".
        deadline_peers: K: a round waits for K peers, and then for the others no longer than
            `grace`. None: it waits for all; with mode="decoupled" K is 1.
        grace: seconds. With deadline_peers, None means that it is measured. With inner_seconds, a
            peer does not begin a step that would end more than this too late; None means 0.
        late_decay: the part of its progress that a late peer keeps, from 0 to 1.
        merge: "mean"; or "radial": norms and directions of each parameter are averaged separately.
        quarantine: leave out pseudo-gradients that are not finite, or whose norm is more than ten
            times the median of three or more; after this many rounds in a row the peer gets a
            `KickedError`. None: one that is not finite counts as zero, and all others are averaged.
        outliers: with quarantine: "exclude"; or "clip": norms above the median are clipped to it.
        ledger: gives each peer its samples, each exactly once; see `pccl.data` and `round_of`.
        checkpoints: checkpoints that all peers write together. If `state` is None, a new run
            begins with the latest of them.
        log_metrics: called after each outer round, with the metrics of `OuterRound.flat` and
            `Communicator.stats().flat()`, and the outer step, as `wandb.log` is. If it raises, so
            does the call that made the round, which is complete. With mode="decoupled", another
            thread calls it.

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
        weight: WeightBy | None = None,
        deadline_peers: int | None = None,
        grace: float | None = None,
        late_decay: float = 1.0,
        merge: Merge = "mean",
        quarantine: int | None = None,
        outliers: Outliers = "exclude",
        ledger: Ledger | None = None,
        checkpoints: Checkpoints | None = None,
        log_metrics: LogMetrics | None = None,
    ) -> None:
        given = dict(locals())
        given["mode"] = mode = "delayed" if mode == "eager" else mode
        if mode == "decoupled" and deadline_peers is None:
            given["deadline_peers"] = 1
        given["weight"] = weight or ("rate" if mode == "decoupled" else "peers")
        given["inner_steps"] = None if inner_steps is None else checked_steps(inner_steps)
        counts = {"min_peers": 1, "fragments": 1, "overlap": 0}
        counts |= {"deadline_peers": 1, "quarantine": 1}
        for setting, least in counts.items():
            if given[setting] is not None:
                given[setting] = whole(setting, given[setting], least=least)
        require("model", model, torch.nn.Module)
        require("inner_optimizer", inner_optimizer, torch.optim.Optimizer)
        if ledger is not None:
            require("ledger", ledger, Ledger)
        if checkpoints is not None:
            require("checkpoints", checkpoints, Checkpoints)
        settings = Settings(
            **{name: given[name] for name in Settings.__slots__ if name in given},
            rates=rates(
                outer_lr,
                outer_momentum,
                mode=mode,
                inner_steps=given["inner_steps"],
                sparse=wire == "sparse",
                muon=is_muon(inner_optimizer),
            ),
        )
        settings.check()
        self._comm = comm
        self._optimizer = inner_optimizer
        self._settings = settings
        self._ledger = LedgerHooks(ledger, counted=settings.ends_early)
        self._log_metrics = log_metrics
        self._replica = replica_of(model)
        if self._replica.size > 1:
            settings.check_sharded(ledger=ledger is not None)
            check_team(comm, self._replica)
        self._stepping = False  # in `step`, which counts the inner step itself
        self._entered = False  # a `with` block, in which the script steps the optimizer
        self._rejoins = 0  # since this peer's last round
        self._astray = False  # an exception has left a call in the middle of a round
        self._calls = threading.RLock()  # of the thread that makes calls to other peers
        self._rounds = 0  # rounds begun here
        self._shares: tuple[PeerShare, ...] = ()  # the work of each peer, from the last meeting
        self._ended = 0  # meetings since the end of all learners
        self._seen_round: OuterRound | None = None  # the last one returned by `step`
        self._last_round: OuterRound | None = None
        self._build(model, checkpoints)
        if state is None and checkpoints is not None:
            state = self._latest(checkpoints)
        if state is not None:
            self._load(self._given(state))
        begins = self._group.shared.revision
        self._group.join(settings.min_peers)
        if self._group.shared.revision != begins:
            self._checkpoint.forget()
        self._check_whole()
        self._inner_step = 0
        self._schedule.begin()  # these copy the shared state to the model
        self._outer.adopt()
        self._buffers.put()
        self._work = Work()
        self._meter.begin()
        self._watch(model)
        self._begin_round()
        if self._learner is not None and isinstance(self._pace, Forecast):
            weakref.finalize(self, self._learner.stop)
            start(self._learner, self._pace, weakref.WeakMethod(self._meet_beside))

    def _watch(self, model: torch.nn.Module) -> None:
        """Watches the optimizer's steps, and for mistakes of the script."""
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
        samples = self._count(None)
        self._misuse.inner_step()
        self._after_inner_step(samples)

    # ---- its parts ----

    def _build(self, model: torch.nn.Module, checkpoints: Checkpoints | None) -> None:
        """Creates the parts in order; each uses earlier ones."""
        settings, replica = self._settings, self._replica
        named = _trained_parameters(model)
        self._parameters = dict(model.named_parameters())
        self._meter = Meter(beside=settings.mode == "decoupled")
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
                # without dtypes: a bf16 peer on a GPU and an fp32 one on a CPU may be in one run
                "parameters": layout_digest([(name, list(p.shape)) for name, p in named]),
                "not_trained": layout_digest([*self._frozen.layout, *self._buffers.layout]),
                "shard": [replica.index, replica.size],
                **(checkpoints.config() if checkpoints is not None else {}),
            }
        )
        self._selector = Selector()
        self._pace = pace_of(settings, replica)
        self._learner = Learner() if settings.mode == "decoupled" else None
        self._lock = self._learner.lock if self._learner is not None else nullcontext()
        self._quarantine = None
        if settings.quarantine is not None:
            self._quarantine = Quarantine(
                self._comm, replica, settings.quarantine, settings.outliers
            )
        self._inner = InnerState(self._optimizer, replica)
        self._exchanges = self._exchanges_of(model, named)
        self._schedule = self._schedule_of()
        self._checkpoint = Checkpoint(
            self._config,
            self._frozen,
            self._buffers,
            self._ledger,
            self._outer,
            self._exchanges,
            self._schedule,
        )
        self._saver, self._turn = None, torch.tensor([-1, 0, 0])
        if checkpoints is not None:
            beside = self._learner.enqueue if self._learner is not None else lambda action: action()
            self._saver = Saver(
                checkpoints, self._comm, replica, self._checkpoint, self._inner, beside, self._turn
            )
        self._group = self._schedule.group = self._group_of()

    def _exchanges_of(self, model: torch.nn.Module, named: Named) -> list[Exchange]:
        """The exchanges, one for each fragment; the buffers are averaged with the last one."""
        modules = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
        plain = {id(each.weight) for each in modules}
        settings = self._settings
        # weights are needed if late peers have weight 0, or if counts are summed
        always = settings.deadline_peers is not None or self._ledger.counted
        always = always or self._quarantine is not None
        fragments = self._outer.fragments
        none = Buffers(torch.nn.Module(), settings.buffers)
        radial = settings.merge == "radial"
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
                self._quarantine,
                self._inner,
                Radial(fragment, [id(named[i][1]) in plain for i in group]) if radial else None,
                self._lock,
            )
            for fragment, group in zip(fragments, self._outer.groups, strict=True)
        ]

    def _schedule_of(self) -> Schedule:
        settings, entries = self._settings, self._outer.entries()
        if settings.buffers != "local":
            entries[-1].extend(self._buffers.entries())
        fragments = [
            Fragment(
                number,
                exchange,
                SharedState([*self._common_entries(), *entries[number]]),
                view_of(settings, state),
            )
            for number, (exchange, state) in enumerate(
                zip(self._exchanges, self._outer.fragments, strict=True)
            )
        ]
        if self._learner is not None and isinstance(self._pace, Forecast):
            return Decoupled(fragments, self._pace, settings, self._learner)
        return Schedule(fragments, self._pace, settings)

    def _common_entries(self) -> list[TensorInfo]:
        return [
            TensorInfo.from_torch(self._config, "diloco.config"),
            TensorInfo.from_torch(self._outer.clock, "diloco.clock"),
            *self._selector.entries(),
            *self._ledger.entries(),
        ]

    def _group_of(self) -> Group:
        always = [*self._common_entries(), *chain.from_iterable(self._outer.entries())]
        at_joins = [*self._frozen.entries, *self._schedule.entries()]
        at_joins.append(TensorInfo.from_torch(self._turn, "diloco.checkpoints"))
        (at_joins if self._settings.buffers == "local" else always).extend(self._buffers.entries())
        return Group(
            self._comm,
            SharedState(always),
            SharedState(always + at_joins),
            self._settings,
            self._config,
            self._frozen,
            self._buffers,
            self._ledger,
            self._meter,
            self._replica,
            self._pace,
        )

    def _begin_round(self) -> None:
        steps = self._settings.steps_at(self.outer_step, self._schedule.next_fragment)
        self._pace.begin(steps)
        self._rounds += 1
        if isinstance(self._schedule, Decoupled):
            self._schedule.expect(steps)

    def _check_whole(self) -> None:
        """Checks that all processes of this replica have received the state of the same replica."""
        own = [*self._outer.clock.tolist(), self._group.shared.revision]
        if any(row != own for row in self._replica.exchange(own)):
            raise RuntimeError(
                "a replica was lost at the moment when the run began, and only some of its shards "
                "were received: start all replicas again"
            )

    # ---- reports ----

    @property
    def outer_step(self) -> int:
        """k, the outer steps of the run: equal on all peers, for use in schedules."""
        return self._outer.outer_step

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer round; with "streaming", since a fragment was due."""
        return self._learner.steps if self._learner is not None else self._inner_step

    def progress(self, outer_steps: int) -> float:
        """The progress of a run of `outer_steps` outer steps, from 0 to 1, for use in schedules.

        It never falls, and in every mode it is the same on all peers after the same inner step.
        With inner_seconds or mode="decoupled" it changes only between rounds.
        """
        if outer_steps < 1:
            raise ValueError(f"outer_steps={outer_steps} must be at least 1")
        return self._schedule.progress(self._inner_step, outer_steps)

    @property
    def last_round(self) -> OuterRound | None:
        """The result of the last outer round; None before the first."""
        return self._last_round

    def explain(self) -> str:
        """How pseudo-gradients are averaged and why, and what limits this peer's collectives.

        It makes no calls to other peers.
        """
        reasons = dict.fromkeys(exchange.averager.reason for exchange in self._exchanges)
        lines = [f"pseudo-gradients are averaged by {reason}" for reason in reasons]
        return "\n".join([*lines, str(self._comm.explain())])

    @property
    def world_size(self) -> int:
        """The current number of peers in the group, including this one."""
        return self._comm.world_size

    @property
    def shared_state(self) -> SharedState:
        """theta, v, k, the settings, and buffers unless local. Its revision counts rounds."""
        return self._group.shared

    @property
    def last_reduce(self) -> ReduceInfo | None:
        """Info of the last committed averaging; None before the first."""
        return self._meter.last_reduce

    @property
    def tx_bytes(self) -> int:
        """Payload bytes sent in committed averagings and synchronizations."""
        return self._meter.tx_bytes

    @property
    def rx_bytes(self) -> int:
        """Payload bytes received in committed averagings and synchronizations."""
        return self._meter.rx_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of theta."""
        return self._outer.nbytes

    def state_digest(self) -> str:
        """The XXH3-128, in hex, of the common state between outer rounds: theta, v, k, the frozen
        parameters, and buffers unless they are local."""
        digest = xxhash.xxh3_128()
        with self._paused():
            for tensor in self._outer.tensors():
                digest.update(memory(tensor))
            self._frozen.hash_into(digest)
            if self._settings.buffers != "local":
                for tensor in self._buffers.shared:
                    digest.update(memory(tensor))
        return digest.hexdigest()

    def _paused(self) -> AbstractContextManager[None]:
        """Keeps the syncer from changing theta in the block."""
        return self._learner.paused() if self._learner is not None else nullcontext()

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """A copy of the training's state for a checkpoint: the `state` of a later constructor.

        It holds theta and v as flat fp32 tensors on the CPU, k, the settings, frozen parameters,
        buffers, and the states of this peer's inner optimizer and of its wire. It excludes inner
        steps since the last outer round, so take it right after one. Without its "optimizer", the
        next inner optimizer starts afresh. With mode="delayed" this call waits for the mean in
        progress, and includes it; with "streaming" it does not.

        If the model is sharded, all processes of the replica make this call, and each gets the
        whole state. With `sharded`, theta and v are DTensors under the names of the parameters, for
        `torch.distributed.checkpoint`.
        """
        with self._paused():
            state = self._checkpoint.state_dict(sharded)
            state["optimizer"] = self._inner.state_dict(sharded)
            return {name: copied(value) for name, value in state.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `state_dict` to a file for the `state` of a later constructor, atomically.

        If it fails, or the process dies meanwhile, the previous file is unchanged. If the model is
        sharded, all processes of the replica make this call, and the first one writes.

        Raises:
            OSError: the file cannot be written.
        """
        state = self.state_dict()
        if self._replica.index == 0:
            with replacing(path) as file:
                torch.save(state, file)

    # ---- training ----

    def step(
        self, scaler: torch.amp.GradScaler | None = None, *, samples: int | None = None
    ) -> OuterRound | None:
        """Takes one inner step and clears the gradients; every H-th call also runs the outer round.

        Args:
            samples: the samples (or tokens) of the gradients. None: one. Required with a `ledger`
                if rounds may end early, where it counts samples of the ledger.
            scaler: a GradScaler, which steps the inner optimizer and is updated. A skipped step
                counts, too.

        Returns:
            The result of the outer round; None if this call had none. With mode="decoupled", the
            last round that ended since the previous call.

        Raises:
            PCCLError: the communicator is unusable (kicked, master lost). Lost peers do not raise.
                After any other exception, such as Ctrl-C, the next step rejoins the run if needed.
            ValueError: `samples` is negative, missing, or more than the ledger has given.
        """
        if callable(scaler):
            raise TypeError(
                "diloco.step() takes no closure: put the loop into `with diloco:`, and call "
                "optimizer.step(closure)"
            )
        samples = self._count(samples)
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

    def _count(self, samples: int | None) -> int:
        """Adds `samples` to this peer's samples, and returns them; None counts as one."""
        if samples is None and self._ledger.counted:
            raise ValueError(
                "a ledger whose rounds may end early must know how many samples a step has trained "
                "on: diloco.step(samples=len(batch))"
            )
        samples = 1 if samples is None else whole("samples", samples, least=0)
        with self._lock:
            for exchange in self._exchanges:
                exchange.weight.count(samples)
            self._ledger.train(samples)
        return samples

    def _after_inner_step(self, samples: int) -> OuterRound | None:
        with self._lock:
            self._work = self._work.plus(1, samples)
        if self._learner is not None:
            seen = self._seen_round
            self._learner.stepped()
            self._seen_round = self._last_round
            return self._last_round if self._last_round is not seen else None
        self._inner_step += 1
        if self._astray or self._pace.due(self._inner_step):
            return self._meet()
        try:
            with self._or_rejoin():
                if not self._schedule.arrives(self._inner_step):
                    self._schedule.poll()
                    return None
                with self._meter.round():
                    outcome = self._schedule.arrive()
        except KickedError:
            if self._settings.deadline_peers is None:
                raise  # with deadlines, the next meeting finds this, too, and rejoins
            return None
        return self._logged(self._report(outcome))

    @contextmanager
    def _or_rejoin(self) -> Iterator[bool]:
        """If an exception such as Ctrl-C leaves the block, the next step joins the run again: which
        calls the other peers wait for, and what they have applied, is unknown then. Yields whether
        one has left the last block. Other threads wait meanwhile.
        """
        if self._calls._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "this signal handler has interrupted a call of DiLoCo, and must not make another"
            )
        with self._calls:
            before, self._astray = self._astray, True
            try:
                yield before
            except PCCLError:
                self._astray = before
                raise
            self._astray = False

    def _meet_beside(self) -> bool:
        """Runs a meeting of the syncer; returns False after the last."""
        self._meet()
        # when all have ended, each fragment is due once more
        return self._ended <= len(self._exchanges)

    def _meet(self) -> OuterRound | None:
        """Runs the meeting at the end of a round."""
        self._misuse.unfinished = False  # if it raises, the user should see that error
        with self._or_rejoin() as astray:
            with self._lock:
                astray = astray or (self._learner is not None and self._learner.torn)
            self._inner_step = 0
            report = self._rejoined(None) if astray else self._met()
            self._begin_round()
        self._logged(report)
        if self._quarantine is not None:
            self._quarantine.check(self._inner)
        return report

    def _met(self) -> OuterRound | None:
        try:
            with self._meter.round():
                outcome = self._schedule.meet()
                self._group.claim()
                # if one process left now, the others would be dropped with it
                self._replica.all(True)
            admitted = outcome is not None and outcome.admitted
            self._share(admitted)
            saver = None if admitted else self._saver  # newcomers are not at this place
            if saver is not None and saver.is_due(self.outer_step):
                with self._meter.round():
                    saver.meet(self.outer_step)
            report = self._report(outcome)
        except KickedError as error:
            return self._rejoined(error)
        self._rejoins = 0
        return report

    def _rejoined(self, error: KickedError | None) -> OuterRound | None:
        """Rejoins the run, after it has continued without this peer.

        None: after an exception has left a call in the middle of a round.
        """
        while True:
            if error is None:
                what = "an exception has ended a call of this peer in the middle of a round"
                if self._replica.size > 1:
                    raise RuntimeError(f"{what}: start all processes of its replica again")
                _log.warning("%s: it leaves the run and rejoins, so the others go on", what)
                self._comm.close()
            else:
                self._rejoins += 1
                given_up = error.result is Result.RANK_CONNECTION_FAILED
                rejoins = self._settings.deadline_peers is not None and given_up
                if not rejoins or self._rejoins > _REJOINS_MAX:
                    raise error
                _log.warning("the run has continued without this peer, which rejoins: %s", error)
            try:
                with self._meter.round():
                    self._join_again()
                break
            except KickedError as again:
                error = again
        self._share(admitted=True)
        return self._report(Outcome(contributors=0, retries=0, admitted=True, rejoined=True))

    def _join_again(self) -> None:
        rescued = self._schedule.rescue()
        keeps = self._ledger.rejoin()
        if not keeps and self._learner is None:
            for exchange in self._exchanges:
                exchange.weight.drop()
        self._outer.rename()  # if all others have ended, this is a new run
        self._group.rejoin()
        self._schedule.resume(rescued, keeps)
        self._pace.rejoin()

    def _share(self, admitted: bool) -> None:
        """Sends the other peers this one's work since the last meeting."""
        with self._lock:
            work, self._work = self._work, Work()
            learner, idle_s, ends = self._learner, 0.0, False
            if learner is not None:
                idle_s, learner.idle_s, ends = learner.idle_s, 0.0, learner.ends
        own = self._meter.share(work.steps, work.samples, self._pace.late, idle_s)
        self._shares = (own,)
        if self._settings.unlike and not admitted:  # newcomers are not at this place
            with self._meter.round():
                self._shares, all_end = gather_shares(self._comm, own, ends)
            self._ended = self._ended + 1 if all_end else 0
            self._pace.set_speeds([(share.compute_s, share.inner_steps) for share in self._shares])

    def _report(self, outcome: Outcome | None) -> OuterRound | None:
        if outcome is None:
            return None
        algorithm = self._exchanges[outcome.fragment].averager.algorithm
        excluded = self._quarantine.names if self._quarantine is not None else ()
        self._last_round = self._meter.report(
            self.outer_step, outcome, algorithm, excluded, self._shares
        )
        self._misuse.round(outcome, self._exchanges[outcome.fragment])
        return self._last_round

    def _logged(self, report: OuterRound | None) -> OuterRound | None:
        if report is not None and self._log_metrics is not None:
            self._log_metrics(report.flat() | self._comm.stats().flat(), report.outer_step)
        return report

    def round_of(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of one round, and ends the round after the last of them.

        For a `ledger`, whose last rounds have fewer samples. With inner_seconds or deadline_peers a
        round may end before all batches; the next round begins with the remaining ones.

        Raises:
            ValueError: there are more batches than inner steps in a round of a fixed number.
            PCCLError: as for `step`.
        """
        if self._learner is not None:
            yield from self._beside_round_of(loader, self._learner)
            return
        before = self._rounds
        for batch in loader:
            last = self._last_round
            if self._rounds > before and (self._settings.ends_early or (last and last.rejoined)):
                return
            if self._rounds > before:
                raise ValueError(
                    "a round has more batches than inner steps: give the ledger a smaller share, "
                    f"or more than inner_steps={self._settings.inner_steps}"
                )
            yield batch
        if self._rounds == before:
            self._pace.late = False  # no samples are left
            self._meet()

    def _beside_round_of(self, loader: Iterable[T], learner: Learner) -> Iterator[T]:
        """Yields the batches of a pass, which ends early if this peer has given up its samples."""
        learner.wait_while(lambda: self._ledger.waits)
        renewals = self._ledger.renewals
        for batch in loader:
            if self._ledger.renewals != renewals:
                return
            yield batch

    def __enter__(self) -> DiLoCo:
        """From here on, each step of the inner optimizer acts like `step`.

        It does not clear the gradients. A step that a GradScaler skips does not count; with
        `step(scaler)` it does.
        """
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Calls `finish`, unless an exception has ended the block."""
        self._entered = False
        if kind is None:
            self.finish()
        self._misuse.finished()

    def finish(self) -> None:
        """Ends the training: waits for the mean in progress, and applies it.

        Call it on all peers after the last round, instead of another round. The model then holds
        theta. It also completes the checkpoint in progress. With mode="decoupled", it waits until
        all learners have called it or left. The end of a `with` block calls it.

        Raises:
            PCCLError: as for `step`.
        """
        if self._learner is not None:
            self._learner.finish()
        if self._astray:
            _log.warning(
                "an exception has ended a call of this peer in the middle of a round: the model "
                "keeps this peer's own progress, and lacks the mean that was under way"
            )
        else:
            with self._or_rejoin():
                self._schedule.finish()
                if self._saver is not None:
                    self._saver.finish(self.outer_step)
                self._replica.all(True)
        self._misuse.finished()

    # ---- checkpoints ----

    def _latest(self, checkpoints: Checkpoints) -> Path | None:
        """The latest checkpoint, the same for all processes of a replica."""
        found = checkpoints.latest()
        number = self._replica.first(int(found.name) if found is not None else -1)
        return Path(checkpoints.directory) / str(number) if number >= 0 else None

    def _given(self, state: State) -> Mapping[str, Any]:
        if isinstance(state, Mapping):
            return state
        if not callable(state):
            if not os.path.isdir(state):
                return read_state(os.fspath(state))
            own = extension.member(self._comm).number
            before = sum(number < own for number in extension.ring(self._comm))
            place = self._replica.first(before)
            return read_parts(Path(state), place, self._parameters, self._inner)
        self._inner.fill()
        template = self.state_dict(sharded=True)
        state(template)
        return template

    def _load(self, state: Mapping[str, Any]) -> None:
        """Loads a state; raises an error and changes nothing if it does not match."""
        self._checkpoint.check(state)
        optimizer = state.get("optimizer")
        if optimizer is not None:
            self._inner.load(optimizer)
        self._checkpoint.load(state)


def _trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    for name, p in model.named_parameters():
        if p.is_meta or is_lazy(p):
            raise ValueError(f"parameter {name!r} has no content yet: initialize the model first")
        if p.requires_grad and not p.is_floating_point():
            raise ValueError(f"parameter {name!r} is of {p.dtype}: it must be of real numbers")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that requires a gradient")
    return named
