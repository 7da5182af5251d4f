"""The checkpoint of a training: its content, its checks, and its file."""

from __future__ import annotations

import json
import logging
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pccl.diloco.exchange import Exchange, LedgerHooks
from pccl.diloco.membership import Group
from pccl.diloco.model import Buffers, Frozen, Saved, check_shapes
from pccl.diloco.outer import Outer
from pccl.diloco.schedule import Schedule
from pccl.diloco.settings import decode

_SAVED = {"config", "parameters", "clock", "theta", "velocity", "revision", "frozen", "buffers"}
_log = logging.getLogger("pccl.diloco")


class Checkpoint:
    """Saves and loads the state of a training, without the inner optimizer's."""

    def __init__(
        self,
        config: torch.Tensor,
        frozen: Frozen,
        buffers: Buffers,
        ledger: LedgerHooks,
        outer: Outer,
        exchanges: Sequence[Exchange],
        schedule: Schedule,
        group: Group,
    ) -> None:
        self._config = config
        self._frozen = frozen
        self._buffers = buffers
        self._ledger = ledger
        self._outer = outer
        self._exchanges = exchanges
        self._schedule = schedule
        self._group = group

    def state_dict(self, sharded: bool) -> dict[str, Any]:
        """A copy of the state, without the inner optimizer's."""
        if self._buffers.mode == "local":
            self._buffers.gather()
        schedule = self._schedule.state_dict(self._group)
        if "means" in schedule:  # of a mode without fragments; dcp.load fills in a sharded state
            means = schedule["means"] or (self._exchanges[0].means if sharded else [])
            schedule["means"] = [self._outer.join([mean], sharded) for mean in means[:1]]
            schedule["means"] += [mean.clone() for mean in means[1:]]
        return {
            "config": self._config.clone(),
            "parameters": json.dumps(self._outer.shapes()),
            **self._outer.state_dict(sharded),
            "schedule": schedule,
            "averager": self._averagers_state(sharded),
            **self._ledger.state_dict(),
            "revision": self._group.shared.revision,
            "frozen": self._frozen.state_dict(sharded),
            "buffers": self._buffers.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless this training can load the state."""
        try:
            self._check(state)
        except (TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
            kind = type(error).__name__
            raise ValueError(
                f"the state was not made by DiLoCo.state_dict() ({kind}: {error})"
            ) from error

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = _SAVED - {*state}
        if missing:
            raise ValueError(
                f"the state was not made by DiLoCo.state_dict(): it has no {min(missing)!r}"
            )
        own, saved = decode(self._config), decode(state["config"])
        check_shapes("parameter", self._outer.shapes(), json.loads(state["parameters"]))
        if own["parameters"] != saved["parameters"]:
            raise ValueError(
                "the state belongs to another model: its parameters are in another order"
            )
        if own["mode"] != saved["mode"]:
            _log.warning(
                "the state is of a run with mode=%r, and this one has mode=%r: what was under way "
                "between two rounds is lost",
                saved["mode"],
                own["mode"],
            )
        self._frozen.check(state["frozen"])
        self._buffers.check(state["buffers"])
        self._ledger.check(state)
        self._outer.check(state)
        schedule = state.get("schedule", {})
        counts = {**schedule, "revision": state["revision"]}
        means = counts.pop("means", [])
        for name, count in counts.items():
            if count is not None and not (isinstance(count, int) and 0 <= count < 1 << 62):
                raise ValueError(f"{name} is {count!r} in the state: it must be a count")
        for mean in means[:1]:
            self._outer.cut(mean)
        for mine, mean in zip(self._exchanges[0].means[1:], means[1:], strict=False):
            if mine.shape != mean.shape:
                raise ValueError(
                    f"a mean has shape {list(mean.shape)} in the state and {list(mine.shape)} here"
                )
        for kept in state.get("averager", {}).values():
            self._outer.cut(kept)

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads a state that has been checked."""
        self._frozen.load(state["frozen"])
        self._buffers.load(state["buffers"])
        self._outer.load(state)
        self._ledger.load(state)
        schedule = dict(state.get("schedule", {}))
        if means := schedule.get("means"):
            schedule["means"] = [*self._outer.cut(means[0]), *means[1:]]
        self._schedule.load(schedule)
        self._load_averagers(state.get("averager", {}))
        self._group.shared.revision = state["revision"]

    def _averagers_state(self, sharded: bool) -> dict[str, Saved]:
        """The states of the fragments' averagers, joined in the order of the model."""
        states = [exchange.averager.state_dict() for exchange in self._exchanges]
        keys = states[0]
        return {key: self._outer.join([state[key] for state in states], sharded) for key in keys}

    def _load_averagers(self, joined: Mapping[str, Saved]) -> None:
        states: list[dict[str, torch.Tensor]] = [{} for _ in self._exchanges]
        for key, saved in joined.items():
            for state, piece in zip(states, self._outer.cut(saved), strict=True):
                state[key] = piece
        for exchange, state in zip(self._exchanges, states, strict=True):
            exchange.averager.load_state_dict(state)


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the state in a file, and checks the file's checksums, which torch ignores."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} in it has a wrong checksum")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (
        ValueError,
        RuntimeError,
        EOFError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{os.fspath(path)} is damaged, or was not written by DiLoCo.save(): {error}"
        ) from error
    return state
