"""Every sample exactly once, although peers come and go at any moment.

The ledger is an entry of the shared state, so all peers hold the same bytes of it, newcomers
receive it, and a checkpoint has it together with the weights. It says which samples have been given
out, and to whom. A sample is

    fresh       nobody has claimed it yet
    claimed     a peer trains on it
    under way   a collective has begun that has this peer's progress with it
    consumed    that collective has committed, and what it brought is applied

A sample of a peer that is lost before its progress is in a collective that commits is given to
others, and one of a peer that is lost after that is not. So a sample is consumed together with what
has been learnt from it: that the collective commits for all or for none decides both.

Contributors must be told from those who were lost before. So `vote` gives a small array that
travels in the same collective as the gradients: each peer has set a cell of its own, and the others
are 0. In the sum or the mean, the cells of the contributors are not 0.

The size is bounded: the ledger has a row for each range of samples that are claimed or returned,
and none for what is consumed or fresh. Returned samples are given out first. Should the rows not
suffice, peers get fewer samples in a round.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pccl.communicator import Communicator
from pccl.data import rows
from pccl.errors import PCCLError
from pccl.shared_state import TensorInfo
from pccl.types import Result

_HEAD = 4  # samples, end, fresh, rows
_ROWS_EACH = 8
_ENDLESS = 1 << 62
Vote = NDArray[np.uint8] | NDArray[np.int64]
_SET = 255  # a cell of a vote: the mean over at most so many peers is not 0


class Ledger:
    """Which samples have been given out, to whom, and which are consumed.

        ledger = Ledger(len(dataset), share=1024)
        shared = pccl.SharedState([*others, *ledger.entries()])
        ...
        comm.sync_shared_state(shared)       # a newcomer's first call
        ledger.claim(comm)                   # all peers, after each synchronization
        while not ledger.finished:
            gradients = of(ledger.share)
            vote = ledger.vote()
            comm.all_reduce([*gradients, vote])    # again, if a peer was lost
            ledger.settle(vote)
            ...                              # apply the gradients, admit newcomers
            shared.push_revision()
            comm.sync_shared_state(shared)
            ledger.claim(comm)

    Samples are counted through all epochs: with 100 samples, 250 is sample 50 of the third epoch.

    A ledger belongs to one membership: a peer that joins again makes a new one.

    Args:
        samples: in an epoch; the same on all peers.
        share: samples that this peer wants in a round. Peers may want different numbers. The last
            rounds of a run have fewer.
        epochs: after which the run is finished; None: never. The same on all peers.
        peers_max: as many as the run may ever have at a time, up to 255. The same on all peers.

    Attributes:
        peers_max: as the argument.
        share: the samples that this peer has got for the present round, as ranges.
        wanted: samples that it asks for in a round; may be changed.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, samples: int, *, share: int, epochs: int | None = 1, peers_max: int = 64
    ) -> None:
        if samples < 1 or share < 1 or (epochs is not None and epochs < 1):
            raise ValueError(f"samples={samples}, share={share}, epochs={epochs}: at least 1 each")
        if not 1 <= peers_max <= _SET:
            raise ValueError(f"peers_max={peers_max} must be in 1 to {_SET}")
        end = _ENDLESS if epochs is None else samples * epochs
        if end > _ENDLESS:
            raise ValueError(f"{samples} samples in {epochs} epochs are too many to count")
        self.wanted = share
        self.share: tuple[range, ...] = ()
        self.peers_max = peers_max
        self._rows_max = _ROWS_EACH * peers_max
        self._settings = samples, end
        self._state = np.zeros(_HEAD + 4 * self._rows_max, np.int64)
        self._state[:2] = self._settings
        self._me = secrets.randbits(62) | 1
        self._living: set[int] = set()  # at the last claim: the same on all peers
        self._counted = False  # whether votes are
        self._trained = 0  # of the samples that this peer holds, which are the first ones
        self._sent = 0  # of these, those that its last vote has told of

    def entries(self) -> list[TensorInfo]:
        """The entries of the shared state."""
        return [TensorInfo.from_numpy(self._state, "pccl.ledger")]

    # ---- a round ----

    def claim(self, comm: Communicator, wanted: int | None = None) -> tuple[range, ...]:
        """Claims samples for the next round, and returns those of the dead to those who live.

        All peers of the group call it, each after the synchronization of the shared state in which
        they have received the ledger. It is a collective of few bytes.

        Args:
            comm: the communicator of the group.
            wanted: how many; None: `self.wanted`. It may be 0.

        Returns:
            `share`.

        Raises:
            PCCLError: as for `all_gather`; lost peers do not raise.
            ValueError: the run has another number of samples or epochs, or more than `peers_max`
                peers.
        """
        if tuple(self._state[:2]) != self._settings:
            raise ValueError(
                f"this peer's ledger is of {_count(*self._settings)}, and the run's of "
                f"{_count(*map(int, self._state[:2]))}"
            )
        wants = _gather(comm, self._want(self.wanted if wanted is None else wanted))
        if len(wants) > self.peers_max:
            raise ValueError(f"{len(wants)} peers: the ledger is made for up to {self.peers_max}")
        self._living = {want.owner for want in wants}
        before = self._content()
        after = rows.claimed(before, wants, self._settings[1], self._rows_max)
        self._write(after)
        if self._counted:
            self.share = rows.rest(rows.owned(after, self._me), self._trained)
        else:
            self.share = self._gained(before, after)
        return self.share

    def _want(self, wanted: int) -> rows.Want:
        """The samples of the share that were not trained on come first, then the new ones."""
        held = rows.owned(self._content(), self._me)
        if not self._counted or not held:
            return rows.Want(self._me, wanted)
        left = sum(map(len, held)) - self._trained
        return rows.Want(self._me, max(0, wanted - left), held[-1].stop)

    def train(self, samples: int) -> None:
        """This peer has trained on so many more samples of its share, in order.

        For rounds in which peers may not come to the end of their share: see `vote`.

        Raises:
            ValueError: it has no more so many.
        """
        left = sum(map(len, rows.owned(self._content(), self._me))) - self._trained
        if not 0 <= samples <= left:
            raise ValueError(f"samples={samples}, and of the share {left} are left to train on")
        self._trained += samples

    def vote(self, *, counted: bool = False, late: bool = False) -> Vote:
        """The array that must be in the collective with this peer's progress, as it is.

        From here on everything that has been claimed is under way. All peers call it before the
        same collective; it may be called again for a repetition.

        Args:
            counted: this peer has trained on as much as `train` was told, and what is left of its
                share will be a part of the next one. The same on all peers. The collective must
                add the arrays up, and no mean is enough. Otherwise it has trained on all.
            late: the collective does not have this peer's progress, which a later one will have.
        """
        content = rows.departed(self._content(), self._living)
        self._write(content)
        owners = rows.owners_under_way(content)
        self._counted = counted
        if not counted:
            self._trained = sum(map(len, rows.owned(content, self._me)))
        self._sent = 0 if late or self._me not in owners else self._trained
        cells = [0] * self.peers_max
        if self._sent:
            cells[owners.index(self._me)] = self._sent if counted else _SET
        return np.array(cells, np.int64) if counted else np.array(cells, np.uint8)

    def settle(self, votes: Vote | None) -> None:
        """The collective has ended: `votes` is what it has made of the array.

        None: it has brought nothing, so what was under way is claimed as before.
        """
        content = self._content()
        cells = [] if votes is None else [int(vote) for vote in votes]
        counted = votes is not None and votes.dtype == np.int64
        found = zip(rows.owners_under_way(content), cells, strict=False)
        trained = {owner: cell if counted else None for owner, cell in found if cell}
        self._write(rows.settled(content, trained))
        if self._me in trained:
            self._trained -= self._sent
        self._sent = 0

    def renew(self) -> None:
        """This peer joins the run once more, without the progress that it has made.

        What it had claimed is given to others.
        """
        self._me = secrets.randbits(62) | 1
        self._trained = self._sent = 0
        self.share = ()

    # ---- what it says ----

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self._settings[0]

    @property
    def consumed(self) -> int:
        """Samples of all epochs that have been consumed."""
        content = self._content()
        return content.fresh - sum(row.end - row.first for row in content.rows)

    @property
    def finished(self) -> bool:
        """True if all samples of all epochs are consumed; the same on all peers."""
        return self.consumed == self._settings[1]

    # ---- checkpoints of those that keep it elsewhere than in a SharedState ----

    def dump(self) -> NDArray[np.int64]:
        """A copy of all that peers have in common."""
        return self._state.copy()

    def check(self, dumped: NDArray[np.int64]) -> None:
        """Raises ValueError for a copy of a ledger of other samples or another `peers_max`."""
        own = self.peers_max, *self._settings
        theirs = (len(dumped) - _HEAD) // (4 * _ROWS_EACH), *map(int, dumped[:2])
        if own != theirs:
            raise ValueError(
                f"this ledger is of {_count(*own[1:])}, for up to {own[0]} peers, and the state's "
                f"of {_count(*theirs[1:])}, for up to {theirs[0]} peers"
            )

    def restore(self, dumped: NDArray[np.int64]) -> None:
        """Takes over a copy that has been checked."""
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
        """The samples that this peer has newly claimed."""
        had = [range(row.first, row.end) for row in before.rows if row.owner == self._me]
        gained = []
        for row in after.rows:
            if row.owner == self._me:
                gained += _without(range(row.first, row.end), had)
        return tuple(gained)


def _without(samples: range, others: list[range]) -> list[range]:
    """Parts of `samples` that are in none of `others`, which are in order."""
    parts, first = [], samples.start
    for other in others:
        if other.start < samples.stop and other.stop > samples.start:
            parts.append(range(first, max(first, other.start)))
            first = other.stop
    parts.append(range(first, max(first, samples.stop)))
    return [part for part in parts if part]


def _gather(comm: Communicator, want: rows.Want) -> list[rows.Want]:
    """The wants of all peers, in the order of the ranks; after a loss, of the survivors."""
    own = np.array(want, np.int64)
    while True:
        _ = comm.rank  # a gather takes place among the ranks that this thread has seen
        try:
            gathered = comm.all_gather(own)
        except PCCLError as error:
            if error.result is Result.TOO_FEW_PEERS:
                return [want]
            if error.result is not Result.RANK_CONNECTION_LOST:
                raise
        else:
            return [rows.Want(*map(int, row)) for row in gathered]


def _count(samples: int, end: int) -> str:
    return f"{samples} samples in {'endless' if end == _ENDLESS else end // samples} epochs"


class LedgerSampler:
    """Indices of the samples that a ledger has given to this peer for the present round.

        loader = torch.utils.data.DataLoader(dataset, 16, sampler=LedgerSampler(ledger))
        while not ledger.finished:
            for batch in loader:
                ...

    One pass of the loader is one round. It asks no other peer, so the workers of a DataLoader may
    be ahead within it.

    Args:
        ledger: of the dataset.
        shuffle: whether each epoch has an order of its own. The order takes 8 bytes a sample.
        seed: of the order; the same on all peers.
    """

    def __init__(self, ledger: Ledger, *, shuffle: bool = True, seed: int = 0) -> None:
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
        """Samples in the round."""
        return sum(map(len, self._ledger.share))


@lru_cache(maxsize=2)  # a round may begin in one epoch and end in the next
def _order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # This generator is the one of numpy that gives the same numbers in all versions.
    return np.random.RandomState((seed, epoch)).permutation(samples)
