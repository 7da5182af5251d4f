"""Trains on every sample exactly once, while peers come and go at any moment.

docs/howto/data.md says how. A sample is

    fresh       no peer has claimed it yet
    claimed     a peer trains on it
    under way   a collective with that peer's progress has started
    consumed    that collective has committed, and its result is applied

The ledger has a row for each range of claimed or returned samples, and no rows for consumed or
fresh ones. If there are not enough rows, peers get fewer samples in a round.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pccl import extension
from pccl.communicator import Communicator
from pccl.data import rows
from pccl.shared_state import TensorInfo
from pccl.support import require, whole

_HEAD = 4  # samples, end, fresh, rows
_ROWS_EACH = 8
_ENDLESS = 1 << 62
Vote = NDArray[np.uint8] | NDArray[np.int64]
_SET = 255  # a set cell of a vote: its mean over up to 255 peers is at least 1


class Ledger:
    """Records which peer has claimed which samples, and which samples are consumed.

    docs/howto/data.md has the loop that uses one.

    Sample numbers run through all epochs: with 100 samples, 250 is sample 50 of the third epoch.

    A ledger belongs to one membership: a peer that rejoins makes a new one.

    Args:
        samples: number of samples per epoch; the same on all peers.
        share: samples that this peer wants per round; it may differ between peers. The last rounds
            of a run have fewer.
        epochs: number of epochs; None: without end. The same on all peers.
        peers_max: the largest number of peers at a time, up to 255. The same on all peers.

    Attributes:
        peers_max: the argument.
        wanted: samples that it asks for per round; may be changed.
    """

    def __init__(
        self, samples: int, *, share: int, epochs: int | None = 1, peers_max: int = 64
    ) -> None:
        samples = whole("samples", samples, least=1)
        end = _ENDLESS if epochs is None else samples * whole("epochs", epochs, least=1)
        if end > _ENDLESS:
            raise ValueError(f"{samples} samples in {epochs} epochs are too many to count")
        self.wanted = whole("share", share, least=1)
        self._lock = threading.RLock()  # one thread may claim and settle while another trains
        self._share: tuple[range, ...] = ()
        self.peers_max = whole("peers_max", peers_max, range(1, _SET + 1))
        self._rows_max = _ROWS_EACH * self.peers_max
        self._settings = samples, end
        self._state = np.zeros(_HEAD + 4 * self._rows_max, np.int64)
        self._state[:2] = self._settings
        self._me = secrets.randbits(62) | 1
        self._living: set[int] = set()  # the peers of the last claim: the same on all peers
        self._counted = False  # whether votes are counts
        self._trained = 0  # the number of its samples that this peer has trained on, in order
        self._sent = 0  # the number of these in its last vote
        self._marked = 0  # the number of these before the last `mark`

    def entries(self) -> list[TensorInfo]:
        """The entries of the shared state."""
        return [TensorInfo.from_numpy(self._state, "pccl.ledger")]

    # ---- a round ----

    def claim(self, comm: Communicator, wanted: int | None = None) -> tuple[range, ...]:
        """Claims `wanted` samples for the next round, including those of lost peers.

        All peers of the group call it after each synchronization of the shared state with the
        ledger. It is a collective of a few bytes. `wanted` may be 0; None: `self.wanted`.

        Returns:
            `share`.

        Raises:
            PCCLError: as for `all_gather`; lost peers do not raise.
            ValueError: the run's ledger differs, or the run has too many peers for it.
        """
        if tuple(self._state[:2]) != self._settings:
            raise ValueError(
                f"this peer's ledger is of {_count(*self._settings)}, and the run's of "
                f"{_count(*map(int, self._state[:2]))}"
            )
        own = np.array(self._want(self.wanted if wanted is None else wanted), np.int64)
        wants = [rows.Want(*row) for row in extension.gather(comm, own).tolist()]
        if len(wants) > self.peers_max:
            raise ValueError(f"{len(wants)} peers: the ledger is made for up to {self.peers_max}")
        with self._lock:
            self._living = {want.owner for want in wants}
            before = self._content()
            after = rows.claimed(before, wants, self._settings[1], self._rows_max)
            self._write(after)
            self._share = self._gained(before, after)
            return self.share

    @property
    def share(self) -> tuple[range, ...]:
        """This peer's samples for the current round, as ranges; with `train`, the rest of them."""
        with self._lock:
            if self._counted:
                return rows.rest(rows.owned(self._content(), self._me), self._trained)
            return self._share

    def _want(self, wanted: int) -> rows.Want:
        """This peer's request: new samples, minus the remaining ones of its share."""
        with self._lock:
            held = rows.owned(self._content(), self._me)
            if not self._counted or not held:
                return rows.Want(self._me, wanted)
            left = sum(map(len, held)) - self._trained
            return rows.Want(self._me, max(0, wanted - left), held[-1].stop)

    def train(self, samples: int) -> None:
        """Records that this peer has trained on the next `samples` samples of its share, in order.

        For rounds in which peers may not reach the end of their share: see `vote`.

        Raises:
            ValueError: fewer samples of its share remain.
        """
        with self._lock:
            left = sum(map(len, rows.owned(self._content(), self._me))) - self._trained
            if not 0 <= samples <= left:
                raise ValueError(
                    f"samples={samples} must be in 0 to {left}, what is left of the share"
                )
            self._trained += samples
            self._counted = True

    def mark(self) -> None:
        """Marks this peer's progress, which `vote(marked=True)` reports."""
        self._marked = self._trained

    def vote(self, *, counted: bool = False, late: bool = False, marked: bool = False) -> Vote:
        """The array to send, unchanged, in the same collective as this peer's progress.

        From now on, all claimed samples are under way. All peers call it before the same
        collective, and may call it again before they repeat that collective.

        Args:
            counted: True: this peer has trained on the samples that `train` has counted, and the
                collective must be a sum. False: this peer has trained on its whole share, and the
                collective may be a mean. The same on all peers.
            late: this peer's progress is not in this collective, but will be in a later one.
            marked: with `counted`, only its progress until the last `mark` is in this collective.
        """
        with self._lock:
            content = rows.departed(self._content(), self._living)
            self._write(content)
            owners = rows.owners_under_way(content)
            self._counted = counted
            if not counted:
                self._trained = sum(map(len, rows.owned(content, self._me)))
            sent = self._marked if marked and counted else self._trained
            self._sent = 0 if late or self._me not in owners else sent
        cells = [0] * self.peers_max
        if self._sent:
            cells[owners.index(self._me)] = self._sent if counted else _SET
        return np.array(cells, np.int64) if counted else np.array(cells, np.uint8)

    def settle(self, votes: Vote | None) -> None:
        """Ends the collective: `votes` is the sum or the mean of the arrays.

        None: it has failed, so the samples under way are claimed as before.
        """
        cells = [] if votes is None else [int(vote) for vote in votes]
        counted = votes is not None and votes.dtype == np.int64
        with self._lock:
            content = self._content()
            found = zip(rows.owners_under_way(content), cells, strict=False)
            trained = {owner: cell if counted else None for owner, cell in found if cell}
            self._write(rows.settled(content, trained))
            if self._me in trained:
                self._trained -= self._sent
                self._marked = max(0, self._marked - self._sent)
            self._sent = 0

    def renew(self) -> None:
        """Prepares to rejoin the run without this peer's progress; its samples go to others."""
        with self._lock:
            self._me = secrets.randbits(62) | 1
            self._trained = self._sent = self._marked = 0
            self._share = ()

    # ---- reports ----

    @property
    def samples(self) -> int:
        """Number of samples per epoch."""
        return self._settings[0]

    @property
    def consumed(self) -> int:
        """Number of consumed samples, of all epochs."""
        with self._lock:
            content = self._content()
        return content.fresh - sum(row.end - row.first for row in content.rows)

    @property
    def finished(self) -> bool:
        """True if all samples of all epochs are consumed; the same on all peers."""
        return self.consumed == self._settings[1]

    # ---- checkpoints that do not save the SharedState ----

    def dump(self) -> NDArray[np.int64]:
        """A copy of the common content."""
        return self._state.copy()

    def check(self, dumped: NDArray[np.int64]) -> None:
        """Raises ValueError if a copy has other numbers of samples or another `peers_max`."""
        own = self.peers_max, *self._settings
        theirs = (len(dumped) - _HEAD) // (4 * _ROWS_EACH), *map(int, dumped[:2])
        if own != theirs:
            raise ValueError(
                f"this ledger is of {_count(*own[1:])}, for up to {own[0]} peers, and the state's "
                f"of {_count(*theirs[1:])}, for up to {theirs[0]} peers"
            )

    def restore(self, dumped: NDArray[np.int64]) -> None:
        """Loads a checked copy."""
        self._state[:] = dumped

    # ---- its memory ----

    def _content(self) -> rows.Content:
        _, _, fresh, count = map(int, self._state[:_HEAD])
        table = self._state[_HEAD : _HEAD + 4 * count].reshape(-1, 4)
        return rows.Content(fresh, tuple(rows.Row(*row) for row in table.tolist()))

    def _write(self, content: rows.Content) -> None:
        self._state[2] = content.fresh
        self._state[3] = len(content.rows)
        flat = [number for row in content.rows for number in row]
        self._state[_HEAD:] = 0
        self._state[_HEAD : _HEAD + len(flat)] = flat

    def _gained(self, before: rows.Content, after: rows.Content) -> tuple[range, ...]:
        """The samples newly claimed by this peer."""
        had = [range(row.first, row.end) for row in before.rows if row.owner == self._me]
        gained = []
        for row in after.rows:
            if row.owner == self._me:
                gained += _without(range(row.first, row.end), had)
        return tuple(gained)


def _without(samples: range, others: list[range]) -> list[range]:
    """The parts of `samples` that are in none of `others`, which are sorted."""
    parts, first = [], samples.start
    for other in others:
        if other.start < samples.stop and other.stop > samples.start:
            parts.append(range(first, max(first, other.start)))
            first = other.stop
    parts.append(range(first, max(first, samples.stop)))
    return [part for part in parts if part]


def _count(samples: int, end: int) -> str:
    return f"{samples} samples in {'endless' if end == _ENDLESS else end // samples} epochs"


class LedgerSampler:
    """Yields the indices of this peer's samples in the current round, for a DataLoader.

    One pass of the loader is one round. It does not communicate, so DataLoader workers may read
    ahead within a round.

    Args:
        ledger: the dataset's ledger.
        shuffle: whether each epoch has a random order, which takes 8 bytes of memory per sample.
        seed: seed of the orders; the same on all peers.
    """

    def __init__(self, ledger: Ledger, *, shuffle: bool = True, seed: int = 0) -> None:
        require("ledger", ledger, Ledger)
        self._ledger = ledger
        self._shuffle = shuffle
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """Indices below the number of samples."""
        for part in self._ledger.share:
            for number in part:
                epoch, place = divmod(number, self._ledger.samples)
                if self._shuffle:
                    yield int(_order(self._ledger.samples, self._seed, epoch)[place])
                else:
                    yield place

    def __len__(self) -> int:
        """Number of this peer's samples in the round."""
        return sum(map(len, self._ledger.share))


@lru_cache(maxsize=2)  # a round may begin in one epoch and end in the next
def _order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # only for this generator, numpy guarantees the same numbers in all versions
    return np.random.RandomState((seed, epoch)).permutation(samples)
