"""How the elements of an array lie in memory, where that is not C's order.

Collectives and shared state move memory and never look at shapes. So an array in any order can be
transferred in its own order, which must be the same on all peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a dense array, such as a transposed one, or one in torch.channels_last.

    Dense: its elements fill one stretch of memory, each in a place of its own.
    """

    shape: tuple[int, ...]  # of the array, without dimensions of one element, which say nothing
    strides: tuple[int, ...]  # in elements, not bytes

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[float]) -> Layout | None:
        """The layout of an array that is not in C's order, and not empty; None: it is not dense."""
        dimensions = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
        place = 1
        for n, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
            if stride != place:
                return None
            place *= n
        return cls(tuple(n for n, _ in dimensions), tuple(int(stride) for _, stride in dimensions))

    def part(self, parts: int) -> Layout | None:
        """The layout of each of `parts` equal parts of the first dimension; None if they mix."""
        n, rest = self.shape[0], Layout(self.shape[1:], self.strides[1:])
        if n % parts or self.strides[0] < max(self.strides):
            return None
        if n == parts:
            return rest
        return Layout((n // parts, *rest.shape), self.strides)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}/{','.join(map(str, self.strides))}"


def shares_places(shape: Sequence[int], strides: Sequence[float]) -> bool:
    """True if elements may share a place, as those of an expanded tensor do."""
    reach = 0.0  # of the dimensions with smaller strides
    for n, stride in sorted(zip(shape, map(abs, strides), strict=True), key=lambda each: each[1]):
        if n > 1 and stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def described(layout: str) -> str:
    """A layout's text, or an empty one for C's order, as errors quote it."""
    shape, _, strides = layout.partition("/")
    return f"{shape} with strides {strides}" if layout else "as in C"
