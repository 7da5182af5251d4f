"""DiLoCo, distributed low-communication training (arXiv 2311.08105), for peers that come and go.

Every peer trains its own copy w of the model for H inner steps; then all peers average how far they
have come, and one outer step moves the parameters theta that they share:

    w <- theta;   H times:  w <- inner_optimizer(w)
    d = theta - w                            the pseudo-gradient: old minus new, so it points uphill
    D = mean of d over the contributors      one all-reduce
    v <- mu v + D
    theta <- theta - eta (D + mu v)          Nesterov in PyTorch's form; without it theta - eta v

eta = 1 with mu = 0 is federated averaging. The peers exchange data once in H steps instead of in
every one.

THE OUTER ROUND

Each of these calls is a round of the whole group, so all peers make the same ones in the same
order:

    1. all_reduce of d, again and again with the survivors until it commits or this peer is alone
    2. the outer step: theta, v and the counter k move
    3. are_peers_pending, and update_topology if there are any
    4. sync_shared_state: checks that all hold the same bits; a newcomer receives theta, v, k here
    5. w <- theta

A newcomer's first call is sync_shared_state. It meets step 4 of the round that admitted it, and
from there the newcomer is in phase with the others: H inner steps from the same theta. While
min_peers are not there yet, that call begins nothing, and all admit others and make it again.

WHO MAY VANISH WHEN

- During the all-reduce: it aborts for all, and is repeated by the survivors with their own d, which
  is untouched. The mean is over those who contribute to the attempt that commits.
- After it: the mean has reached all survivors, or none. The rounds that follow go on without the
  lost peer.
- During the synchronisation: the survivors go on with it; what a lost peer was sending comes from
  another holder.
- All others: nothing to average with, so no outer step is taken and k stands still, but training
  goes on. What this peer learns meanwhile stays in w, hence in its next pseudo-gradient, and a
  newcomer is let in after H steps as ever.

Decisions that all peers must take alike rest on the outcome of a round or on shared state, never on
the world size of the moment, which may change between the glances of two peers.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from pccl import (
    Communicator,
    PCCLError,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedState,
    SharedStateSyncInfo,
    TensorInfo,
    TooFewPeersError,
)
from pccl.ext import ffi, lib

_CONFIG_BYTES = 256
_ASK_INTERVAL_S = 0.05  # between questions whether peers are pending, until min_peers are there

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OuterRound:
    """What happened in one outer round, on this peer.

    Attributes:
        outer_step: k after the round.
        contributors: peers whose pseudo-gradients were averaged. 1 means that this peer was alone:
            no outer step was taken.
        retries: attempts of the all-reduce that were given up because a peer was lost.
        admitted: whether newcomers were let in.
        reduce_s: seconds in the all-reduce, which include the wait for the slowest peer.
        tx_bytes: payload sent by this peer, all-reduce and synchronisation together.
        rx_bytes: payload received likewise.
    """

    outer_step: int
    contributors: int
    retries: int
    admitted: bool
    reduce_s: float
    tx_bytes: int
    rx_bytes: int


class DiLoCo:
    """Trains a model with DiLoCo (arXiv 2311.08105), together with the peers of a communicator.

        with pccl.Communicator("host:48148") as comm:
            diloco = DiLoCo(comm, model, optimizer, inner_steps=50)
            for batch in batches:
                loss = model(batch).loss
                loss.backward()
                diloco.step()

    With w the parameters of `model`, theta and v the shared outer parameters and momentum, eta
    `outer_lr` and mu `outer_momentum`, every `inner_steps`-th step ends in

        D = mean over peers of (theta - w)
        v <- mu v + D
        theta <- theta - eta (D + mu v)        (outer_momentum without nesterov: theta - eta v)
        w <- theta

    theta, v and the counter k are one `SharedState`: fp32 on the CPU, whatever the model's dtype
    and device, checked for equal bits on all peers after each outer step. The arithmetic that moves
    them is done by pccl's own kernels, since torch's rounds differently from one CPU to the next.
    Memory: four fp32 copies of the trained parameters.

    What is not shared:
        Parameters that do not require a gradient when this object is made are left alone. Buffers
        (batch-norm statistics and the like) stay each peer's own and are not averaged. The inner
        optimizer's state is each peer's own too: a newcomer begins with a fresh one, and may want
        to warm up its learning rate. A schedule that all peers share is driven by `outer_step`,
        never by a counter of the script, which a newcomer would start at zero.

    Gradient clipping, scaling and accumulation happen before `step`, as with any optimizer. The
    model's parameters must not be replaced by other tensors afterwards.

    Build the model and the optimizer first and connect last: from the moment that `connect`
    returns, the others wait for this constructor.

    Args:
        comm: connected. All peers of its group train the same model with the same settings; other
            groups of the run must take part in the same rounds of admission, which they do if they
            use this class.
        model: the module to train. Its initial parameters matter only on the first peer of a run:
            everybody else receives the shared ones here.
        inner_optimizer: over the parameters of `model`; AdamW as a rule.
        inner_steps: H, calls of `step` between outer steps.
        outer_lr: eta.
        outer_momentum: mu.
        nesterov: whether the outer momentum is Nesterov's.
        min_peers: a run does not begin, nor go on from `state`, with fewer; the constructor waits.
            Once it has begun, it goes on with any number.
        state: the `state_dict` of an earlier run to go on from. When a run begins, the latest state
            that any of its first `min_peers` has wins. In a run that is under way a newcomer gets
            its state from the others; one whose own is later than theirs is refused.

    Raises:
        ValueError: a setting is out of range, nothing requires a gradient, `state` belongs to
            another model, or the run's settings are not this peer's.
        PCCLError: the communicator cannot go on (not connected, kicked, master lost, another model
            in the run); INVALID_ARGUMENT: `state` is of a later revision than the run's.
    """

    def __init__(
        self,
        comm: Communicator,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        min_peers: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if inner_steps < 1 or min_peers < 1:
            raise ValueError(
                f"inner_steps={inner_steps} and min_peers={min_peers} must be at least 1"
            )
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"outer_lr={outer_lr} must be positive, outer_momentum={outer_momentum} in [0, 1)"
            )
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no parameter that requires a gradient")
        if any(not p.is_floating_point() for _, p in named):
            raise ValueError("parameters must be real floating-point tensors")

        self._comm = comm
        self._optimizer = inner_optimizer
        self._inner_steps = inner_steps
        self._inner_step = 0
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._nesterov = nesterov
        self._min_peers = min_peers
        self._parameters = [p for _, p in named]

        n = sum(p.numel() for p in self._parameters)
        self._theta = torch.empty(n)
        self._velocity = torch.zeros(n)
        self._delta = torch.empty(n)
        self._mean = torch.empty(n)
        # k; and the run's name. Fresh peers differ in it, so that the first one's state is elected.
        self._clock = torch.tensor([0, secrets.randbits(62)], dtype=torch.int64)
        self._config = _encode_config(
            {
                "inner_steps": inner_steps,
                "outer_lr": outer_lr,
                "outer_momentum": outer_momentum,
                "nesterov": nesterov,
                "parameters": _layout_digest(named),
            }
        )
        self._shared = SharedState(
            [
                TensorInfo.from_torch(self._config, "diloco.config"),
                TensorInfo.from_torch(self._clock, "diloco.clock"),
                TensorInfo.from_torch(self._theta, "diloco.theta"),
                TensorInfo.from_torch(self._velocity, "diloco.velocity"),
            ]
        )
        with torch.no_grad():
            for parameter, theta in zip(self._parameters, self._views(self._theta), strict=True):
                theta.copy_(parameter)
        if state is not None:
            self._load(state)
        self._tx_bytes = 0
        self._rx_bytes = 0
        self._last_reduce: ReduceInfo | None = None
        self._join()

    # ---- what a script reads ----

    @property
    def outer_step(self) -> int:
        """k, the outer steps that the run has taken: equal on all peers, made for schedules."""
        return int(self._clock[0])

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer round, below `inner_steps`."""
        return self._inner_step

    @property
    def world_size(self) -> int:
        """Peers of the group at this moment, this one included."""
        return self._comm.world_size

    @property
    def shared_state(self) -> SharedState:
        """theta, v, k and the settings. Its revision counts the synchronisations of the run."""
        return self._shared

    @property
    def last_reduce(self) -> ReduceInfo | None:
        """Of the last all-reduce that committed; None before the first."""
        return self._last_reduce

    @property
    def tx_bytes(self) -> int:
        """Payload bytes that this peer has sent in committed all-reduces and synchronisations."""
        return self._tx_bytes

    @property
    def rx_bytes(self) -> int:
        """Payload bytes that this peer has received likewise."""
        return self._rx_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of theta, which is what one all-reduce averages."""
        return self._theta.numel() * self._theta.element_size()

    def state_digest(self) -> str:
        """The XXH3-128 of theta, v and k, in hex: equal on all peers between two outer rounds."""
        digest = xxhash.xxh3_128()
        for tensor in (self._theta, self._velocity, self._clock[:1]):
            digest.update(_memory(tensor))
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the shared state for a checkpoint, for the `state` of a later constructor.

        theta and v are flat fp32 tensors. Inner steps since the last outer round are not in it, so
        the place to save is right after one; the model's buffers and the inner optimizer are the
        script's to save.
        """
        return {
            "config": self._config.clone(),
            "clock": self._clock.clone(),
            "theta": self._theta.clone(),
            "velocity": self._velocity.clone(),
            "revision": self._shared.revision,
        }

    # ---- training ----

    def step(self) -> OuterRound | None:
        """Takes one inner step and clears the gradients; every H-th call runs the outer round too.

        Returns:
            What happened in the outer round, or None if this call did not come to one. After a
            round the model's parameters equal theta (rounded to their dtype), unless this peer was
            alone.

        Raises:
            PCCLError: the communicator cannot go on (kicked, master lost). Lost peers do not raise.
        """
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._inner_step += 1
        if self._inner_step < self._inner_steps:
            return None
        self._inner_step = 0
        return self._outer_round()

    def _outer_round(self) -> OuterRound:
        self._measure_delta()
        tx_before, rx_before = self._tx_bytes, self._rx_bytes
        began_s = time.monotonic()
        reduced, retries = self._reduce()
        reduce_s = time.monotonic() - began_s
        if reduced is not None:
            self._advance()
        admitted = self._admit()
        if reduced is not None or admitted:
            self._shared.push_revision()
            if self._sync().rx_bytes:
                _log.error("the outer state of this peer had other bits than the run's; replaced")
        if reduced is not None:
            self._adopt()
        return OuterRound(
            outer_step=self.outer_step,
            contributors=1 if reduced is None else reduced.world_size,
            retries=retries,
            admitted=admitted,
            reduce_s=reduce_s,
            tx_bytes=self._tx_bytes - tx_before,
            rx_bytes=self._rx_bytes - rx_before,
        )

    @torch.no_grad()
    def _measure_delta(self) -> None:
        # Local training began at theta as rounded to the parameter's dtype. Measured from the
        # unrounded theta, the delta of a bf16 model would hold the rounding error too, and so pull
        # theta back onto the bf16 grid.
        start = self._mean
        views = zip(
            self._parameters,
            self._views(self._theta),
            self._views(start),
            self._views(self._delta),
            strict=True,
        )
        for parameter, theta, begin, end in views:
            begin.copy_(theta.to(parameter.dtype))
            end.copy_(parameter)
        delta = _floats(self._delta)
        lib.pccl_subtract_f32(delta, _floats(start), delta, start.numel())

    def _reduce(self) -> tuple[ReduceInfo | None, int]:
        """The mean of all deltas, or None if this peer is alone; and how often it was retried."""
        retries = 0
        while True:
            try:
                info = self._comm.all_reduce(self._delta, self._mean, op=ReduceOp.AVG)
            except PCCLError as error:
                if error.result is Result.TOO_FEW_PEERS:
                    return None, retries
                if error.result is not Result.RANK_CONNECTION_LOST:
                    raise
                _log.warning("a peer was lost, averaging again with the others: %s", error)
                retries += 1
            else:
                self._last_reduce = info
                self._count(info)
                return info, retries

    def _advance(self) -> None:
        lib.pccl_outer_sgd(
            _floats(self._theta),
            _floats(self._velocity),
            _floats(self._mean),
            self._theta.numel(),
            self._outer_lr,
            self._outer_momentum,
            int(self._nesterov),
        )
        self._clock[0] += 1

    @torch.no_grad()
    def _adopt(self) -> None:
        for parameter, theta in zip(self._parameters, self._views(self._theta), strict=True):
            parameter.copy_(theta)

    # ---- membership ----

    def _join(self) -> None:
        own_config = self._config.clone()
        while not self._begins():
            while not self._admit():
                time.sleep(_ASK_INTERVAL_S)
        if not torch.equal(own_config, self._config):
            raise ValueError(_describe_mismatch(run=self._config, own=own_config))
        self._adopt()

    def _begins(self) -> bool:
        """Synchronises with a run that is under way, or begins one if `min_peers` are there."""
        try:
            self._sync(self._min_peers)
        except TooFewPeersError:
            return False
        return True

    def _admit(self) -> bool:
        pending = self._comm.are_peers_pending()
        if pending:
            self._comm.update_topology()
        return pending

    def _sync(self, min_peers: int = 1) -> SharedStateSyncInfo:
        info = self._comm.sync_shared_state(self._shared, min_peers=min_peers)
        self._count(info)
        return info

    def _count(self, info: ReduceInfo | SharedStateSyncInfo) -> None:
        self._tx_bytes += info.tx_bytes
        self._rx_bytes += info.rx_bytes

    # ---- memory ----

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The pieces of a flat buffer, each in the shape of its parameter."""
        pieces = torch.split(flat, [p.numel() for p in self._parameters])
        return (piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True))

    def _load(self, state: Mapping[str, Any]) -> None:
        own, saved = _decode_config(self._config), _decode_config(state["config"])
        if own["parameters"] != saved["parameters"]:
            raise ValueError("the state belongs to a model with other parameters")
        self._theta.copy_(state["theta"])
        self._velocity.copy_(state["velocity"])
        self._clock.copy_(state["clock"])
        self._shared.revision = state["revision"]


def _floats(tensor: torch.Tensor) -> Any:
    return ffi.cast("float *", tensor.data_ptr())


def _memory(tensor: torch.Tensor) -> Any:
    return ffi.buffer(ffi.cast("char *", tensor.data_ptr()), tensor.numel() * tensor.element_size())


def _layout_digest(named: list[tuple[str, torch.nn.Parameter]]) -> str:
    # dtypes are left out: a bf16 peer on a GPU and an fp32 peer on a CPU may train together.
    layout = json.dumps([[name, list(parameter.shape)] for name, parameter in named])
    return xxhash.xxh3_128_hexdigest(layout.encode())


def _encode_config(config: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(config, sort_keys=True).encode()
    assert len(text) <= _CONFIG_BYTES
    return torch.frombuffer(bytearray(text.ljust(_CONFIG_BYTES)), dtype=torch.uint8)


def _decode_config(encoded: torch.Tensor) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(bytes(_memory(encoded)))
    return config


def _describe_mismatch(*, run: torch.Tensor, own: torch.Tensor) -> str:
    theirs, ours = _decode_config(run), _decode_config(own)
    differences = ", ".join(
        f"{key} is {theirs.get(key)!r} in the run and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    )
    return f"this peer's DiLoCo settings are not those of the run: {differences}"
