"""What the control thread of a peer or an associate has: engine, streams, sockets, and an inbox.

An exception can be raised between any two bytecodes of a user thread: by a signal handler in the
main thread, by `PyThreadState_SetAsyncExc` in any thread. During protocol work it would separate a
change of state from the messages and commands that belong to it, which leaves no consistent state.
So user threads do a single atomic thing: they append a command. The work is done by the control
thread, which runs no signal handlers and is unknown to the program.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import zmq

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.runtime import forks
from pccl.runtime.client.connection import Identity, MasterConnection, Member
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.client.meetings import Meetings
from pccl.runtime.client.streams import Streams
from pccl.runtime.config import Config
from pccl.runtime.resolve import Resolver, everywhere, further_hosts
from pccl.runtime.waiter import Waiter
from pccl.security import Security

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


Hello = Callable[[int, str], m.Hello]  # from the engine's port and ipc address


class Endpoint:
    """What one control thread drives.

    Args:
        address: of the master.
        config: timings and limits.
        security: the keys; None: nothing is encrypted.
        lanes: to each neighbour; 0: chosen by the engine.
        read_engine: reads the engine's events.
        say: tells the master that a stream leads to somebody to whom nobody can connect.

    Attributes:
        inbox: commands for the control thread.
        waiter: for what the control thread waits.
        engine: moves bulk data.
        resolver: looks up names.
        meetings: with those to whom nobody can connect.
        streams: of the engine.
        hello: the first message, once `introduce` has made it.
        master: the connection to the master, once `reach` has made it.

    Raises:
        OSError: the engine cannot listen here.
        PCCLError: INVALID_USAGE: keys are missing or unsafe.
    """

    hello: m.Hello
    master: MasterConnection

    def __init__(
        self,
        address: str,
        config: Config,
        security: Security | None,
        *,
        lanes: int,
        read_engine: Callable[[], None],
        say: Callable[[m.Meet], None],
    ) -> None:
        self._config, self._address = config, address
        self._identity, here = Identity.of(security), everywhere(address)
        options = EngineOptions(
            heartbeat_ms=config.heartbeat_ms, heartbeat_timeout_ms=config.heartbeat_timeout_ms
        )
        with contextlib.ExitStack() as opened:  # what a start that fails closes
            self.inbox = Inbox()
            opened.callback(self.inbox.end)
            self.waiter = Waiter()
            opened.callback(self.waiter.close)
            self.engine = Engine(
                self._identity.guard(options),
                host=here,
                ports=config.ports,
                stopped=lambda: self.inbox.post(read_engine),
            )
            opened.callback(self.engine.close)
            self.resolver = Resolver(self.inbox.post)
            self.meetings = Meetings(self.engine, self.resolver, config, here, say)
            opened.callback(self.meetings.close)
            self.streams = Streams(
                self.engine, self.resolver, config, lanes, self.local, self.meetings
            )
            self._opened = opened.pop_all()

    def introduce(self, hello: Hello, **more: Any) -> m.Hello:
        """The first message, with these fields changed as well."""
        said = hello(self.engine.port, self.engine.ipc if self._config.ipc else "")
        self.hello = msgspec.structs.replace(
            said,
            curve=self._identity.curve,
            dial=self._identity.token,
            outgoing=self._config.outgoing,
            others=further_hosts(self._config, self._address),
            **more,
        )
        return self.hello

    def reach(self, host: str, port: int, machine: Member) -> MasterConnection:
        """The connection to the master at that host, whose name is resolved again to reconnect."""
        config, identity = self._config, self._identity
        self.master = MasterConnection(
            host, port, config, identity, machine, self.waiter, self.resolver
        )
        return self.master

    def local(self, info: m.PeerInfo) -> bool:
        """Whether another one is on this machine."""
        return reach.local(self.hello, info)

    def begin(
        self,
        read_master: Callable[[], None],
        perform: Callable[[list[Any]], None],
        *threads: threading.Thread,
    ) -> None:
        """Opens the first connection to the master, and starts these threads.

        Raises:
            OSError: the system provides no socket, or no thread.
        """
        try:
            self._context = zmq.Context()
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot begin: {error}") from None
        try:
            self.master.begin(self._context, self._address, read_master, perform)
            for thread in threads:
                thread.start()
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, RuntimeError):
                raise OSError(errno.EAGAIN, f"cannot begin: {error}") from None
            raise

    def abandon(self) -> None:
        """Closes everything of one that has not begun."""
        self._opened.close()

    def forked(self) -> None:
        """In a forked child, which must not use what its parent has."""
        self.inbox.forked()
        others = {*self.streams.ends, (self.master.address, self.master.port)}
        forks.let_go({self.engine.port, self.meetings.port}, self.engine.ipc, others)

    def close(self) -> None:
        """Closes everything but the inbox, whatever fails on the way."""
        with contextlib.ExitStack() as last:  # runs in reverse order
            last.callback(self.waiter.close)
            last.callback(self._context.term)
            last.callback(self.meetings.close)
            last.callback(self.engine.close)  # restores and releases what is not settled
            last.callback(self.streams.clear)
            last.callback(self.resolver.forget)
            last.callback(self.master.close)
