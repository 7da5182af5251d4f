"""Peers that keep others waiting for longer than the operator allows. It is told the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Stragglers:
    """Measures for how long peers have been waited for.

    Args:
        limit_s: seconds that others may wait for a peer; None: for ever.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._since: dict[object, float] = {}  # round or seq -> when others began to wait

    def late(
        self, now_s: float, waits: Iterable[tuple[object, Iterable[int], str]]
    ) -> Iterator[tuple[int, str]]:
        """The peers that are too late, each with what others wait for.

        Args:
            now_s: the time.
            waits: of all that is waited for now: its name, which does not change while it is
                waited for, who is missing, and its title.
        """
        if self.limit_s is None:
            return
        began, self._since = self._since, {}
        for name, missing, title in waits:
            since = self._since[name] = began.get(name, now_s)
            if now_s - since > self.limit_s:
                for number in missing:
                    yield number, title
