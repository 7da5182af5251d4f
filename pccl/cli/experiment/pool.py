"""Training processes that serve one run after the other, because to load torch takes seconds."""

from __future__ import annotations

from pccl.cli.demo.processes import Fleet
from pccl.support.closing import Closing


class Pool(Closing):
    """Gives a process to each peer of a run; none outlives `close`."""

    def __init__(self) -> None:
        self._fleet = Fleet("pccl.cli.experiment.peer")
        self._idle: list[int] = []
        self._processes: dict[int, int] = {}  # by the number of the peer
        self._started = 0

    def close(self) -> None:
        """Ends them all."""
        self._fleet.close()

    def start(self, number: int, task: str) -> None:
        """Has a process load what it needs to be peer `number`."""
        if not self._idle:
            self._fleet.start_peer(self._started, {})
            self._idle.append(self._started)
            self._started += 1
        process = self._processes[number] = self._idle.pop()
        self._fleet.say(process, task)

    def go(self, number: int) -> None:
        """Lets a peer join the run."""
        self._fleet.go(self._processes[number])

    def kill(self, number: int) -> None:
        """Ends a peer as a power cut would; nothing more is heard of it."""
        self._fleet.kill(self._processes.pop(number))

    def free(self, number: int) -> None:
        """A peer has finished: its process may be another one."""
        self._idle.append(self._processes.pop(number))

    def hear(self, timeout_s: float) -> tuple[int, str | int]:
        """The number of a peer and a line that it has said, or its exit status.

        Raises:
            queue.Empty: nobody has said anything.
        """
        while True:
            process, news = self._fleet.heard.get(timeout=timeout_s)
            for number, of_peer in self._processes.items():
                if of_peer == process:
                    return number, news

    def errors(self, number: int) -> str:
        """The end of what its process has written to stderr."""
        return self._fleet.errors(self._processes[number])
