"""Which packages lead to the newest weights. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from pccl.protocol import messages as m

KEPT_MAX = 200  # packages, of those that fit into a message


def way(packages: Sequence[m.Package], version: int) -> tuple[m.Package, ...]:
    """The fewest bytes that lead from a version to the newest one that can be reached; in order.

    Args:
        packages: that can be had.
        version: that one has; 0: none.
    """
    cost, last = {version: 0}, dict[int, m.Package]()
    for package in sorted(packages, key=lambda one: one.key):
        if package.version <= version or not (package.base == 0 or package.base in cost):
            continue
        total = package.nbytes + (cost[package.base] if package.base else 0)
        if total < cost.get(package.version, total + 1):
            cost[package.version], last[package.version] = total, package
    at = max(cost)
    found: list[m.Package] = []
    while at != version:
        found.append(last[at])
        at = last[at].base or version
    return tuple(reversed(found))


def stale(packages: Sequence[m.Package], held: Sequence[m.Package]) -> list[m.Package]:
    """What a holder need not keep, given what can be had.

    Whoever comes late begins with the newest whole version; whoever is a little behind may still
    want the differences of one generation before. A whole version is kept until this holder has a
    newer one.
    """
    wholes = sorted(one.version for one in packages if one.base == 0)
    own = max((one.version for one in held if one.base == 0), default=0)
    oldest = wholes[-2] if len(wholes) > 1 else 0
    oldest = max([oldest, *sorted(one.version for one in held)[:-KEPT_MAX]])
    return [one for one in held if (one.version < own if one.base == 0 else one.version <= oldest)]
