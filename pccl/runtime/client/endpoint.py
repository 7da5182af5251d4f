"""What a peer and an associate have alike: an engine, an inbox, and a connection to the master."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.runtime import forks
from pccl.runtime.client.connection import MasterConnection, Member
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.client.identity import Identity
from pccl.runtime.client.inbox import Inbox
from pccl.runtime.client.meetings import Meetings
from pccl.runtime.client.streams import Streams
from pccl.runtime.config import Config
from pccl.runtime.resolve import Resolver, everywhere, further_hosts
from pccl.runtime.waiter import Waiter
from pccl.security import Security

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
