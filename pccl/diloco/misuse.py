"""Warnings about silent mistakes in a script, each logged once with its remedy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator

import torch

from pccl.diloco.exchange import Exchange
from pccl.diloco.settings import Settings
from pccl.diloco.stats import Outcome

_log = logging.getLogger("pccl.diloco")


class Misuse:
    """Watches the script's calls, and checks the model at the end of each round."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self._settings = settings
        self._model = weakref.ref(model)
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._warned: set[str] = set()
        self._ended = False
        self._gradients = False  # whether any parameter had a gradient in this round
        self._steps = 0
        self.unfinished = False  # whether a mean is lost if the training ends without `finish`

    def _warn(self, text: str) -> None:
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)

    def optimizer_stepped(self) -> None:
        """Records that the script has stepped the inner optimizer outside a `with` block."""
        if not self._ended:
            self._warn(
                "the script has called optimizer.step(), and diloco.step() calls it too: leave "
                "out optimizer.step(), or leave out diloco.step() and put the loop into "
                "`with diloco:`"
            )

    def inner_step(self) -> None:
        self._gradients = self._gradients or any(p.grad is not None for _, p in self._trained)
        self._steps += 1

    def round(self, outcome: Outcome, exchange: Exchange) -> None:
        self.unfinished = self._settings.mode != "sync"
        if self._steps and not self._gradients:
            self._warn(
                "no parameter has had a gradient in this round: call loss.backward() before "
                "diloco.step(), and zero_grad() only after it; see also that the loss depends on "
                "the model that DiLoCo was made with"
            )
        self._steps, self._gradients = 0, False
        for name in self._not_averaged():
            self._warn(
                f"parameter {name!r} has been replaced by another tensor, added or unfrozen since "
                "DiLoCo was made, and DiLoCo does not average it: copy into a parameter, as "
                "load_state_dict(..., assign=False) does, and make DiLoCo after all changes of the "
                "model"
            )
        if exchange.alike:
            self._warn(
                "the pseudo-gradients of all peers are the same: the peers seem to train on the "
                "same samples in the same order, and together learn no more than one of them; "
                "give each its own part of the data (pccl.data.Ledger), or its own seed"
            )
        enough = self._settings.deadline_peers
        if enough is not None and 0 < outcome.contributors < enough:
            self._warn(
                f"the mean of a round has fewer contributors than deadline_peers={enough}: it had "
                f"{outcome.contributors}, and with so few peers a round waits for all of them; "
                "start more peers, or pass a smaller deadline_peers"
            )

    def _not_averaged(self) -> Iterator[str]:
        model = self._model()
        if model is not None:
            trained = dict(self._trained)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and trained.get(name) is not parameter:
                    yield name

    def finished(self) -> None:
        """Records that `finish` has applied the mean: the script may step the optimizer again."""
        self.unfinished, self._ended = False, True


def warn_unfinished(misuse: Misuse) -> None:
    """Warns of a lost mean when the DiLoCo is garbage-collected, or the program ends."""
    if misuse.unfinished:
        _log.warning(
            "the training has ended without diloco.finish(), so the model lacks the mean that was "
            "under way: call it on all peers after the loop, or put the loop into `with diloco:`"
        )
