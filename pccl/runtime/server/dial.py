"""Dials peers back to check that they can be reached, without ever blocking.

A dial has two steps. First it connects, and waits for the greeting that a ZeroMQ socket sends to a
new connection; it sends nothing to other services. Then it does the handshake of a stream, with the
peer's password or key, which only the peer itself knows. The handshake proves that the dial reached
the peer, and not another process behind a wrong port forwarding.

Any process may request a dial, but must not explore the master's network in this way:
docs/internals/protocol.md ("A peer that cannot be reached") says what the process learns, and has
the limits. Names are resolved (in a thread) only for the master's own dials.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - socket.getaddrinfo would import it, when memory may be short
import errno
import queue
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from pccl.protocol import reach
from pccl.runtime import limits
from pccl.runtime.encryption import secure_client
from pccl.runtime.resolve import BEGUN, GREETING, asked, destination, is_address
from pccl.runtime.sockets import Waiter, readable
from pccl.security import KeyPair
from pccl.support import KEY, address_text

NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOTCONN)
ANOTHER = "another process answers there: check the port forwarding"
UNTOLD = "it has not proven that it is there"
NAME = "dial"  # the master's user name in a handshake, as in c/pccl_core.h
TOKEN = re.compile(r"[0-9a-f]{16,64}")

# The cost of a dial for its asker. An asker has an allowance of ASKER_MAX, and regains 1 a second.
OWN_COST, OTHER_COST, ASKER_MAX = 1, 4, 64

Then = Callable[[str | None], None]


class Target(NamedTuple):
    """A peer to dial: its address, and its public key (`curve`) or else its password (`token`)."""

    host: str
    port: int
    curve: str = ""
    token: str = ""


class _Dial:
    """A dial in progress: first a plain connection, then a handshake."""

    def __init__(self, target: Target, then: Then, now_s: float, explains: bool) -> None:
        self.target, self.then, self.until_s = target, then, now_s + limits.DIAL_S
        self.slow_s = now_s + limits.STAGGER_S  # when it counts as slow
        self.slow: Callable[[], None] | None = None  # called then
        self.explains = explains  # whether `then` learns why it fails
        self.failed = ""  # why it has failed, reported only when its time is up
        self.found: queue.SimpleQueue[list[str] | OSError] | None = None  # addresses of a name
        self.certain = True  # whether a failure is evidence against the peer
        self.opened = ExitStack()  # closes the sockets of its present step


class Dialler:
    """The dials in progress. Each ends with a call of its `then`.

    The argument of `then` is "" if the peer was reached, else why not; None if no dial was made.
    """

    def __init__(
        self,
        waiter: Waiter,  # the waiter of the thread that uses this
        context: zmq.Context[zmq.Socket[bytes]],  # makes the sockets of handshakes
        keys: KeyPair | None = None,  # the master's keys, if the run has keys
        *,
        allowed: bool = True,  # whether any dial may be made
    ) -> None:
        self._allowed = allowed
        self._waiter, self._context, self._keys = waiter, context, keys
        self._dials: set[_Dial] = set()
        self._spent: dict[str, tuple[float, float]] = {}  # by asker: the cost, and its time

    @property
    def busy(self) -> bool:
        return bool(self._dials)

    def dial(
        self,
        target: Target,
        now_s: float,
        then: Then,
        asker: str | None = None,
        slow: Callable[[], None] | None = None,
    ) -> None:
        """Begins a dial. If it is impossible, or a limit is reached, calls `then` at once.

        Args:
            target: the peer to dial. Its host may be a name only if the master itself asks.
            now_s: the time by the monotonic clock.
            then: called with the result.
            asker: the host that requests the dial; None: the master itself.
            slow: called if there is no result after `limits.STAGGER_S`.
        """
        explains = asker in (None, target.host)
        if (
            not self._allowed
            or not (asker is None or is_address(target.host))
            or not self._provable(target)
            or len(self._dials) >= limits.DIALS_MAX
            or not self._afford(asker, OWN_COST if explains else OTHER_COST, now_s)
        ):
            then(None)
            return
        dial = _Dial(target, then, now_s, explains)
        dial.slow = slow
        self._dials.add(dial)
        if is_address(target.host):
            try:
                self._connect(dial)
            except Exception:
                self._forget(dial)
                raise
            return
        try:
            dial.found = asked(target.host)
        except OSError:  # no thread: no evidence against the peer
            self._give_up(dial)

    def _connect(self, dial: _Dial) -> None:
        try:
            family, kind, protocol, _, address = destination(dial.target.host, dial.target.port)
            plain = socket.socket(family, kind, protocol)
        except OSError:  # no such address family, or no descriptors: no evidence against the peer
            self._give_up(dial)
            return
        dial.opened.callback(plain.close)
        plain.setblocking(False)
        number = plain.connect_ex(address)
        if number == errno.ENETUNREACH and ":" in dial.target.host:  # the master has no IPv6
            self._give_up(dial)
            return
        if number not in BEGUN:
            self._end(dial, _text(number))
            return
        self._waiter.add(plain, lambda: self._read_greeting(dial, plain))
        dial.opened.callback(self._waiter.remove, plain)

    def tick(self, now_s: float) -> None:
        """Continues with names that were resolved, and ends dials whose time is up."""
        for dial in [dial for dial in self._dials if dial.slow_s <= now_s]:
            slow, dial.slow = dial.slow, None
            if slow is not None:
                slow()
        for dial in [dial for dial in self._dials if dial.found is not None]:
            self._resolved(dial)
        for dial in [dial for dial in self._dials if dial.until_s <= now_s]:
            why = f"no answer within {limits.DIAL_S:g} s" if dial.explains else UNTOLD
            self._forget(dial)
            dial.then((dial.failed or why) if dial.certain else None)

    def _resolved(self, dial: _Dial) -> None:
        """Continues a dial when its name is resolved.

        If the master finds no address, this is no evidence against the peer. Neither is an address
        that does not answer, if there are others.
        """
        assert dial.found is not None
        dial.certain = False  # until the look-up ends
        try:
            found = dial.found.get_nowait()
        except queue.Empty:
            return
        if isinstance(found, OSError) or not found:
            self._give_up(dial)
            return
        dial.found, dial.certain = None, len(found) == 1
        dial.target = dial.target._replace(host=found[0])
        self._connect(dial)

    def _give_up(self, dial: _Dial) -> None:
        """Ends a dial that cannot be made."""
        self._forget(dial)
        dial.then(None)

    def close(self) -> None:
        """Ends all dials without calling `then`."""
        for dial in list(self._dials):
            self._forget(dial)

    # ---- limits ----

    def _provable(self, target: Target) -> bool:
        """True if the target has a key or a password, to prove its identity."""
        if self._keys is not None:
            return KEY.fullmatch(target.curve) is not None
        return TOKEN.fullmatch(target.token) is not None

    def _afford(self, asker: str | None, cost: int, now_s: float) -> bool:
        if asker is None:
            return True
        if asker not in self._spent and len(self._spent) >= limits.ASKERS_MAX:
            self._spent = {
                who: (spent, at_s)
                for who, (spent, at_s) in self._spent.items()
                if spent > now_s - at_s
            }
            if len(self._spent) >= limits.ASKERS_MAX:
                return False
        spent, at_s = self._spent.get(asker, (0.0, now_s))
        spent = max(0.0, spent - (now_s - at_s)) + cost
        if spent > ASKER_MAX:
            return False
        self._spent[asker] = (spent, now_s)
        return True

    # ---- the two steps ----

    def _read_greeting(self, dial: _Dial, plain: socket.socket) -> None:
        if dial not in self._dials:
            return
        try:
            said = plain.recv(len(GREETING))
        except OSError as error:
            if error.errno not in NOT_YET:
                self._end(dial, _text(error.errno or 0))
            return
        if said == GREETING:
            dial.opened.close()
            try:
                self._shake_hands(dial)
            except zmq.ZMQError:  # for example no descriptors: no evidence against the peer
                self._give_up(dial)
        elif said:
            self._end(dial, "something else than a pccl peer answers there")
        else:
            self._end(dial, "the connection is closed as soon as it is there")

    def _shake_hands(self, dial: _Dial) -> None:
        target = dial.target
        push = self._context.socket(zmq.PUSH)
        dial.opened.callback(push.close, linger=0)
        milliseconds = int(limits.DIAL_S * 1000)
        options = {
            zmq.LINGER: 0,
            zmq.RECONNECT_IVL: -1,
            zmq.CONNECT_TIMEOUT: milliseconds,
            zmq.HANDSHAKE_IVL: milliseconds,
            zmq.IPV6: int(":" in target.host),
        }
        for option, value in options.items():
            push.setsockopt(option, value)
        if self._keys is not None:
            secure_client(push, self._keys, target.curve)
        else:
            push.setsockopt(zmq.PLAIN_USERNAME, NAME.encode())
            push.setsockopt(zmq.PLAIN_PASSWORD, target.token.encode())
        monitor = push.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        dial.opened.callback(monitor.close, linger=0)
        dial.opened.callback(push.disable_monitor)
        self._waiter.add(monitor, lambda: self._read_monitor(dial, monitor))
        dial.opened.callback(self._waiter.remove, monitor)
        push.connect(f"tcp://{address_text(target.host, target.port)}")

    def _read_monitor(self, dial: _Dial, monitor: zmq.Socket[bytes]) -> None:
        if dial not in self._dials or not readable(monitor):
            return
        event = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
        reached = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._end(dial, "" if reached else ANOTHER)

    def _end(self, dial: _Dial, why: str) -> None:
        dial.opened.close()
        if why and not dial.explains:
            dial.failed = UNTOLD  # reported when the time is up, which does not reveal why
            return
        self._dials.remove(dial)
        dial.then(why if dial.certain or not why else None)

    def _forget(self, dial: _Dial) -> None:
        dial.opened.close()
        self._dials.remove(dial)


def dial_hosts(
    dialler: Dialler,  # makes the dials
    hosts: Sequence[str],  # the hosts of the peer
    target: Target,  # the peer; its `host` is not used
    clock: Callable[[], float],  # the monotonic clock, in seconds
    then: Then,  # as in `Dialler.dial`
    asker: str | None = None,  # as in `Dialler.dial`
) -> None:
    """Dials a peer at its first host, then at all if that fails or is slow. Calls `then` once."""
    answers: dict[str, str | None] = dict.fromkeys(hosts)
    left = [*answers]
    others = left[1:]

    def answered(host: str, why: str | None) -> None:
        if not left:
            return  # it was reached at another host
        answers[host] = why
        left.remove(host)
        if why == "":
            left.clear()
        if not left:
            then(reach.concluded(answers))
        elif host == hosts[0]:
            begin_others()

    def begin_others() -> None:
        while others:
            begin(others.pop(0))

    def begin(host: str, slow: Callable[[], None] | None = None) -> None:
        dialler.dial(target._replace(host=host), clock(), partial(answered, host), asker, slow)

    begin(hosts[0], begin_others)


def _text(number: int) -> str:
    return {
        errno.ECONNREFUSED: "connection refused: nothing listens at that port",
        errno.ETIMEDOUT: "no answer",
        errno.ENETUNREACH: "there is no route to that network",
        errno.EHOSTUNREACH: "there is no route to that host",
    }.get(number, f"error {errno.errorcode.get(number, str(number))}")
