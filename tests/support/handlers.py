"""Tables of handlers by the type of a message."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping


def takes_what_it_is_given(handlers: Mapping[type, Callable[..., None]]) -> bool:
    """Whether each handler that is a method takes a message of the type that it stands for."""
    for kind, handler in handlers.items():
        if handler.__name__ != "<lambda>":
            *_, taken = (h for n, h in typing.get_type_hints(handler).items() if n != "return")
            assert taken is kind or kind in typing.get_args(taken), handler
    return True
