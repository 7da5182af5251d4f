"""Peers that keep others waiting for longer than the operator allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Stragglers:
    """Measures how long peers keep others waiting.

    Args:
        limit_s: seconds that others may wait for a peer; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._since: dict[object, float] = {}  # round or seq -> when others began to wait

    def late(
        self, now_s: float, waits: Iterable[tuple[object, Iterable[int], str]]
    ) -> Iterator[tuple[int, str]]:
        """The peers that are too late, each with the title of what others wait for.

        Args:
            now_s: the time.
            waits: everything that peers wait for: its name, which does not change meanwhile, the
                missing peers, and a title.
        """
        if self.limit_s is None:
            return
        began, self._since = self._since, {}
        for name, missing, title in waits:
            since = self._since[name] = began.get(name, now_s)
            if now_s - since > self.limit_s:
                for number in missing:
                    yield number, title
