"""Peer processes that make the calls that a test asks for; each runs puppet.py."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts

SCRIPT = Path(__file__).with_name("puppet.py")
PATIENCE_S = 40.0
Start = Callable[..., "Puppet"]
Answer = dict[str, Any]


class Puppet:
    """A peer process that makes the calls it is told to (puppet.py)."""

    def __init__(self, master: str, group: int = 0, pool_size: int = 0, **env: str) -> None:
        self.process = scripts.start(SCRIPT, master, group, pool_size, env=env)
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))

    def begin(self, what: str, **arguments: object) -> None:
        """Makes it call; `end` has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def end(self) -> Answer:
        return self._answers.get(timeout=PATIENCE_S)

    def value(self) -> Any:
        answer = self.end()
        assert "value" in answer, answer
        return answer["value"]

    def call(self, what: str, **arguments: object) -> Any:
        self.begin(what, **arguments)
        return self.value()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def together(puppets: list[Puppet], what: str, **arguments: object) -> list[Any]:
    """All make the same call at the same time."""
    for puppet in puppets:
        puppet.begin(what, **arguments)
    return [puppet.value() for puppet in puppets]


def gathered(start: Start, groups: list[int], **options: object) -> list[Puppet]:
    """Puppets that are all accepted, in this order."""
    puppets = [start(group, **options) for group in groups]
    for size, newcomer in enumerate(puppets, 1):
        newcomer.begin("connect")
        for other in puppets[: size - 1]:
            other.begin("gather", size=size)
        assert [puppet.value() for puppet in puppets[:size]] == [None] * size
    return puppets
