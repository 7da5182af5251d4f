"""An averaging: how it has ended, and one that runs in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pccl import AsyncReduceHandle, PCCLError, ReduceInfo, Result

_log = logging.getLogger("pccl.diloco")


@dataclass(frozen=True, slots=True)
class Average:
    """How an averaging has ended.

    Attributes:
        info: of the attempt that has committed; None if this peer was alone.
        retries: attempts that failed because a peer was lost.
        weighty: peers whose pseudo-gradients weigh anything; None: all of them.
        late: peers whose pseudo-gradients weigh nothing because they came too late.
    """

    info: ReduceInfo | None
    retries: int
    weighty: int | None = None
    late: int = 0

    @property
    def peers(self) -> int:
        """Peers that took part."""
        return 1 if self.info is None else self.info.world_size

    @property
    def contributors(self) -> int:
        """Peers whose pseudo-gradients were averaged."""
        return self.peers if self.weighty is None else self.weighty


class Flight:
    """An averaging in the background. It takes off again whenever a peer is lost."""

    def __init__(self, launch: Callable[[], AsyncReduceHandle]) -> None:
        self._launch = launch
        self._handle: AsyncReduceHandle | None = launch()
        self._retries = 0
        self._info: ReduceInfo | None = None
        self._error: PCCLError | None = None

    def poll(self) -> None:
        """Takes off again if a peer was lost; waits for nobody."""
        while self._handle is not None and self._handle.done():
            self._end_attempt(self._handle)

    def land(self) -> Average:
        """Waits for the end."""
        while self._handle is not None:
            self._end_attempt(self._handle)
        if self._error is not None:
            raise self._error
        return Average(self._info, self._retries)

    def abandon(self) -> bool:
        """Waits until it has let go of the memory, however it ends.

        Returns whether others may have the mean: False only if it has certainly failed for all.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return self._info is not None
        committed, _, _ = handle.wait()
        certain = (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS)
        return committed or (handle.error is None or handle.error.result not in certain)

    def _end_attempt(self, handle: AsyncReduceHandle) -> None:
        committed, _, info = handle.wait()
        self._handle = None
        if committed:
            self._info = info
            return
        error = handle.error
        assert error is not None
        if error.result is Result.TOO_FEW_PEERS:
            return
        if error.result is not Result.RANK_CONNECTION_LOST:
            self._error = error
            raise error
        _log.warning("a peer was lost, once more with the others: %s", error)
        self._retries += 1
        try:
            self._handle = self._launch()
        except PCCLError as refusal:
            if refusal.result is not Result.TOO_FEW_PEERS:
                self._error = refusal
                raise
