"""Objects that a `with` statement closes at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Has a `close`, which `with` calls at its end, whatever ends it."""

    @abstractmethod
    def close(self) -> None:
        """Ends it, and returns when nothing of it is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
