"""The handles that C programs hold instead of objects: unique numbers in the form of pointers.

So an invalid or destroyed handle is recognized, and never dereferenced.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Generic, TypeVar

from pccl.capi.libpccl import ffi

T = TypeVar("T")

_numbers = itertools.count(0x1000, 0x10)  # shared by all kinds, so that no two handles are equal


class Handles(Generic[T]):
    """The objects of one kind that a C program has.

    Args:
        kind: the C type of a handle.
        what: the name of the kind in messages, with its article.
    """

    def __init__(self, kind: str, what: str) -> None:
        self._kind, self._what = kind, what
        self._objects: dict[int, T] = {}
        self._lock = threading.Lock()

    def add(self, made: T) -> Any:
        number = next(_numbers)
        with self._lock:
            self._objects[number] = made
        return ffi.cast(self._kind, number)

    def __getitem__(self, handle: Any) -> T:
        """The object of a handle. Raises ValueError: there is none."""
        number = int(ffi.cast("uintptr_t", handle))
        with self._lock:
            if number in self._objects:
                return self._objects[number]
        if not number:
            raise ValueError(f"{self._what} is NULL")
        raise ValueError(f"{number:#x} is not {self._what}, or it was destroyed")

    def remove(self, handle: Any) -> T:
        """Removes and returns an object. Its handle becomes invalid.

        Raises ValueError: there is none.
        """
        found = self[handle]
        with self._lock:
            if self._objects.pop(int(ffi.cast("uintptr_t", handle)), None) is None:
                raise ValueError(f"{self._what} was destroyed by another thread")
        return found
