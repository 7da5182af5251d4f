"""Pytrees of JAX in calls of pccl. JAX arrays are read-only, so results are new trees."""

from __future__ import annotations

from typing import Any

import jax

import pccl


def average(comm: pccl.Communicator, tree: Any, **options: Any) -> Any:
    """The mean of a pytree over all peers; the tree itself if this peer is alone."""
    leaves, structure = jax.tree.flatten(tree)
    try:
        return jax.tree.unflatten(structure, comm.all_reduce(leaves, **options).result)
    except pccl.TooFewPeersError:
        return tree


def shared(tree: Any, revision: int) -> pccl.SharedState:
    """A shared state with copies of the leaves of a pytree, named by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    state = pccl.SharedState.from_tensors({jax.tree_util.keystr(path): x for path, x in leaves})
    state.revision = revision
    return state


def received(tree: Any, state: pccl.SharedState) -> Any:
    """The content of a shared state, as a pytree like `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), state.tensors().values())
