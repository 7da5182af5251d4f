"""`sync_shared_state`: the shared state's memory, the call, and what it tells of the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pccl.calls.collective import error_of
from pccl.calls.membership import Membership
from pccl.errors import error_for
from pccl.protocol.peer import effects
from pccl.runtime.client.call import Call
from pccl.runtime.client.client import Client
from pccl.runtime.client.memory import HostView
from pccl.runtime.client.sync import Outcome, Region, SyncOptions, synchronise
from pccl.shared_state import SharedState
from pccl.types import EntryDivergence, Result, SharedStateSyncInfo, SharedStateSyncStrategy

log = logging.getLogger("pccl")

TORN = (
    "the shared state of this peer is torn, because newer content had begun to arrive: another "
    "sync_shared_state() with peers that hold one, or load(), makes it whole"
)


def sync_shared_state(
    membership: Membership, shared_state: SharedState, options: SyncOptions
) -> SharedStateSyncInfo:
    """Makes the shared state of all peers of the group bit-identical; see `Communicator`."""
    client = membership.client("sync_shared_state")
    if shared_state.torn and options.strategy == SharedStateSyncStrategy.SEND_ONLY.value:
        raise error_for(Result.INVALID_ARGUMENT, "sync_shared_state", f"SEND_ONLY, but {TORN}")
    call = client.call()
    try:
        membership.standing.enter("sync_shared_state", call)
        outcome, regions = _synchronise(membership, client, call, shared_state, options)
        membership.standing.leave(call)
    except BaseException as error:
        membership.let_go(client, call)
        _note(error, shared_state)
        raise
    end = outcome.end
    if outcome.error is not None:
        _note(outcome.error, shared_state)
        raise outcome.error
    if isinstance(end, effects.Fail):
        if shared_state.torn:
            end = replace(end, why=f"{end.why}; {TORN}")
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
    view = HostView(shared_state._buffers)
    regions = shared_state._regions(view)
    owner = shared_state, view
    memory = _Memory(membership, shared_state, view)
    revision = shared_state.revision
    return synchronise(client, call, regions, revision, options, owner, memory), regions


def _note(error: BaseException, shared_state: SharedState) -> None:
    if shared_state.torn:
        error.add_note(TORN)


class _Memory:
    """A shared state during a synchronisation."""

    def __init__(self, membership: Membership, shared_state: SharedState, view: HostView) -> None:
        self._membership, self._shared_state, self._view = membership, shared_state, view

    @property
    def torn(self) -> bool:
        return self._shared_state.torn

    def tear(self, entries: Sequence[int]) -> None:
        """What is copied to a device at the end does not change there before."""
        self._shared_state._tear([i for i in entries if not self._view.copied(i)])

    def adopt(self, synced: effects.Synced, overwritten: Sequence[int]) -> None:
        self._view.write_back(overwritten)
        self._shared_state._mend()
        self._shared_state.revision = self._membership.revision = synced.revision
        self._membership.synced = True


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
