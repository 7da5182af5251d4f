"""What the threads of the user want done, for the one thread that does it.

An exception can land between any two bytecodes of a thread of the user: a signal handler raises in
the main thread, `PyThreadState_SetAsyncExc` in any. In the middle of the protocol's work it would
separate a change of state from the messages and orders that belong to it, and nobody could go on
from there. So these threads do one thing that is either done or not: they append a command. The
work itself is done by a thread of our own, of which no signal handler and no program knows.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Command: TypeAlias = Callable[[], None]


class Inbox:
    """Commands in the order in which they came.

    Attributes:
        socket: readable when there may be some.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._ended = self._forked = False
        self._out, self.socket = socket.socketpair()
        for end in (self._out, self.socket):
            end.setblocking(False)

    def post(self, command: Command) -> None:
        """Has a command carried out soon."""
        self.leave(command)
        self.signal()

    def leave(self, command: Command) -> None:
        """Has a command carried out before whatever comes next; not soon, without `signal`."""
        if not self._forked:
            self._commands.append(command)

    def signal(self) -> None:
        """Has what was left carried out soon; after the end at once, by whoever is here."""
        try:
            if not (self._ended or self._forked):
                self._out.send(b"\0")
        except BlockingIOError:
            pass  # full: it is known that there is something
        except OSError:
            assert self._ended, "the inbox is closed at the end only"
        if self._ended:
            self.carry_out()

    def forked(self) -> None:
        """In a forked child: nobody works here, and what is posted is dropped."""
        self._forked = True
        self._commands.clear()

    def clear_signal(self) -> None:
        """What was posted so far is known of."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)

    def carry_out(self) -> None:
        """All commands that are there."""
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:
                return
            command()

    def end(self) -> None:
        """The thread that works here ends. Whatever is posted later finds that all is over."""
        self._ended = True
        self._out.close()
        self.socket.close()
        self.carry_out()
