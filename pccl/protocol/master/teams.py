"""Peers that are a team: they join the run together, and are lost together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pccl.protocol import messages as m


class Teams:
    """The registered members of each team.

    A team is a replica of a model whose shards lie in several processes, each of which is a peer of
    another group. Its members are admitted when all are registered, in one
    place of the order of all groups; and when one is lost, no other is of any use.
    """

    def __init__(self) -> None:
        self._members: dict[int, dict[int, m.PeerInfo]] = {}

    def objection(self, info: m.PeerInfo) -> str:
        """Why a newcomer cannot be in the team that it names; empty if it can."""
        if (info.team == 0) != (info.team_size == 0):
            return f"it is of team {info.team}, of {info.team_size} members, which cannot be"
        members = self._members.get(info.team, {})
        if any(one.team_size != info.team_size for one in members.values()):
            return f"it says that its team has {info.team_size} members, and another one does not"
        if info.team and len(members) == info.team_size:
            return f"its team has all its {info.team_size} members already"
        return ""

    def add(self, info: m.PeerInfo) -> None:
        """A peer is registered."""
        if info.team:
            self._members.setdefault(info.team, {})[info.peer] = info

    def remove(self, info: m.PeerInfo) -> None:
        """A peer is gone."""
        if info.team:
            del self._members[info.team][info.peer]
            if not self._members[info.team]:
                del self._members[info.team]

    def is_whole(self, info: m.PeerInfo) -> bool:
        """Whether all members of a peer's team are registered."""
        return not info.team or len(self._members[info.team]) == info.team_size

    def partners(self, infos: Iterable[m.PeerInfo]) -> Iterator[tuple[int, m.PeerInfo]]:
        """The other members of the teams of some peers, each with that one of them."""
        lost = {info.peer: info for info in infos}
        for info in lost.values():
            for number in self._members.get(info.team, ()):
                if number not in lost:
                    yield number, info


def halves(infos: Mapping[int, m.PeerInfo]) -> set[int]:
    """Which of some peers are of teams that are not among them as a whole."""
    sizes: dict[int, int] = {}
    for info in infos.values():
        sizes[info.team] = sizes.get(info.team, 0) + 1
    return {n for n, info in infos.items() if info.team and sizes[info.team] != info.team_size}


def in_order(infos: Mapping[int, m.PeerInfo]) -> dict[int, m.PeerInfo]:
    """The same peers team after team: that whose first member has registered first, first."""
    first: dict[int, int] = {}
    for number in sorted(infos):
        first.setdefault(infos[number].team or -number, number)
    order = sorted(infos, key=lambda number: (first[infos[number].team or -number], number))
    return {number: infos[number] for number in order}
