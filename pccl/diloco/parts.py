"""The parts of a trainer, and how they are put together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import xxhash

from pccl import Communicator, SharedState, TensorInfo
from pccl.diloco.exchange import Accounts, Exchange, Meter, Share
from pccl.diloco.group import Group, LeaderClock, Quorum
from pccl.diloco.model_state import Buffers, Frozen, memory
from pccl.diloco.modes import Delayed, Fragment, Schedule, Streaming, Synchronous
from pccl.diloco.outer import Eager, Outer, OuterOptimizer, Rates, Shared, split
from pccl.diloco.replica import Named, Replica, Saved, check_team, is_sharded
from pccl.diloco.settings import Settings, decode, encode, layout_digest
from pccl.diloco.wires import Route, Way, carrier

_SAVED = {"config", "clock", "theta", "velocity", "revision", "frozen", "buffers"}


class Parts:
    """Makes the parts for a model and its settings, and tells which state they have together.

    Attributes:
        replica: the processes of this one.
        meter: counts what the rounds cost.
        outer: theta, v and k.
        exchanges: one for each fragment of the model.
        pace: when a round is due, in modes without fragments.
        schedule: what a round does.
        group: the peers.
    """

    def __init__(
        self,
        comm: Communicator,
        model: torch.nn.Module,
        settings: Settings,
        rates: Rates,
        quorum: Quorum,
        accounts: Accounts,
    ) -> None:
        self.replica = replica_of(model)
        if self.replica.size > 1:
            settings.check_sharded(ledger=accounts.exist)
            check_team(comm, self.replica)
        named = _trained(model)
        self._comm = comm
        self._accounts = accounts
        self.meter = Meter()
        self._frozen = Frozen(model, self.replica)
        self._buffers = Buffers(model, settings.buffers)
        self.outer = Outer(
            named,
            split(named, settings.fragments, settings.pattern),
            OuterOptimizer(rates, settings.nesterov),
            self.replica,
        )
        self._config = self._encoded(settings, named, quorum)
        self._late_decay = settings.late_decay
        self._route = Route()
        self.pace = settings.pace()
        if self.replica.size > 1 and settings.inner_seconds is not None:
            self.pace = LeaderClock(self.pace, self.replica)
        self.exchanges = self._exchanges_of(settings)
        self.schedule = self._schedule_of(settings)
        shared, complete = self._shared_states()
        parts = self._frozen, self._buffers, accounts
        self.group = Group(comm, shared, complete, parts, quorum, self.meter, self.replica)

    def _encoded(self, settings: Settings, named: Named, quorum: Quorum) -> torch.Tensor:
        return encode(
            {
                **settings.to_dict(),
                # dtypes are left out: a bf16 peer on a GPU and an fp32 one on a CPU may be in a run
                "parameters": layout_digest([(name, list(p.shape)) for name, p in named]),
                "not_trained": layout_digest([*self._frozen.layout(), *self._buffers.layout()]),
                "peers_to_go_on": quorum.least,
                "shard": [self.replica.index, self.replica.size],
            }
        )

    def _exchanges_of(self, settings: Settings) -> list[Exchange]:
        """One for each fragment; the buffers are averaged with the last one."""
        parts = self.outer.parts
        none = Buffers(torch.nn.Module(), self._buffers.mode)
        return [
            Exchange(
                self._comm,
                part,
                self._buffers if part is parts[-1] else none,
                carrier(settings.wire, part.theta.numel(), self._route),
                Share(settings.weight, self._always_weighs(settings), self.replica),
                self.meter,
                self._accounts,
                self.replica,
            )
            for part in parts
        ]

    def _always_weighs(self, settings: Settings) -> bool:
        """Whether means are sums: of who is late the weight is 0, and counts are added up."""
        return settings.deadline_peers is not None or self._accounts.counted

    def _schedule_of(self, settings: Settings) -> Schedule:
        exchange = self.exchanges[-1]
        if settings.mode == "sync":
            return Synchronous(exchange, self.pace, settings.late_decay)
        if settings.mode == "streaming":
            return self._streaming(settings)
        view = Eager(self.outer.parts[0]) if settings.mode == "eager" else Shared()
        return Delayed(exchange, self.pace, view, settings.late_decay)

    def _streaming(self, settings: Settings) -> Streaming:
        own = self.outer.entries()
        if self._buffers.mode != "local":
            own[-1].extend(self._buffers.entries())
        fragments = [
            Fragment(exchange, SharedState([*self._common_entries(), *entries]))
            for exchange, entries in zip(self.exchanges, own, strict=True)
        ]
        assert settings.inner_steps is not None
        return Streaming(fragments, settings.inner_steps, settings.overlap, settings.alpha)

    def _common_entries(self) -> list[TensorInfo]:
        return [
            TensorInfo.from_torch(self._config, "diloco.config"),
            TensorInfo.from_torch(self.outer.clock, "diloco.clock"),
            *self._route.entries(),
        ]

    def _shared_states(self) -> tuple[SharedState, SharedState]:
        """The state that every round synchronises, and that of a round that admits newcomers."""
        always = [*self._common_entries(), *chain.from_iterable(self.outer.entries())]
        always += self._accounts.entries()
        at_joins = [*self._frozen.entries, *self.schedule.entries()]
        (at_joins if self._buffers.mode == "local" else always).extend(self._buffers.entries())
        shared = SharedState(always)
        return shared, SharedState(always + at_joins) if at_joins else shared

    def join(self) -> int:
        """Joins the run. Returns at which inner step this peer goes on."""
        self.group.join(self._config)
        self._check_whole()
        return self._begin()

    def _begin(self) -> int:
        position = self.schedule.begin()
        self.outer.adopt()
        self._buffers.put()
        return position

    def rejoin(self) -> None:
        """The run has gone on without this peer: joins it once more, with what nobody else has."""
        exchange = self.exchanges[-1]
        rescued = self.schedule.rescue()
        if not self._accounts.rejoin():
            exchange.share.drop()
            rescued = False
        self.outer.rename()  # all others may have ended
        self.group.rejoin(self._config)
        self._begin()
        exchange.adopt()
        if rescued:
            exchange.reclaim(self._late_decay)
        self.pace.rejoin()

    def _check_whole(self) -> None:
        """All processes of this replica have taken over what one other replica has.

        They have not if that one was lost when the first of them had its part, and the others then
        took over what another one has; but only in the first synchronisation of a run.
        """
        own = [*self.outer.clock.tolist(), self.group.shared.revision]
        if any(said != own for said in self.replica.exchange(own)):
            raise RuntimeError(
                "a replica was lost at the moment when the run began, and only some of its shards "
                "were taken over: start all replicas again"
            )

    def count(self, samples: int | None) -> None:
        """This peer has trained on so many more; None: it has not told, and it is one step."""
        if samples is None and self._accounts.counted:
            raise ValueError(
                "a ledger whose rounds may end early must know how many samples a step has trained "
                "on: diloco.step(samples=len(batch))"
            )
        samples = 1 if samples is None else samples
        for exchange in self.exchanges:
            exchange.share.count(samples)
        self._accounts.train(samples)

    def way(self, fragment: int) -> Way:
        """That which the progress of a fragment went at last."""
        return self.exchanges[fragment].carrier.way

    def digest(self) -> str:
        """Of what peers have in common between rounds."""
        digest = xxhash.xxh3_128()
        for tensor in self.outer.tensors():
            digest.update(memory(tensor))
        self._frozen.hash_into(digest)
        if self._buffers.mode != "local":
            for tensor in self._buffers.shared:
                digest.update(memory(tensor))
        return digest.hexdigest()

    # ---- checkpoints ----

    def state_dict(self, sharded: bool) -> dict[str, Any]:
        """A copy of all, but for the inner optimizer."""
        if self._buffers.mode == "local":
            self._buffers.gather()
        schedule = self.schedule.state_dict(self.group)
        if "means" in schedule:  # of a mode without fragments; one who fills in a form needs all
            means = schedule["means"] or (self.exchanges[0].means if sharded else [])
            schedule["means"] = [self.outer.join([mean], sharded) for mean in means[:1]]
            schedule["means"] += [mean.clone() for mean in means[1:]]
        return {
            "config": self._config.clone(),
            **self.outer.state_dict(sharded),
            "schedule": schedule,
            "carrier": self._carriers_state(sharded),
            **self._accounts.state_dict(),
            "revision": self.group.shared.revision,
            "frozen": self._frozen.state_dict(sharded),
            "buffers": self._buffers.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that is of something else, or no state at all."""
        try:
            self._check(state)
        except (TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
            kind = type(error).__name__
            raise ValueError(
                f"the state is none that DiLoCo.state_dict() has made ({kind}: {error})"
            ) from error

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = _SAVED - {*state}
        if missing:
            raise ValueError(
                f"the state is none that DiLoCo.state_dict() has made: it has no {min(missing)!r}"
            )
        own, saved = decode(self._config), decode(state["config"])
        if own["parameters"] != saved["parameters"]:
            raise ValueError("the state belongs to a model with other parameters")
        self._frozen.check(state["frozen"])
        self._buffers.check(state["buffers"])
        self._accounts.check(state)
        self.outer.check(state)
        schedule = state.get("schedule", {})
        counts = {**schedule, "revision": state["revision"]}
        means = counts.pop("means", [])
        for name, count in counts.items():
            if count is not None and not (isinstance(count, int) and 0 <= count < 1 << 62):
                raise ValueError(f"{name} is {count!r} in the state: it must be a count")
        for mean in means[:1]:
            self.outer.cut(mean)
        for mine, mean in zip(self.exchanges[0].means[1:], means[1:], strict=False):
            if mine.shape != mean.shape:
                raise ValueError(
                    f"a mean has shape {list(mean.shape)} in the state and {list(mine.shape)} here"
                )
        for kept in state.get("carrier", {}).values():
            self.outer.cut(kept)

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that has been checked."""
        self._frozen.load(state["frozen"])
        self._buffers.load(state["buffers"])
        self.outer.load(state)
        self._accounts.load(state)
        schedule = dict(state.get("schedule", {}))
        if means := schedule.get("means"):
            schedule["means"] = [*self.outer.cut(means[0]), *means[1:]]
        self.schedule.load(schedule)
        self._load_carriers(state.get("carrier", {}))
        self.group.shared.revision = state["revision"]

    def _carriers_state(self, sharded: bool) -> dict[str, Saved]:
        """What each fragment's carrier keeps, joined in the order of the model."""
        states = [exchange.carrier.state_dict() for exchange in self.exchanges]
        keys = states[0]
        return {key: self.outer.join([state[key] for state in states], sharded) for key in keys}

    def _load_carriers(self, joined: Mapping[str, Saved]) -> None:
        states: list[dict[str, torch.Tensor]] = [{} for _ in self.exchanges]
        for key, saved in joined.items():
            for state, piece in zip(states, self.outer.cut(saved), strict=True):
                state[key] = piece
        for exchange, state in zip(self.exchanges, states, strict=True):
            exchange.carrier.load_state_dict(state)


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that requires a gradient")
    if any(not p.is_floating_point() for _, p in named):
        raise ValueError("parameters must be real floating-point tensors")
    return named


def replica_of(model: torch.nn.Module) -> Replica:
    """The replica of a model.

    Raises:
        ValueError: the model is sharded in a way that `DiLoCo` cannot average.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return Replica()
    from pccl.diloco.sharded import Sharded  # loads all that torch has for it

    return Sharded(model)
