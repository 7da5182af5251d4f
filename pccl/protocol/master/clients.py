"""Clients: processes that publish or follow weights beside the run.

Clients are not members: they do not vote, no peer waits for them, and they do not get the secrets
needed to connect to peers. If a client seeks a package, the master sends it to a holder. A holder
serves few receivers at a time, and each receiver becomes a holder when it has the package. So each
package spreads along a tree. Receivers with faster measured rates come first and get the fastest
free holder. A slow receiver gives back its place at the holder, so that no other client waits for
it.

Followers seek each difference as soon as they learn of it. The master already assigns their holders
when the difference is published, which saves a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from pccl.protocol import messages as m
from pccl.protocol import reach
from pccl.protocol.master.effects import Drop, Outbox, Send, plain
from pccl.protocol.master.history import Numbers
from pccl.protocol.master.topology import Rendezvous
from pccl.types import Result

Key = tuple[int, int]


class Catalogue:
    def __init__(self) -> None:
        self._packages: dict[Key, m.Package] = {}
        self._holders: dict[Key, dict[int, None]] = {}
        self._held: dict[int, dict[Key, None]] = {}  # by holder
        self.head = 0  # the newest version of the weights ever published

    @property
    def packages(self) -> tuple[m.Package, ...]:
        """The newest available packages, as many as fit into a message."""
        newest = sorted(self._packages)[-m.PACKAGES_MAX :]
        return tuple(self._packages[key] for key in newest)

    def has(self, package: m.Package, number: int) -> bool:
        """True if the client holds exactly this package."""
        return self._packages.get(package.key) == package and number in self.holders(package.key)

    def holders(self, key: Key) -> Iterable[int]:
        """The holders of a package, in the order of their receipt."""
        return self._holders.get(key, ())

    def size(self, key: Key) -> int:
        """The bytes of a package; 0 if there is none."""
        package = self._packages.get(key)
        return 0 if package is None else package.nbytes

    def set(self, number: int, packages: Iterable[m.Package]) -> Iterator[m.Package]:
        """Sets the packages of a client.

        Yields the packages that contradict other clients' packages, which came first and stay.
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
        """True unless it contradicts other clients' packages of the same version."""
        known = self._packages.get(package.key)
        if known is not None:
            return known == package
        others = (one for one in self._packages.values() if one.version == package.version)
        return all(one.content == package.content for one in others)

    def add(self, number: int, packages: Iterable[m.Package]) -> None:
        held = [self._packages[key] for key in self._held.get(number, {})]
        for _ in self.set(number, [*held, *packages]):
            raise AssertionError("a version is published once")


FIRST = 1 << 40  # the number of the first client; peers have lower numbers
SLOTS = 1 << 16  # the slots of a holder, as in c/pccl_core.h
PLACES = 2  # receivers that a holder serves at a time; with one, its link would idle in between
SMALL_BYTES = 1 << 20  # smaller transfers are mostly round trips, which leave the link idle
FAILED = -1  # in place of a rate: less than any
PLACES_SMALL = 8  # receivers of a holder at a time, for such packages


@dataclass(slots=True)
class Client:
    conn: bytes
    info: m.PeerInfo
    nonce: int  # admits other clients to its streams
    slot: int
    seek: m.Seek | None = None
    foreseen: m.Seek | None = None  # it is assumed to seek `seek`, but has not said so yet
    holder: int = 0  # it fetches from this client; 0: it waits for a holder
    slow: bool = False  # it has given back its place
    rate: int = 0  # bytes/s of its last fetch
    # bytes/s of its last fetch, by holder, or FAILED
    rates: dict[int, int] = field(default_factory=dict)
    given: int = 0  # bytes/s of the last fetch from it
    receivers: dict[int, None] = field(default_factory=dict)
    version: int = 0  # the version of its weights that it last reported
    published: int = 0  # the newest version that it has published; 0: none
    meetings: int = 0  # with senders that cannot connect to it

    def __str__(self) -> str:
        return f"client {self.info.peer - FIRST} ({self.info.where})"


class Clients:
    def __init__(self, numbers: Numbers, rendezvous: Rendezvous, outbox: Outbox) -> None:
        self._numbers, self.rendezvous = numbers, rendezvous
        self._outbox, self.catalogue = outbox, Catalogue()
        self.all: dict[int, Client] = {}  # by number
        self._by_conn: dict[bytes, int] = {}
        self._seeking: dict[int, None] = {}  # clients that wait for a holder
        self._next = FIRST + 1
        self._free_slots: list[int] = []
        self._slots = 0  # slots in use or in `_free_slots`

    def has(self, conn: bytes) -> bool:
        return conn in self._by_conn

    # ---- joining and leaving ----

    def register(self, conn: bytes, info: m.PeerInfo, warning: str) -> None:
        if len(self.all) >= SLOTS:
            self._outbox.do(Drop(conn, f"there are {SLOTS} clients already"))
            return
        number, self._next = self._next, self._next + 1
        slot = heappop(self._free_slots) if self._free_slots else self._slots
        self._slots = max(self._slots, slot + 1)
        nonce = self._numbers.nonce("client", number)
        one = Client(conn, msgspec.structs.replace(info, peer=number), nonce, slot)
        self.all[number], self._by_conn[conn] = one, number
        self._send(one, m.Welcome(number, plain(warning), nonce))
        self._send(one, m.Available(self.catalogue.packages, self.catalogue.head))
        self._outbox.note(f"{one} registered")

    def lose(self, conns: Iterable[bytes], why: str) -> None:
        lost = [self.all[self._by_conn[conn]] for conn in conns if conn in self._by_conn]
        before = self.catalogue.packages if lost else ()
        for one in lost:
            self._remove(one, why)
        if lost:
            self._notify_if_changed(before)
            self._assign()

    def drop(self, conn: bytes, why: str, result: Result = Result.INTERNAL_ERROR) -> None:
        self._outbox.do(Send(conn, m.Kicked(result.value, plain(why))), Drop(conn, plain(why)))
        self.lose([conn], why)

    def _remove(self, one: Client, why: str) -> None:
        number = one.info.peer
        self._part(one)
        for receiver in list(one.receivers):
            self._wait_again(self.all[receiver])
        del self.all[number], self._by_conn[one.conn]
        self._seeking.pop(number, None)
        heappush(self._free_slots, one.slot)
        if not self.all:
            self._free_slots.clear()
            self._slots = 0
        for other in self.all.values():
            other.rates.pop(number, None)
        for _ in self.catalogue.set(number, ()):
            raise AssertionError("an empty set contradicts nothing")
        self._outbox.note(f"{one}: {why}; {len(self.all)} clients remain")

    # ---- messages ----

    def received(self, conn: bytes, message: m.PeerMessage) -> None:
        one = self.all[self._by_conn[conn]]
        match message:
            case m.Publish():
                self._publish(one, message)
            case m.Holds():
                self._holds(one, message)
            case m.Seek():
                self._seek(one, message)
            case m.Got(rate):
                self._got(one, rate)
            case m.RendezvousRequest():
                self._request_rendezvous(one, message)
            case m.Slow():
                one.slow = True
                self._assign()
            case m.Leave():
                self._outbox.do(Drop(conn, "it left"))
                self.lose([conn], "it left")
            case _:
                self.drop(conn, f"it sent a {type(message).__name__} out of turn")

    def _publish(self, one: Client, publish: m.Publish) -> None:
        number, packages = one.info.peer, publish.packages
        if all(self.catalogue.has(package, number) for package in packages):
            self._send(one, m.Published(publish.call))  # once more: the first answer was lost
            return
        why = self._objection(packages)
        if why:
            result = Result.INVALID_USAGE.value
            self._send(one, m.CallError(publish.call, result, plain(why)))
            return
        before = self.catalogue.packages
        self.catalogue.add(number, packages)
        one.version = one.published = packages[0].version
        self._outbox.note(f"{one} published version {packages[0].version} of the weights")
        self._send(one, m.Published(publish.call))
        self._notify_if_changed(before)
        for package in packages:
            self._foresee(package)
        self._assign()

    def _objection(self, packages: tuple[m.Package, ...]) -> str:
        """The reason why these cannot be the next version; empty if they can."""
        head, version = self.catalogue.head, packages[0].version
        if any(package.base not in (0, head) for package in packages):
            return f"another process has published version {head} of the weights meanwhile"
        if version <= head:
            return f"version {version} is not newer than version {head}, which was published before"
        if any(package.version != version for package in packages):
            return "one version has one number"
        names, contents = {one.key for one in packages}, {one.content for one in packages}
        if len(names) < len(packages) or len(contents) > 1:
            return "the packages of one version lead to different content"
        return ""

    def _holds(self, one: Client, holds: m.Holds) -> None:
        before = self.catalogue.packages
        for package in self.catalogue.set(one.info.peer, holds.packages):
            self._outbox.note(f"{one} holds another version {package.version} than the others")
        self.catalogue.head = max(self.catalogue.head, holds.version)
        one.version = holds.version
        for number in list(one.receivers):
            receiver = self.all[number]
            key = None if receiver.seek is None else (receiver.seek.version, receiver.seek.base)
            if key is None or one.info.peer not in self.catalogue.holders(key):
                self._part(receiver)
                self._wait_again(receiver)
        self._notify_if_changed(before)
        self._assign()

    def _foresee(self, package: m.Package) -> None:
        """Notes which clients will seek a new package: they have fetched its base, and are idle."""
        for one in self.all.values():
            if package.base and one.version == package.base and one.rate and one.seek is None:
                one.seek = one.foreseen = m.Seek(*package.key)
                one.slow = False
                self._wait_again(one)

    def _seek(self, one: Client, seek: m.Seek) -> None:
        foreseen, one.foreseen = one.foreseen, None
        if seek == foreseen:
            return
        key = seek.version, seek.base
        if one.holder and one.seek is not None and key == (one.seek.version, one.seek.base):
            one.rates[one.holder] = FAILED  # others come first
        self._part(one)
        one.seek, one.slow = seek, False
        self._wait_again(one)
        self._assign()

    def _got(self, one: Client, rate: int) -> None:
        holder = self.all.get(one.holder)
        one.rate = rate
        if holder is not None:
            one.rates[one.holder] = holder.given = rate
        self._part(one)
        one.seek, one.slow = None, False
        self._seeking.pop(one.info.peer, None)
        self._assign()

    def _request_rendezvous(self, one: Client, request: m.RendezvousRequest) -> None:
        receiver = self.all.get(request.peer)
        if receiver is None:
            return  # it has left in the meantime
        receiver.meetings += 1  # each at the next relay: it may not reach the last one
        way = request, self.rendezvous.relays, receiver.meetings
        for to, message in reach.rendezvous(one.info, receiver.info, *way):
            if to.peer in self.all:
                self._send(self.all[to.peer], message)
            else:
                self._outbox.send(to.peer, message)

    # ---- assigning holders ----

    def _part(self, one: Client) -> None:
        """Ends the assignment of a receiver to its holder."""
        holder = self.all.get(one.holder)
        one.holder = 0
        if holder is not None:
            holder.receivers.pop(one.info.peer, None)
            self._send(holder, m.Served(one.info.peer))

    def _wait_again(self, one: Client) -> None:
        one.holder = 0
        if one.seek is not None:
            self._seeking[one.info.peer] = None

    def _assign(self) -> None:
        free: dict[tuple[int, int], list[Client]] = {}
        waiting = (self.all[number] for number in self._seeking)
        for one in sorted(waiting, key=lambda one: (one.slow, -one.rate)):
            assert one.seek is not None
            key = one.seek.version, one.seek.base
            if key not in free:
                free[key] = [*map(self.all.__getitem__, self.catalogue.holders(key))]
            places = self._places(key)
            free[key] = [holder for holder in free[key] if self._taken(holder) < places]
            usable = [each for each in free[key] if self._is_usable(one, each)]
            if usable:
                best = max(usable, key=lambda holder: self._merit(one, holder))
                self._send_to(one, best, key)

    def _is_usable(self, one: Client, holder: Client) -> bool:
        assert one.seek is not None
        apart = reach.apart(one.info, holder.info) and not self.rendezvous.relays
        return not apart and holder.info.peer not in one.seek.avoid

    def _send_to(self, one: Client, holder: Client, key: tuple[int, int]) -> None:
        number = one.info.peer
        one.holder = holder.info.peer
        holder.receivers[number] = None
        del self._seeking[number]
        self._send(holder, m.Serve(*key, one.info, one.nonce, one.slot))
        self._send(one, m.Source(*key, holder.info, holder.nonce, one.slot))

    def _merit(self, one: Client, holder: Client) -> tuple[int, int]:
        """The sort key of holders: the expected rate, then the fewest receivers."""
        rate = one.rates.get(holder.info.peer, holder.given)
        return rate, -self._taken(holder)

    def _places(self, key: tuple[int, int]) -> int:
        """The number of clients that may fetch a package from one holder at a time."""
        return PLACES_SMALL if self.catalogue.size(key) < SMALL_BYTES else PLACES

    def _taken(self, holder: Client) -> int:
        """The number of occupied places of a holder. Slow receivers occupy none."""
        return sum(not self.all[number].slow for number in holder.receivers)

    # ---- messages to clients ----

    def _notify_if_changed(self, before: tuple[m.Package, ...]) -> None:
        now = self.catalogue.packages
        if now != before:
            message = m.Available(now, self.catalogue.head)
            for one in self.all.values():
                self._send(one, message)

    def _send(self, one: Client, message: m.MasterMessage) -> None:
        self._outbox.do(Send(one.conn, message))
