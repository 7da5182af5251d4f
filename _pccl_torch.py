"""Registers pccl's backend when torch is imported: the entry point in the group torch.backends.

So `backend="pccl"` needs no `import pccl.torch`, which takes a second and is made when the name is
first used. This module is outside of the package because importing that takes some tenths.
"""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "pccl"
ACCELERATE = "PCCL_ACCELERATE"  # 1: calls `pccl.torch.use_with_accelerate` for the script


def register() -> None:
    """Registers the backend and pccl:// addresses. Idempotent; errors are only logged."""
    try:
        import torch.distributed as dist
        from torch.distributed.rendezvous import register_rendezvous_handler

        if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
            return
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        register_rendezvous_handler(NAME, _meet)  # type: ignore[no-untyped-call]
        if os.environ.get(ACCELERATE) == "1":
            sys.meta_path.insert(0, _AfterAccelerate())
    except Exception:
        logging.getLogger("pccl.torch").warning("torch has not got pccl's backend", exc_info=True)


def _create(*options: Any) -> Any:
    return importlib.import_module("pccl.torch.creation").create(*options)


def _meet(url: str, **more: Any) -> Any:
    return importlib.import_module("pccl.torch.creation").meet(url, **more)


class _AfterAccelerate:
    """Calls `use_with_accelerate` when accelerate.state has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "accelerate.state":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                importlib.import_module("pccl.torch").use_with_accelerate()

            loader.exec_module = execute_and_call
        return spec
