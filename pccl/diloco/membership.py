"""The peers of a run: admits newcomers, and checks that all peers hold the same state."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from pccl import (
    Communicator,
    Result,
    SharedState,
    SharedStateSyncInfo,
    TooFewPeersError,
    extension,
)
from pccl.diloco.exchange import Average, LedgerHooks
from pccl.diloco.model import Buffers, Frozen, Replica
from pccl.diloco.pace import Pace, Reminder
from pccl.diloco.settings import Settings, describe_mismatch
from pccl.diloco.stats import Meter

_log = logging.getLogger("pccl.diloco")


@dataclass(eq=False)
class Group:
    """Admits peers, and synchronizes the shared state."""

    _comm: Communicator
    shared: SharedState  # synchronized in every round
    _complete: SharedState  # synchronized when newcomers were admitted
    _settings: Settings
    _config: torch.Tensor  # the settings, as an entry of the shared state
    _frozen: Frozen
    _buffers: Buffers
    _ledger: LedgerHooks
    _meter: Meter
    _replica: Replica
    _pace: Pace
    _patient: bool = True  # whether it waits for the others without limit in this round
    _reminder: Reminder = field(default_factory=lambda: Reminder(_log))

    def join(self, min_peers: int) -> None:
        """Joins the run, or starts one with others."""
        if extension.has_synchronized(self._comm):
            raise ValueError(
                "this communicator has synchronized other shared state already, perhaps that of an "
                "earlier DiLoCo: connect another Communicator for each DiLoCo"
            )
        own_config = self._config.clone()
        self._sync(self._complete, min_peers)
        if why := describe_mismatch(run=self._config, own=own_config):
            raise ValueError(why)
        self.claim()

    def rejoin(self) -> None:
        """Rejoins the run, after it has continued without this peer."""
        with self._meter.timed("admit"):
            self._comm.connect()
        # The others may have started another run with a lower revision than this peer's. So this
        # peer offers revision 1, which is still above a first-time newcomer's 0.
        self.shared.revision = min(self.shared.revision, 1)
        self.join(min_peers=1)

    def arrive(self, patient: bool) -> None:
        """Waits for the others at the beginning of a round; if `patient`, without limit.

        Raises KickedError if the others did not wait for this peer.
        """
        self._patient = patient
        if not self._pace.waits_for_all:
            self.are_pending()

    def are_pending(self) -> bool:
        with self._meter.timed("admit"):
            grace = None if self._patient else self._pace.grace
            if grace is None:
                return self._comm.are_peers_pending()
            return extension.are_peers_pending(self._comm, grace)

    def admit(self) -> None:
        """Admits the waiting newcomers; call `agree` afterwards."""
        with self._meter.timed("admit"):
            self._comm.update_topology()

    def wait_for_others(self, outer_step: int, peers: int) -> None:
        """Waits for newcomers and admits them once; all peers of the group call it."""
        while True:
            self._remind(
                outer_step,
                "waits for others before the next outer step: "
                f"it has {peers} peers and needs {self._settings.least_peers}",
            )
            with self._meter.timed("admit"):
                have_come = extension.await_newcomers(self._comm) > 0
            if have_come:
                self.agree(admitted=True)
                self.claim(0)  # for newcomers; the others still have the samples of this round
                return

    def agree(self, admitted: bool, changed: SharedState | None = None) -> None:
        """Checks that all peers hold the same state, and sends it to admitted newcomers.

        Without newcomers, checks only `changed`; None: the whole shared state.
        """
        if admitted and self._buffers.mode == "local":
            self._buffers.gather()
        self.shared.push_revision()
        if self._sync(self._complete if admitted else changed or self.shared).rx_bytes:
            _log.error("the outer state of this peer differed from the run's and was replaced")

    def claim(self, wanted: int | None = None) -> None:
        """Claims samples for the next round; None: as many as this peer wants."""
        self._ledger.claim(self._comm, wanted)

    def _sync(self, what: SharedState, min_peers: int = 1) -> SharedStateSyncInfo:
        what.revision = self.shared.revision
        if what is self._complete:
            self._frozen.gather()
        together = self._replica.size > 1 and min_peers > 1
        sync = self._begin if together else self._comm.sync_shared_state
        with self._meter.timed("sync"):
            info = extension.until_no_peer_leaves(lambda: sync(what, min_peers=min_peers))
        if what is self._complete:
            self._frozen.put()
        self.shared.revision = what.revision
        self._meter.count(info)
        return info

    def _begin(self, what: SharedState, min_peers: int) -> SharedStateSyncInfo:
        """Starts a run in all processes of this replica, or in none."""

        def together() -> SharedStateSyncInfo:
            try:
                info: SharedStateSyncInfo | None
                info = extension.synchronize_once(self._comm, what, min_peers)
            except TooFewPeersError:
                info = None
            if not self._replica.all(info is not None) or info is None:
                raise TooFewPeersError(Result.TOO_FEW_PEERS, "sync_shared_state")
            return info

        return extension.repeat_until_enough(self._comm, together, min_peers)

    def lacks_the_late(self, average: Average) -> bool:
        """True if a mean has fewer than `deadline_peers` contributors because peers were late."""
        if self._settings.mode == "decoupled":
            return False  # they have no progress
        return average.late > 0 and average.contributors < min(
            self._settings.deadline_peers or 1, average.peers
        )

    def suffices(self, average: Average, outer_step: int) -> bool:
        """True if the outer step uses the mean; warns if this peer is alone."""
        too_few = average.peers < self._settings.least_peers or average.contributors == 0
        if too_few or self.lacks_the_late(average):
            return False
        if average.info is not None:
            self._reminder.reset()
            return True
        if self._settings.alone == "step":
            self._remind(outer_step, "takes the outer step with only its own pseudo-gradient")
            return True
        self._remind(
            outer_step, "continues to train, without outer steps, until another peer joins"
        )
        return False

    def waits(self, peers: int) -> bool:
        """True if a round of `peers` peers waits for others."""
        return self._settings.alone == "wait" and peers < self._settings.least_peers

    def _remind(self, outer_step: int, what_it_does: str) -> None:
        size = self._comm.world_size
        alone = "is alone" if size == 1 else f"is one of {size}"
        self._reminder.warn(
            f"this peer {alone} in its group at outer step {outer_step}, and with "
            f"alone={self._settings.alone!r} it {what_it_does}"
        )
