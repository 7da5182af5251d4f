"""The course of the demonstration, and the reports of its peers.

A state machine without processes or clock: it takes reports and the time, and gives orders.

    1. `peers` founders train together; an understudy has loaded everything and waits.
    2. After two fifths of the outer steps, the last founder is killed during its inner steps.
    3. When the survivors have trained for another fifth of the steps, the understudy joins.
    4. All remaining peers take the last outer step together, and hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model and the text are in memory; nothing is connected yet."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The peer holds the run's shared state and begins to train."""

    outer_step: int
    validation_loss: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    """Some inner steps were taken. `loss` is their mean, in nats per byte."""

    outer_step: int
    loss: float
    tokens_per_s: float


class Averaged(msgspec.Struct, frozen=True, tag=True):
    """An outer round is over. `tx_bytes` counts from the start of the peer."""

    outer_step: int
    contributors: int
    retries: int
    reduce_s: float
    reduce_bytes: int
    tx_bytes: int
    validation_loss: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last outer step is taken; `digest` is the digest of theta, v and k."""

    outer_step: int
    digest: str


Report = Loaded | Joined | Trained | Averaged | Finished

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(report: Report) -> str:
    return msgspec.json.encode(report).decode()


def decode(line: str) -> Report:
    """The report in a line. Raises msgspec.DecodeError: it is not a report."""
    return _decoder.decode(line)


STEPS_MIN = 6  # with fewer outer steps there is no room for a kill and a join
_FALL = 0.9  # the validation loss must fall below this fraction of its first value,
_FALL_STEPS = 40  # if there are at least this many inner steps


class State(Enum):
    LOADING = "loading"
    STANDBY = "standing by"
    JOINING = "joining"
    TRAINING = "training"
    KILLED = "killed"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True)
class Peer:
    number: int
    state: State = State.LOADING
    outer_step: int = 0
    tokens_per_s: float = 0.0
    tx_bytes: int = 0
    data_parallel_bytes: float = 0.0  # what data-parallel training would have sent
    training: list[tuple[float, float]] = field(default_factory=list)  # time, loss
    validation: list[tuple[float, float]] = field(default_factory=list)
    joined_s: float | None = None  # since the start, as all times
    joined_step: int = 0
    killed_s: float | None = None
    digest: str = ""
    gone: bool = False

    @property
    def name(self) -> str:
        return f"peer {self.number}"

    @property
    def fate(self) -> str:
        if self.killed_s is not None:
            return f"killed at {self.killed_s:.0f} s"
        if self.joined_s is not None and self.joined_step:
            return f"joined at {self.joined_s:.0f} s"
        return "there all along"


class Director:
    def __init__(
        self,
        *,
        peers: int,  # founders
        steps: int,
        inner_steps: int,
        chaos: bool,  # whether a founder is killed and the understudy (the last peer) joins
        say: Callable[[str], object],  # prints a line
        kill: Callable[[int], object],  # kills a peer
        go: Callable[[int], object],  # lets a waiting peer join
    ) -> None:
        self._say, self._kill, self._go = say, kill, go
        assert peers >= 2 and (not chaos or steps >= STEPS_MIN)
        self.peers = [Peer(number) for number in range(peers + int(chaos))]
        self.founders = peers
        self.steps = steps
        self.inner_steps = inner_steps
        self.outer_step = 0
        self.reduce_bytes = 0
        self.failure: str | None = None
        self._reduce_s: dict[int, list[float]] = {}  # by outer step
        self._victim = self.peers[peers - 1] if chaos else None
        self._understudy = self.peers[peers] if chaos else None
        self._kill_step = round(0.4 * steps)
        self._rounds_without = max(1, round(0.2 * steps))

    @property
    def over(self) -> bool:
        return self.failure is not None or all(peer.gone for peer in self.peers)

    @property
    def algbw_bytes_s(self) -> float:
        """The algorithm bandwidth of the last outer round.

        It uses the shortest time, because the slowest peer waits for no other.
        """
        last = self._reduce_s.get(self.outer_step)
        return self.reduce_bytes / min(last) if last else 0.0

    def receive(self, number: int, report: Report, now_s: float) -> None:
        peer = self.peers[number]
        if peer.state is State.KILLED:
            return  # last words, read after its end
        match report:
            case Loaded():
                peer.state = State.STANDBY if peer is self._understudy else State.JOINING
                ready = sum(one.state is not State.LOADING for one in self.peers)
                self._say(f"{peer.name} has loaded model and text: {ready} of {len(self.peers)}")
                if peer is not self._understudy:
                    self._go(peer.number)
            case Joined():
                self._joined(peer, report, now_s)
            case Trained():
                peer.training.append((now_s, report.loss))
                peer.tokens_per_s = report.tokens_per_s
                if peer is self._victim and peer.outer_step >= self._kill_step:
                    peer.state, peer.killed_s = State.KILLED, now_s
                    self._kill(peer.number)
                    self._say(f"{peer.name} was killed amid outer step {peer.outer_step}")
            case Averaged():
                self._averaged(peer, report, now_s)
            case Finished():
                peer.state = State.FINISHED
                peer.digest = report.digest

    def exited(self, number: int, status: int) -> None:
        peer = self.peers[number]
        peer.gone = True
        if peer.state is State.KILLED or (peer.state is State.FINISHED and status == 0):
            return
        self.failure = f"{peer.name}, {peer.state.value}, ended with exit status {status}"
        peer.state = State.FAILED

    def silent(self, seconds: float) -> None:
        """The peers have reported nothing for too long."""
        states = ", ".join(f"{peer.name} is {peer.state.value}" for peer in self.peers)
        self.failure = f"no report for {seconds:.0f} s: {states}"

    def verdict(self) -> str | None:
        """The failure of a run that is over; None if there was none."""
        if self.failure:
            return self.failure
        finished = [peer for peer in self.peers if peer.state is State.FINISHED]
        if len({peer.digest for peer in finished}) != 1:
            return "the surviving peers do not hold the same bits: their digests differ"
        first, last = self.validation_losses()
        if self.steps * self.inner_steps >= _FALL_STEPS and not last < _FALL * first:
            return f"the validation loss did not fall: {first:.3f} at first, {last:.3f} at last"
        return None

    def validation_losses(self) -> tuple[float, float]:
        """The validation loss before training and at the end, measured by the first peer that
        finished."""
        peer = next(peer for peer in self.peers if peer.state is State.FINISHED)
        return peer.validation[0][1], peer.validation[-1][1]

    def _joined(self, peer: Peer, report: Joined, now_s: float) -> None:
        peer.state = State.TRAINING
        peer.joined_s, peer.joined_step = now_s, report.outer_step
        peer.outer_step = report.outer_step
        peer.validation.append((now_s, report.validation_loss))
        if peer is not self._understudy:
            return
        if not report.outer_step:
            self.failure = f"{peer.name} came too late: the others had finished"
            return
        self._say(
            f"{peer.name} has joined at outer step {report.outer_step}: it received the shared "
            f"state and starts at a loss of {report.validation_loss:.3f}"
        )

    def _averaged(self, peer: Peer, report: Averaged, now_s: float) -> None:
        peer.outer_step = report.outer_step
        peer.tx_bytes = report.tx_bytes
        peer.validation.append((now_s, report.validation_loss))
        n = report.contributors
        per_step = 2 * (n - 1) / n * report.reduce_bytes
        peer.data_parallel_bytes += self.inner_steps * per_step
        self.reduce_bytes = report.reduce_bytes
        if n > 1:
            self._reduce_s.setdefault(report.outer_step, []).append(report.reduce_s)
        if report.outer_step > self.outer_step:
            self.outer_step = report.outer_step
            self._say(
                f"outer step {report.outer_step}/{self.steps}: validation loss "
                f"{report.validation_loss:.3f}, mean of {n} peers"
                + (" (after a retry without a lost one)" if report.retries else "")
            )
        if self._victim and self._victim.killed_s is not None and n < self.founders:
            self._survived(peer)

    def _survived(self, peer: Peer) -> None:
        if peer.number == 0:
            self._rounds_without -= 1
        understudy = self._understudy
        if self._rounds_without > 0 or understudy is None or understudy.state is not State.STANDBY:
            return
        understudy.state = State.JOINING
        self._go(understudy.number)
        self._say(f"{understudy.name} asks to join; it has never seen this run")
