"""The C engine (c/pccl_core.h) and its thread, which runs without the GIL.

Commands and events travel over a PAIR socket of the engine's own context, so only `close` blocks.

An engine also listens on an ipc socket, in a directory of its own. The directory is locked while
the process lives. A process that is killed leaves its directory behind; the next engine of the same
user finds it unlocked and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import zmq
from msgspec import Struct

from pccl.ext import ffi, lib, tables
from pccl.protocol.peer.effects import EagerOp, StartOp, StartTransfer
from pccl.protocol.tuning import Algorithm
from pccl.runtime.filelock import FileLock, Taken
from pccl.runtime.resources import out_of_resources
from pccl.runtime.sockets import Mail
from pccl.types import TRAITS, CollectiveKind

log = logging.getLogger("pccl")

COMPLETE: int = lib.PCCL_COMPLETE
FAILED: int = lib.PCCL_FAILED
SETTLED: int = lib.PCCL_SETTLED
STREAM_LOST: int = lib.PCCL_STREAM_LOST
STREAM_UP: int = lib.PCCL_STREAM_UP
PROGRESS: int = lib.PCCL_PROGRESS
WRITTEN: int = lib.PCCL_WRITTEN
LEAF: int = lib.PCCL_LEAF
# Status of FAILED:
STARVED: int = lib.PCCL_ESTREAM  # a fetch has no holder left, and can be started again
NO_MEMORY: int = lib.PCCL_ENOMEM
# Status of STREAM_LOST:
LIED: int = lib.PCCL_EPROTO  # the peer has sent wrong data
UNREACHABLE: int = lib.PCCL_EREACH  # the stream was never up
REFUSED: int = lib.PCCL_EZMQ  # this process got no socket
ANOTHER: int = lib.PCCL_EOTHER  # another process answers at that address

COLLECTIVES: dict[CollectiveKind, int] = {  # those around a ring, by the names of their kinds
    kind: getattr(lib, f"PCCL_{kind.name}") for kind, traits in TRAITS.items() if traits.laps
} | {CollectiveKind.BARRIER: lib.PCCL_ALL_REDUCE}  # without data

EVENT = struct.Struct("@IiQIIQQQIIQ160s")  # a pccl_event
assert EVENT.size == ffi.sizeof("pccl_event")

_ALGORITHMS: dict[Algorithm, int] = {
    Algorithm.ONE_SHOT: lib.PCCL_ONE_SHOT,
    Algorithm.TWO_STAGE: lib.PCCL_TWO_STAGE,
}
COMMANDS_ENDPOINT = "inproc://pccl-engine"  # in the engine's own context


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine."""

    io_threads: int = 1  # number of libzmq's I/O threads
    # messages that may wait to be forwarded; beyond that, the engine receives none
    forward_max: int = 256
    recv_hwm: int = 4  # received messages queued for each connection
    heartbeat_ms: int = 1000  # interval of heartbeats to all senders to this engine; 0: none
    heartbeat_timeout_ms: int = 5000  # a sender without a heartbeat for this long loses its stream
    connect_timeout_ms: int = 5000  # time limit for connecting, and for a handshake on either side
    copy_max: int = 16384  # payloads with more bytes than this are sent without a copy
    fetch_window: int = 64  # most requests in flight from a fetch to one holder
    curve_public: bytes = b""  # public key of this peer, in Z85; empty: nothing is encrypted
    curve_secret: bytes = field(default=b"", repr=False)  # its secret key
    # the master's public key, or its password in a run without keys. The master may connect to
    # check that this engine can be reached. Without keys and without this, anyone may connect.
    dialler: bytes = field(default=b"", repr=False)


PART = struct.Struct("@PPQIP")  # a pccl_part


class Part(Struct, frozen=True):
    """An array of a collective."""

    send: int  # address of the input
    recv: int  # address of the result
    count: int  # elements of a slice
    dtype: int  # a pccl.DataType value
    error: int = 0  # address of numbers for the errors of quantizing; 0: none


class Ids(TypedDict):
    """Distinguishes the messages of an op from others."""

    run: int  # the run's number, 64 bits
    tag: int  # the collective's, or the transfer's
    min_seq: int  # the sequence number of the op will be greater


class Event(NamedTuple):
    """An event of the engine."""

    kind: int  # COMPLETE, FAILED, SETTLED, STREAM_LOST, STREAM_UP, LEAF, PROGRESS or WRITTEN
    status: int  # 0 or one of c/pccl_core.h's negative error numbers
    op: int  # number of the op, except for STREAM_LOST and STREAM_UP
    # STREAM_LOST, STREAM_UP: number of the stream. FAILED: the stream that `text` describes, or 0.
    stream: int
    settled: bool  # COMPLETE: whether the op has settled, so that it needs no COMMIT
    tx_bytes: int  # payload bytes sent by the op
    rx_bytes: int  # payload bytes received by the op
    seq: int  # sequence number of the op's last start
    piece: int  # LEAF: number of the piece
    leaf: int  # LEAF: index in the piece
    # PROGRESS: the part of the op that is done, in thousandths. WRITTEN: the number of the window.
    done: int
    text: str  # FAILED, STREAM_LOST: the reason


class Engine:
    """An engine and its thread. Only one thread may use it at a time.

    Attributes:
        port: the TCP port on which it listens.
        ipc: the path of its ipc endpoint; empty if it has none.
        backend: the backend of the function table, `libzmq` or `pyzmq`.
        socket: readable when there are events.
        together: whether commands wait for `flush`, which sends them in one message.
        unsent: the commands that wait for `flush`.
        broken: the error that has stopped the engine; empty if it runs.

    Raises:
        OSError: it cannot listen at that address, or none of the ports is free.
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,  # its settings
        *,
        host: str = "0.0.0.0",  # the address to listen on; "::" for IPv6 and IPv4
        ports: Sequence[int] = (),  # the engine listens on the first free one; empty: on any port
        # called in the engine's thread when an error has stopped the engine
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        options = options or EngineOptions()
        self._backend = tables.load()
        self._engine = _new_engine(self._backend, options)
        self._command = ffi.new("pccl_command *")
        self._command_bytes = ffi.buffer(self._command)
        self._blank = bytes(self._command_bytes)
        self.together = False
        self.unsent: list[bytes] = []
        self._arrays: dict[int, list[Any]] = {}  # op -> arrays that the engine reads until SETTLED
        self._stopped = stopped
        self.broken = ""
        self._closed = False
        self._clock: int | None = None
        self.backend = self._backend.name
        self._directory: Directory | None = None
        self.socket: zmq.Socket[bytes] = None  # type: ignore[assignment]
        context = self._backend.context(lib.pccl_engine_context(self._engine))
        try:
            self.port = self._bind_tcp(host, ports)
            self.ipc = self._bind_ipc()
            self.socket = self._connect_commands(context)
            self._mail = Mail(self.socket)
            self._thread = threading.Thread(target=self._run, name="pccl-engine", daemon=True)
            self._thread.start()
        except (zmq.ZMQError, RuntimeError) as error:  # no descriptor or thread is available
            self._discard()
            raise OSError(getattr(error, "errno", None), str(error)) from None
        except BaseException:
            self._discard()
            raise

    @staticmethod
    def _connect_commands(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
        commands: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            commands.set(option, 0)
        commands.connect(COMMANDS_ENDPOINT)
        return commands

    def _bind_tcp(self, host: str, ports: Sequence[int]) -> int:
        """Listens on the first free one of these ports; if there are none, on any port."""
        bracketed = f"[{host}]" if ":" in host else host
        for port in ports or (0,):
            try:
                bound = self._bind(f"tcp://{bracketed}:{port or '*'}")
            except OSError as error:
                if not ports or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                return int(bound.rpartition(":")[2])
        why = f"cannot listen on any of the ports {ports[0]} to {ports[-1]}: none is free"
        raise OSError(errno.EADDRINUSE, why)

    def _bind(self, endpoint: str) -> str:
        bound = ffi.new("char[]", 256)
        if lib.pccl_engine_bind(self._engine, endpoint.encode(), bound, len(bound)) < 0:
            number = lib.pccl_engine_errno(self._engine)
            raise OSError(number, f"cannot listen on {endpoint}: {os.strerror(number)}")
        return ffi.string(bound).decode()

    def _bind_ipc(self) -> str:
        """Listens on an ipc socket of this user. Returns its path; empty if there is none."""
        if os.name != "posix" or not zmq.has("ipc"):
            return ""
        try:
            self._directory = Directory()
        except OSError as error:
            if out_of_resources(error) is not None:
                raise
            log.warning("peers on this machine are reached over TCP, not ipc: %s", error)
            return ""
        if self._directory.path:
            self._bind(f"ipc://{self._directory.path}")
        return self._directory.path

    def _discard(self) -> None:
        """Releases everything after the constructor has failed."""
        if self.socket is not None:
            self.socket.close()
        self._free()

    def _free(self) -> None:
        lib.pccl_engine_free(self._engine)
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def _run(self) -> None:
        if sys.platform != "win32" and hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            status = lib.pccl_engine_run(self._engine)
        except MemoryError:  # raised by the call itself
            status = lib.PCCL_ENOMEM
        if status < 0:
            number = lib.pccl_engine_errno(self._engine)
            why = "out of memory" if status == lib.PCCL_ENOMEM else os.strerror(number).lower()
            self.broken = f"the lane engine stopped: errno {number}, {why}"
            log.error("%s", self.broken)
            self._stopped()

    @property
    def dropped(self) -> int:
        """Number of messages dropped as stale, foreign or malformed."""
        return int(lib.pccl_engine_dropped(self._engine)) if not self._closed else 0

    def cpu_s(self) -> float:
        """The processor time of the engine's thread so far; below 0 if it is unknown."""
        if self._clock is None:
            return -1.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return -1.0

    # ---- commands ----

    def _send(self, kind: int, op: int = 0, **members: Any) -> None:
        """Sends a command with these members, whose values are as cffi takes them."""
        self._command_bytes[:] = self._blank
        self._command.kind, self._command.op = kind, op
        for name, value in members.items():
            setattr(self._command, name, value)
        self.unsent.append(bytes(self._command_bytes))
        if not self.together:
            self.flush()

    def flush(self) -> bool:
        """Sends the commands that wait. Returns whether there are events now."""
        unsent, self.unsent = self.unsent, []
        if not unsent or self._closed:
            return False
        return self._mail.send(b"".join(unsent))

    def open_stream(self, stream: int) -> None:
        """Opens a stream, so that ops can start on it. Its number must be new."""
        self._send(lib.PCCL_OPEN_STREAM, stream=stream)

    def connect_stream(
        self,
        stream: int,  # its number
        endpoint: str,  # tcp://address:port, with a numeric address, or ipc://path
        *,
        lanes: int,  # number of connections; 0: chosen from the round trip
        hwm: int,  # messages queued for each connection, at least 1
        shares: int = 1,  # the streams that send at the same time: they need fewer connections each
        peer: int = 0,  # the neighbor's number
        nonce: int = 0,  # the epoch's nonce, which a neighbor without keys checks
        curve_server: str = "",  # the neighbor's public key, if this engine has keys
        # `address:port` of the rendezvous point that the neighbor connects to as well; empty: the
        # neighbor listens at the endpoint
        via: str = "",
    ) -> None:
        """Connects an open stream `lanes` times to a neighbor's engine.

        If STREAM_UP does not follow in time, the caller must abandon the stream (`lose_stream`).
        Raises ValueError: the endpoint is too long.
        """
        encoded = endpoint.encode()
        if len(encoded) >= lib.PCCL_ENDPOINT_MAX:
            raise ValueError(f"the endpoint {endpoint!r} is too long")
        self._send(
            lib.PCCL_CONNECT_STREAM,
            stream=stream,
            lanes=lanes,
            hwm=hwm,
            shares=shares,
            endpoint=encoded,
            peer=peer,
            nonce=nonce,
            curve_server=curve_server.encode(),
            via=via.encode(),
        )

    def meet(self, endpoint: str, via: str, lanes: int) -> None:
        """Connects to a sender at a rendezvous point, because it cannot connect to this engine.

        `endpoint` and `lanes` are as in the sender's `connect_stream`; `via` is the `address:port`
        of the rendezvous point.
        """
        self._send(lib.PCCL_MEET, endpoint=endpoint.encode(), via=via.encode(), lanes=lanes)

    def close_stream(self, stream: int) -> None:
        """Closes a stream: queued messages are dropped, and ops that use it fail."""
        self._send(lib.PCCL_CLOSE_STREAM, stream=stream)

    def expect(self, peer: int, nonce: int, keys: Iterable[str]) -> None:
        """Sets who may connect, and decides on waiting connections.

        `peer` is this peer's number, and `keys` are the members' public keys, if this engine has
        keys. The nonce is that of the epoch; the nonce of the previous call remains valid.
        """
        self._send(lib.PCCL_EXPECT, peer=peer, nonce=nonce)
        for key in keys:
            self.admit(key)

    def admit(self, key: str) -> None:
        """Lets the owner of this public key connect, until the next `expect`."""
        self._send(lib.PCCL_ADMIT, curve_server=key.encode())

    def lose_stream(self, stream: int, why: str) -> None:
        """Closes a stream that does not connect; STREAM_LOST follows, with `why`."""
        text = why.encode()[: lib.PCCL_TEXT_MAX - 1]
        self._send(lib.PCCL_LOSE_STREAM, stream=stream, endpoint=text)

    def register_collective(
        self,
        op: int,  # a new number
        *,
        what: CollectiveKind,  # which collective
        redop: int,  # the operation, a pccl.ReduceOp value
        members: int,  # number of slices in the larger buffers of reduce_scatter and all_gather
        parts: Sequence[Part],  # the arrays, which complete or fail together
        format: int = 0,  # the format for quantization, a pccl_format; 0: none
        # all_gather with slices that differ: the number of rows in the slice of each rank. The
        # `count` of a part is then the number of elements in a row.
        rows: Sequence[int] = (),
        # for an all_reduce whose input is filled while it runs (`ready`), the length of a window in
        # offsets; a WRITTEN event follows for each window. 0: the input is complete
        window: int = 0,
        **ids: Unpack[Ids],
    ) -> None:
        """Registers a collective. The buffers belong to the engine until the op is settled."""
        self._send(
            lib.PCCL_REGISTER,
            op,
            op_kind=lib.PCCL_COLLECTIVE,
            collective=COLLECTIVES[what],
            redop=redop,
            format=format,
            members=members,
            parts=self._keep(op, _parts(parts)),
            n_parts=len(parts),
            recv_rows=self._keep(op, ffi.new("uint64_t[]", list(rows))) if rows else ffi.NULL,
            window=window,
            **ids,
        )

    def register_exchange(
        self,
        op: int,
        *,
        members: int,  # number of members
        parts: Sequence[Part],  # the arrays; `count` is the number of elements in a row
        # the number of rows for each rank, and from each rank; empty: none
        rows: tuple[Sequence[int], Sequence[int]],
        **ids: Unpack[Ids],
    ) -> None:
        """Registers an exchange. Other arguments are as in register_collective."""
        sends, recvs = (self._keep(op, ffi.new("uint64_t[]", one or [0] * members)) for one in rows)
        self._send(
            lib.PCCL_REGISTER,
            op,
            op_kind=lib.PCCL_EXCHANGE,
            members=members,
            parts=self._keep(op, _parts(parts)),
            n_parts=len(parts),
            send_rows=sends,
            recv_rows=recvs,
            **ids,
        )

    def register_serve(
        self,
        op: int,
        *,
        pieces: Sequence[tuple[int, int, int]],  # (number, address, bytes) of each
        first_counted: int = 0,  # pieces with lower numbers do not count in tx_bytes and rx_bytes
        limit: int = 0,  # bytes that may be sent before the first `allow`; 0: no limit
        **ids: Unpack[Ids],
    ) -> None:
        """Registers an op that answers requests for the bytes of `pieces`."""
        held = self._pieces(op, pieces, first_counted)
        self._send(lib.PCCL_REGISTER, op, op_kind=lib.PCCL_SERVE, limit=limit, **held, **ids)

    def register_fetch(
        self,
        op: int,
        *,
        pieces: Sequence[tuple[int, int, int]],
        first_counted: int = 0,
        leaf_bytes: int = 0,
        **ids: Unpack[Ids],
    ) -> None:
        """Registers an op that fetches the bytes of `pieces`. Arguments are as in register_serve.

        With `leaf_bytes`, each leaf of that size emits a LEAF event and waits for `verified`.
        """
        held, fetch = self._pieces(op, pieces, first_counted), lib.PCCL_FETCH
        self._send(lib.PCCL_REGISTER, op, op_kind=fetch, leaf_bytes=leaf_bytes, **held, **ids)

    def _pieces(
        self, op: int, pieces: Sequence[tuple[int, int, int]], first_counted: int
    ) -> dict[str, Any]:
        array = self._keep(op, ffi.new("pccl_piece[]", len(pieces)))
        for slot, (number, address, nbytes) in zip(array, sorted(pieces), strict=True):
            slot.piece, slot.data, slot.bytes = number, ffi.cast("void *", address), nbytes
            slot.uncounted = number < first_counted
        return {"pieces": array, "n_pieces": len(pieces)}

    def _keep(self, op: int, array: Any) -> Any:
        """Keeps an array alive until the op is settled, because the engine reads it."""
        self._arrays.setdefault(op, []).append(array)
        return array

    def start(self, start: StartOp) -> None:
        """Starts a registered collective, on at most PCCL_RINGS_MAX rings."""
        direct, way = start.direct, self._way(start, start.calls)
        if any(direct):
            way["direct"] = self._keep(start.op, ffi.new("uint32_t[]", direct))
        self._send(lib.PCCL_START, start.op, seq=start.seq, nonce=start.nonce, **way)

    def start_eagerly(self, eager: EagerOp) -> None:
        """Lets a registered collective send before its start."""
        self._send(lib.PCCL_EAGER, eager.op, **self._way(eager, ()))

    def _way(self, one: StartOp | EagerOp, calls: Sequence[int]) -> dict[str, Any]:
        rings = [
            {
                "stream": ring.stream,
                "members": ring.members,
                "position": ring.position,
                "root": ring.root,
                "ranks": self._keep(one.op, ffi.new("uint16_t[]", ring.ranks))
                if ring.ranks
                else ffi.NULL,
                "begin": ring.begin,
                "count": ring.count,
                "call": call,
            }
            for ring, call in zip(one.rings, calls or [0] * len(one.rings), strict=True)
        ]
        algorithm = _ALGORITHMS.get(one.algorithm, lib.PCCL_RING)
        return {
            "rings": rings,
            "n_rings": len(rings),
            "chunk_bytes": one.chunk_bytes,
            "algorithm": algorithm,
        }

    def start_transfer(self, start: StartTransfer) -> None:
        """Starts a registered op that serves or fetches."""
        limit = lib.PCCL_ENDS_MAX
        for first in range(0, max(len(start.ends), 1), limit):
            some = start.ends[first : first + limit]
            self._send(
                lib.PCCL_START,
                start.op,
                seq=start.seq,
                nonce=start.nonce,
                chunk_bytes=start.chunk_bytes,
                ends=[{"stream": end.stream, "slot": end.slot} for end in some],
                n_ends=len(some),
            )

    def verified(self, op: int, piece: int, leaf: int, good: bool) -> None:
        """Reports whether an arrived leaf is correct. If not, it is fetched again."""
        self._send(lib.PCCL_VERIFIED, op, piece=piece, leaf=leaf, good=good)

    def remind(self, op: int, limit: int) -> None:
        """Lets a fetch repeat its late requests. Must be called twice a second.

        After `limit` calls in a row without an answer, FAILED with STARVED follows.
        """
        self._send(lib.PCCL_REMIND, op, limit=limit)

    def allow(self, op: int, nbytes: int) -> None:
        """Lets a serving op with a limit send about `nbytes` more."""
        self._send(lib.PCCL_ALLOW, op, limit=nbytes)

    def ready(self, op: int, offset: int, length: int) -> None:
        """Reports that a windowed collective has `length` offsets of input from `offset` on."""
        self._send(lib.PCCL_READY, op, offset=offset, length=length)

    def query(self, op: int) -> None:
        """Asks for the progress of an op. PROGRESS follows if it runs: started and not complete."""
        self._send(lib.PCCL_QUERY, op)

    def commit(self, op: int) -> None:
        """Keeps the result of an op. The engine uses its memory until SETTLED."""
        self._send(lib.PCCL_COMMIT, op)

    def abort(self, op: int) -> None:
        """Ends an op and restores memory that it has overwritten in place. SETTLED follows."""
        self._send(lib.PCCL_ABORT, op)

    # ---- events ----

    def events(self) -> list[Event]:
        """Takes all events so far, in order. After `close` there are none."""
        found: list[Event] = []
        for data in () if self._closed else self._mail.take():
            kind, status, op, stream, settled, *rest, text = EVENT.unpack(data)
            if kind == SETTLED or settled:
                self._arrays.pop(op, None)
            text = text.partition(b"\0")[0].decode(errors="replace") if status else ""
            found.append(Event._make([kind, status, op, stream, bool(settled), *rest, text]))
        return found

    def close(self) -> None:
        """Stops the thread, restores memory that unsettled ops have overwritten, and frees the
        engine. Further calls do nothing."""
        if self._closed:
            return
        self._send(lib.PCCL_STOP)
        self.flush()
        self._closed = True
        self._thread.join()
        self.socket.close()
        self._free()
        self._arrays.clear()


def _parts(parts: Sequence[Part]) -> Any:
    array = ffi.new("pccl_part[]", len(parts))
    ffi.buffer(array)[:] = b"".join(
        [PART.pack(part.send, part.recv, part.count, part.dtype, part.error) for part in parts]
    )
    return array


def _new_engine(backend: tables.Backend, options: EngineOptions) -> Any:
    """Creates a C engine on that backend.

    Raises:
        ValueError: an option is out of range.
        OSError: ZeroMQ cannot create the sockets: there are no descriptors left.
        MemoryError: there is not enough memory.
    """
    error = ffi.new("int *")
    settings = ffi.new("pccl_options *")
    for name in EngineOptions.__slots__:
        setattr(settings, name, getattr(options, name))
    engine = lib.pccl_engine_new(backend.table, settings, error)
    if engine != ffi.NULL:
        return engine
    if error[0] == lib.PCCL_EINVAL:
        raise ValueError(f"an engine cannot work with {options}")
    if error[0] == lib.PCCL_ENOMEM:
        raise MemoryError("no memory for a lane engine")
    raise OSError(errno.EMFILE, "ZeroMQ cannot make the sockets of a lane engine")


# ---- the directory of the ipc socket ----

PREFIX = "pccl-ipc-"
LOCK, SOCKET = "lock", "e"  # short names, because sun_path limits the length of the path
_PATH_MAX = 100  # bytes; sun_path holds 104 on macOS


class Directory:
    """A new directory for the ipc socket, locked until `remove`.

    Raises OSError: the directory cannot be made.
    """

    def __init__(self) -> None:
        _remove_orphans()
        while (made := _make()) is None:
            pass
        self._directory, self._lock = made
        path = str(self._directory / SOCKET)
        # the path of the socket; empty if it would be too long
        self.path = path if len(os.fsencode(path)) <= _PATH_MAX else ""

    def remove(self) -> None:
        """Removes the directory and the socket in it. Must be called once."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()


def _make() -> tuple[Path, FileLock] | None:
    """A new directory and its lock. None if another process took the directory for an orphan: that
    process may lock the file between its creation and its locking here.
    """
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        lock = FileLock(directory / LOCK)
    except Taken:
        return None
    except FileNotFoundError:
        if directory.exists():
            raise
        return None
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if not (directory / LOCK).exists():
        lock.close()
        return None
    return directory, lock


def _remove_orphans() -> None:
    """Removes the directories of this user's killed processes, as far as possible."""
    with contextlib.suppress(OSError):
        with os.scandir(tempfile.gettempdir()) as entries:
            for entry in entries:
                if not entry.name.startswith(PREFIX):
                    continue
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    _remove_if_orphaned(Path(entry.path))


def _remove_if_orphaned(directory: Path) -> None:
    if not (directory / LOCK).exists():
        return  # it is being created
    with contextlib.suppress(OSError, Taken):
        lock = FileLock(directory / LOCK)
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
