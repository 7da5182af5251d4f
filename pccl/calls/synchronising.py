"""`sync_shared_state`: the shared state's memory, the call, and what it tells of the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from pccl.calls.launch import error_of
from pccl.calls.membership import Membership
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import Client
from pccl.runtime.client.devices import HostView
from pccl.runtime.client.staging import Region
from pccl.runtime.client.sync import Outcome, SyncOptions, synchronise
from pccl.shared_state import SharedState
from pccl.types import EntryDivergence, SharedStateSyncInfo

log = logging.getLogger("pccl")


def sync_shared_state(
    membership: Membership, shared_state: SharedState, options: SyncOptions
) -> SharedStateSyncInfo:
    """Makes the shared state of all peers of the group bit-identical; see `Communicator`."""
    client = membership.client("sync_shared_state")
    call = client.call()
    try:
        membership.standing.enter("sync_shared_state", call)
        outcome, regions = _synchronise(membership, client, call, shared_state, options)
        membership.standing.leave(call)
    except BaseException:
        membership.let_go(client, call)
        raise
    end = outcome.end
    if outcome.error is not None:
        raise outcome.error
    if isinstance(end, effects.Fail):
        raise error_of("sync_shared_state", end, call.began_s)
    divergence = tuple(_divergence(end, regions, client))
    for one in divergence:
        log.warning("content has diverged at revision %d: %s", end.revision, one)
    return SharedStateSyncInfo._found(
        end.tx_bytes,
        end.rx_bytes,
        hashed_bytes=outcome.hashed_bytes,
        hash_seconds=outcome.hash_seconds,
        divergence=divergence,
    )


def _synchronise(
    membership: Membership,
    client: Client,
    call: Call,
    shared_state: SharedState,
    options: SyncOptions,
) -> tuple[Outcome, list[Region]]:
    memory = HostView(shared_state._buffers)
    regions = shared_state._regions(memory)

    def adopt(synced: effects.Synced, overwritten: tuple[int, ...]) -> None:
        memory.write_back(overwritten)
        shared_state.revision = membership.revision = synced.revision

    owner = shared_state, memory
    revision = shared_state.revision
    return synchronise(client, call, regions, revision, options, owner, adopt), regions


def _divergence(
    synced: effects.Synced, regions: Sequence[Region], client: Client
) -> Iterator[EntryDivergence]:
    infos = {info.peer: str(info) for info in client.plan.peers}
    for one in synced.divergence:
        for found in one.differences:
            if found.entry < len(regions):
                region = regions[found.entry]
                yield EntryDivergence(
                    infos.get(one.peer, f"peer {one.peer}"),
                    region.name,
                    region.nbytes,
                    found.nbytes,
                    found.ulp,
                    found.nans,
                    found.nans_elected,
                )
