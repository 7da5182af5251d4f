"""Which packages of weights can be had, and from whom. No decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pccl.protocol import messages as m

Key = tuple[int, int]


class Catalogue:
    """The packages that associates hold.

    Attributes:
        head: the newest version of the weights that was ever published.
    """

    def __init__(self) -> None:
        self._packages: dict[Key, m.Package] = {}
        self._holders: dict[Key, dict[int, None]] = {}
        self._held: dict[int, dict[Key, None]] = {}  # by whom
        self.head = 0

    @property
    def packages(self) -> tuple[m.Package, ...]:
        """All that can be had: the newest ones, as many as a message holds."""
        newest = sorted(self._packages)[-m.PACKAGES_MAX :]
        return tuple(self._packages[key] for key in newest)

    def has(self, package: m.Package, number: int) -> bool:
        """Whether an associate holds exactly that."""
        return self._packages.get(package.key) == package and number in self.holders(package.key)

    def holders(self, key: Key) -> Iterable[int]:
        """Who holds a package, in the order in which they got it."""
        return self._holders.get(key, ())

    def size(self, key: Key) -> int:
        """The bytes of a package; 0 if there is none."""
        package = self._packages.get(key)
        return 0 if package is None else package.nbytes

    def set(self, number: int, packages: Iterable[m.Package]) -> Iterator[m.Package]:
        """An associate holds these, and no others. Yields those that contradict what others hold.

        What comes first counts: the others have begun to build on it.
        """
        old = self._held.pop(number, {})
        new: dict[Key, None] = {}
        for package in packages:
            if self._agrees(package):
                self._packages[package.key] = package
                new[package.key] = None
                self._holders.setdefault(package.key, {})[number] = None
                self.head = max(self.head, package.version)
            else:
                yield package
        for key in old.keys() - new.keys():
            del self._holders[key][number]
            if not self._holders[key]:
                del self._holders[key], self._packages[key]
        if new:
            self._held[number] = new

    def _agrees(self, package: m.Package) -> bool:
        """Whether it is what others hold under that name, and leads where others lead."""
        known = self._packages.get(package.key)
        if known is not None:
            return known == package
        others = (one for one in self._packages.values() if one.version == package.version)
        return all(one.content == package.content for one in others)

    def add(self, number: int, packages: Iterable[m.Package]) -> None:
        """An associate holds these too; nobody else does."""
        held = [self._packages[key] for key in self._held.get(number, {})]
        for _ in self.set(number, [*held, *packages]):
            raise AssertionError("a version is published once")
