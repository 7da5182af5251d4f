"""A queue of commands from user threads to the control thread.

An exception can be raised between any two bytecodes of a user thread: by a signal handler in the
main thread, by `PyThreadState_SetAsyncExc` in any thread. During protocol work it would separate a
change of state from the messages and orders that belong to it, which leaves no consistent state. So
user threads do a single atomic thing: they append a command. The work is done by the control
thread, which runs no signal handlers and is unknown to the program.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Command: TypeAlias = Callable[[], None]


class Inbox:
    """Commands in the order in which they were queued.

    The control thread says when it is about to wait (`may_wait`), and looks once more after that.
    So a command wakes it only if it waits: one that comes while it works is carried out with those
    before it, and what they say travels together.

    Attributes:
        socket: readable when there may be commands.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._ended = self._forked = self._waits = False
        self._out, self.socket = socket.socketpair()
        for end in (self._out, self.socket):
            end.setblocking(False)

    def post(self, command: Command) -> None:
        """Queues a command, and wakes the control thread if it waits."""
        self.leave(command)
        self.signal()

    def leave(self, command: Command) -> None:
        """Queues a command without waking the control thread; see `signal`."""
        if not self._forked:
            self._commands.append(command)

    def signal(self) -> None:
        """Wakes the control thread; after its end, runs the commands in this thread."""
        try:
            if self._waits and not (self._ended or self._forked):
                self._out.send(b"\0")
        except BlockingIOError:
            pass  # full: the control thread will wake anyway
        except OSError:
            assert self._ended, "the inbox is closed only at the end"
        if self._ended:
            self.carry_out()

    def may_wait(self) -> bool:
        """The control thread is about to wait, until `works`. Whether there are no commands."""
        self._waits = True
        return not self._commands

    def works(self) -> None:
        """The control thread waits no more."""
        self._waits = False

    def forked(self) -> None:
        """In a forked child there is no control thread: commands are dropped."""
        self._forked = True
        self._commands.clear()

    def clear_signal(self) -> None:
        """Clears the wake-up signal."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)

    def carry_out(self) -> None:
        """Runs all queued commands."""
        while self._commands:
            try:
                command = self._commands.popleft()
            except IndexError:  # after the end, another thread may have come first
                return
            command()

    def end(self) -> None:
        """The control thread ends. Later commands run in the thread that posts them."""
        self._ended = True
        self._out.close()
        self.socket.close()
        self.carry_out()
