"""DiLoCo, distributed low-communication training (arXiv 2311.08105), for peers that come and go.

Every peer trains its own copy w of the model for H inner steps. Then all peers average their
progress, and one outer step updates the shared parameters theta:

    w <- theta;   H times:  w <- inner_optimizer(w)
    d = theta - w                            the pseudo-gradient: old minus new, so it points uphill
    D = mean of d over the contributors      one all-reduce, or gathered: see `wire`
    v <- mu v + D
    theta <- theta - eta (D + mu v)          Nesterov in PyTorch's form; without it theta - eta v

eta = 1 with mu = 0 is federated averaging. The peers exchange data once in H steps instead of once
in every step. With mode="delayed", "eager" or "streaming" they do so while they train on.

THE OUTER ROUND

With mode="sync", each of these calls is a round of the whole group, so all peers make the same ones
in the same order:

    1. all_reduce of d, repeated with the survivors until it commits or this peer is alone; with
       buffers="mean" the buffers are part of it, so either everything is averaged or nothing
    2. the outer step updates theta, v and the counter k; with buffers="first" the buffers are
       broadcast
    3. are_peers_pending, and update_topology if any are
    4. sync_shared_state: checks that all peers hold the same bits; a newcomer receives theta, v, k
       and what is not trained. Frozen parameters are included only if a newcomer was admitted
    5. w <- theta

A newcomer's first call is sync_shared_state. It matches step 4 of the round that admitted it; from
then on the newcomer is in phase with the others, with H inner steps from the same theta. With fewer
than min_peers, that call fails on all peers, which admit others and repeat it.

WHEN A PEER IS LOST

- During the all-reduce: it aborts on all peers, and the survivors repeat it with their own d, which
  is unchanged. The mean is over the contributors to the attempt that commits.
- After the all-reduce: either all survivors have the mean or none has. The following rounds run
  without the lost peer.
- During the synchronisation: the survivors continue; another holder sends what the lost peer was
  sending.
- If all others are lost, there is nothing to average. With alone="continue" no outer step is taken
  and k does not change, but training continues: the progress stays in w and so in the next
  pseudo-gradient, and newcomers are admitted after every H steps. With alone="step" the peer's own
  d is the mean. With alone="wait" it admits others until min_peers are present, and averages with
  them.

DELAYED

With mode="delayed" a mean travels while the next round trains, and is applied one round late. For
round k:

    w <- theta(k);   H times:  w <- inner_optimizer(w)
    d(k) = theta(k) - w                      before theta moves
    D(k-1) = mean of d(k-1)                  awaited: it was launched a round ago
    v(k+1) = mu v(k) + D(k-1)
    theta(k+1) = theta(k) - eta (D(k-1) + mu v(k+1))
    launch the mean of d(k);   w <- theta(k+1)

The first round has no D, so theta(1) = theta(0), and the counter begins with the second round. This
is the one-step-delayed DiLoCo of PCCL's examples. In each round all peers await the mean, and call
are_peers_pending, sync_shared_state (not in the first round), and all_reduce_async.

- A newcomer has no d(k), so it cannot take part in the mean of round k, but must know it to be in
  phase. So if peers are pending, that mean is not launched but made at once. Then they are
  admitted, and receive D(k) with theta(k+1), v(k+1) and the counter.
- When a peer is lost, the survivors launch again at their next inner step.
- If no mean comes of it, because all others are lost (or, with alone="wait", too few are left),
  d(k) is given back: w <- w - d(k), and so it is in the next pseudo-gradient.
- The mean of the last round is still under way when a loop ends. `finish` applies it.

EAGER

mode="eager" is "delayed", but each peer m trains from a guess of its own, in which its own part of
the mean before is replaced by that of the mean under way (arXiv 2502.12996). With M contributors:

    d(k) = theta_m(k) - w
    v, theta = OuterOptimizer(v, theta, D(k-1))      as above, equal on all peers
    g(k) = d(k) / M + (D(k-1) - d(k-1) / M)
    v_m(k+1), theta_m(k+1) = OuterOptimizer(v_m(k), theta_m(k), g(k))
    launch the mean of d(k);   w <- theta_m(k+1)

theta, v and the counter are shared, and driven by means only. theta_m and v_m are not: a peer that
joins, resumes, or had no mean begins with theta_m = theta, v_m = v and d(k-1) = 0. `finish` ends
with w <- theta.

STREAMING

mode="streaming" cuts the model into P fragments, each with its own theta, v and counter, and
averages them one after the other while the whole model trains on (arXiv 2501.18512). With tau
`overlap` and alpha the part that a peer keeps of its own, in every H inner steps, for each
fragment p:

    at step o_p = floor((p + 1) H / P):   d = theta_p - w_p;   launch the mean of d
    at step o_p + tau:                    v_p, theta_p = OuterOptimizer(v_p, theta_p, D)
                                          w_p <- alpha w_p + (1 - alpha) theta_p

With P = 1, tau = 0 and alpha = 0 it is "sync", to the bit. Each fragment that is applied is a
round: the peers call are_peers_pending and launch the mean at o_p, and call sync_shared_state for
theta_p, v_p and the counters when they apply it. `outer_step` is the least of the counters.

- If peers are pending at o_p, the mean of d is not launched but made and applied at once. Then they
  are admitted, and receive theta, v and the counters of all fragments, and at which of the H steps
  the others are.
- When a peer is lost, the survivors launch again at their next inner step.
- If no mean comes of it, w stays as it is: the progress is in the next pseudo-gradient of that
  fragment.

PEERS THAT ARE NOT ALIKE

With weight="samples", D = sum of (n_m d_m) / sum of n_m, with n_m the samples of peer m: each peer
sends n_m d_m, and n_m, and all divide the same sum by the same number. So a peer with n_m = 0 takes
part in the collective and adds nothing; that is what a late one does in a deadline round:

    theta <- OuterOptimizer(theta, mean over those in time);   w <- theta - late_decay d

Deadline rounds begin with are_peers_pending, in which the master drops peers that do not come
within the grace. Such a peer joins the run once more, and goes on as a late one:

    d = theta - w;   connect, sync_shared_state;   w <- theta - late_decay d

With inner_seconds or deadline_peers a peer foresees, by the longest step of the round, when its
next inner step would end, and does not begin one that others would have to wait for. With any of
the three, the peers of a round that has admitted nobody tell each other at its end how long they
have trained, by an all-gather of five numbers.

SHARDED MODELS

A replica whose model FSDP2 shards over S processes is S peers, of which peer s is in the group of
the shards s, and averages those. All equations hold for each shard, and so for the whole model; the
replicas are what is called peers above, and `min_peers` counts. The S peers are a team (see
`pccl.torch.communicator`): the master admits it as a whole, and drops it as a whole.

- Whether peers are pending, and their admission, are rounds of the run: the same for all groups.
- Two groups may lose a replica at different places of a round, one with it in the mean, the other
  without. So replicas average random numbers with their progress, which tell of whom a mean is; the
  S processes compare them, and repeat the mean if they differ. So do all replicas alike.
- If one process has found that no other replica is left, that is so for all S.
- Each round ends when all S processes are through with it.

Decisions that must be the same on all peers depend on the outcome of a round or on shared state,
never on the current world size, which two peers may see differently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, get_args

import torch
from torch.utils.hooks import RemovableHandle

from pccl import Communicator, KickedError, ReduceInfo, Result, SharedState
from pccl.data import Ledger
from pccl.diloco.exchange import Accounts, WeightBy
from pccl.diloco.group import AlonePolicy, Quorum
from pccl.diloco.model_state import BufferMode, InnerState
from pccl.diloco.modes import Outcome
from pccl.diloco.outer import Mode, Pattern, Rate, rates
from pccl.diloco.parts import Parts
from pccl.diloco.rounds import OuterRound, PeerShare, Stopwatch, call_the_roll
from pccl.diloco.settings import Settings, check_word, read_state
from pccl.diloco.wires import Wire
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
        inner_steps: H, calls of `step` between outer steps.
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
            each peer, and gathered; what that takes away is added to the next one (error feedback).
            With so many peers that a gather would receive more bytes than the all-reduce of "fp32",
            they go around the ring like that, and the log says so at INFO. Memory: three more fp32
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
        inner_steps: int | None = None,
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
        own_rates = rates(
            outer_lr,
            outer_momentum,
            mode=mode,
            inner_steps=inner_steps,
            sparse=wire == "sparse",
            muon="Muon" in type(inner_optimizer).__name__,
        )
        settings = Settings(
            inner_steps=inner_steps,
            inner_seconds=inner_seconds,
            deadline_peers=deadline_peers,
            grace=grace,
            late_decay=late_decay,
            weight=weight,
            outer_lr=own_rates.lr,
            outer_momentum=own_rates.momentum,
            nesterov=nesterov,
            buffers=buffers,
            mode=mode,
            wire=wire,
            fragments=fragments,
            pattern=pattern,
            overlap=overlap,
            alpha=alpha,
        )
        settings.check(ledger=ledger is not None)
        quorum = _quorum(min_peers, alone, deadline_peers)
        accounts = Accounts(ledger, counted=settings.ends_early)
        self._comm = comm
        self._optimizer = inner_optimizer
        self._settings = settings
        self._stepping = False  # in `step`, which counts the inner step itself
        self._hook: RemovableHandle | None = None
        self._rejoins = 0  # since the last round that this peer was in
        self._last_round: OuterRound | None = None
        self._parts = Parts(comm, model, settings, own_rates, quorum, accounts)
        self._inner = InnerState(inner_optimizer, self._parts.replica)
        if state is not None:
            self._load(self._given(state))
        self._inner_step = self._parts.join()
        self._trained = _Trained()
        self._stopwatch = Stopwatch(self._parts.meter)
        self._parts.pace.begin()

    # ---- what a script reads ----

    @property
    def outer_step(self) -> int:
        """k, the outer steps that the run has taken: equal on all peers, made for schedules."""
        return self._parts.outer.outer_step

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer round, below `inner_steps`; see also "streaming"."""
        return self._inner_step

    @property
    def last_round(self) -> OuterRound | None:
        """What happened in the last outer round; None before the first."""
        return self._last_round

    @property
    def world_size(self) -> int:
        """Peers of the group at this moment, this one included."""
        return self._comm.world_size

    @property
    def shared_state(self) -> SharedState:
        """theta, v, k, the settings, and buffers unless they are local.

        Its revision counts the synchronisations of the run.
        """
        return self._parts.group.shared

    @property
    def last_reduce(self) -> ReduceInfo | None:
        """Info of the last all-reduce that committed; None before the first."""
        return self._parts.meter.last_reduce

    @property
    def tx_bytes(self) -> int:
        """Payload bytes that this peer has sent in committed all-reduces and synchronisations."""
        return self._parts.meter.tx_bytes

    @property
    def rx_bytes(self) -> int:
        """Payload bytes that this peer has received in them."""
        return self._parts.meter.rx_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of theta, which is what one all-reduce averages."""
        return self._parts.outer.nbytes

    def state_digest(self) -> str:
        """The XXH3-128, in hex, of everything that peers have in common between outer rounds.

        That is theta, v, k, the frozen parameters as they are in the model now, and the buffers as
        of the last round, unless they are local.
        """
        return self._parts.digest()

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
        return {**self._parts.state_dict(sharded), "optimizer": self._inner.state_dict(sharded)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `state_dict` to a file for the `state` of a later constructor, atomically.

        The file is complete and on disk when this returns. If it fails, or the process dies
        meanwhile, the previous file is unchanged. Of a model that is sharded, all processes of the
        replica make this call, and the first one writes.

        Raises:
            OSError: it cannot be written.
        """
        state = self.state_dict()
        if self._parts.replica.index == 0:
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
        self._parts.count(samples)
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

    def _after_inner_step(self, samples: int | None) -> OuterRound | None:
        self._trained.count(1 if samples is None else samples)
        self._inner_step += 1
        at = self._inner_step
        due = self._parts.schedule.due(at)
        if self._settings.mode == "streaming":
            assert self._settings.inner_steps is not None
            self._inner_step %= self._settings.inner_steps
        elif due:
            self._inner_step = 0
        if not due:
            self._poll()
            return None
        return self._round(at)

    def _round(self, at: int) -> OuterRound | None:
        try:
            with self._stopwatch.round():
                outcome = self._parts.schedule.round(self._parts.group, at)
                self._parts.group.claim()
                self._parts.replica.all(True)  # one that left now would take the others along
            if outcome is None:
                return None
            self._last_round = self._report(outcome)
            self._rejoins = 0
        except KickedError as error:
            self._last_round = self._report(self._rejoin(error))
        return self._last_round

    def _poll(self) -> None:
        try:
            self._parts.schedule.poll()
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
                    self._parts.rejoin()
                return Outcome(contributors=0, retries=0, admitted=True, rejoined=True)
            except KickedError as again:
                error = again

    def _report(self, outcome: Outcome) -> OuterRound:
        trained, self._trained = self._trained, _Trained()
        own = self._stopwatch.share(trained.steps, trained.samples, self._parts.pace.late)
        shares: tuple[PeerShare, ...] = (own,)
        if self._settings.unlike and not outcome.admitted:  # newcomers are not at this place
            with self._stopwatch.round():
                shares = call_the_roll(self._comm, own)
            self._parts.pace.heard([(share.compute_s, share.inner_steps) for share in shares])
        way = self._parts.way(outcome.fragment)
        report = self._stopwatch.report(self.outer_step, outcome, way, shares)
        self._parts.pace.begin()
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
                    f"a round has more batches than its {self._settings.inner_steps} inner steps: "
                    "give the ledger a smaller share"
                )
            yield batch
        if self._last_round is before:
            self._inner_step = 0
            self._parts.pace.late = False  # there is nothing more to train on
            self._round(self._settings.inner_steps or 0)

    def __enter__(self) -> DiLoCo:
        """From here on, each step of the inner optimizer does what `step` does.

        It does not clear the gradients. A step that a GradScaler skips is not seen, and not
        counted; `step(scaler)` counts it.
        """

        def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if not self._stepping:
                self._parts.count(None)
                self._after_inner_step(None)

        self._hook = self._optimizer.register_step_post_hook(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Up to here; then `finish`, unless an exception has ended the block."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Ends the training: waits for the mean that is under way, and applies it.

        For mode="delayed", "eager" and "streaming": call it after the last round, on all peers, in
        place of another one; the model is theta then. In mode="sync" nothing is under way, and it
        does nothing. The end of a `with` block calls it.

        Raises:
            PCCLError: as for `step`.
        """
        self._parts.schedule.finish(self._parts.group)
        self._parts.replica.all(True)

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
        self._parts.check(state)
        optimizer = state.get("optimizer")
        if optimizer is not None:
            self._inner.load(optimizer)
        self._parts.load(state)


@dataclass(slots=True)
class _Trained:
    """Of this peer, since the last round."""

    steps: int = 0
    samples: int = 0

    def count(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples


def _quorum(min_peers: int, alone: AlonePolicy, deadline_peers: int | None) -> Quorum:
    check_word("alone", alone, get_args(AlonePolicy))
    if min_peers < 1:
        raise ValueError(f"min_peers={min_peers} must be at least 1")
    return Quorum(min_peers, alone, deadline_peers or 1)
