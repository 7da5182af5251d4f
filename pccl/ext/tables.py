"""The engine's function table: every ZeroMQ function that the C core calls.

Two backends can fill it. `libzmq` takes the functions of the libzmq that pyzmq has loaded, so no
Python runs per message. `pyzmq` calls back into pyzmq's sockets; it is for platforms where libzmq's
symbols are hidden, as in the Windows wheels, which link libzmq statically. PCCL_ENGINE=libzmq or
pyzmq chooses a backend; the default, auto, chooses libzmq if it is available.

No libzmq is loaded by name, because that could be another copy, and a socket belongs to one copy.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import zmq

from pccl.ext import address_of, ffi, lib

COPY_MAX = 8192
"""Received messages up to this many bytes are copied; larger ones stay in pyzmq's frame."""


@dataclass(frozen=True, slots=True)
class Backend:
    name: str  # `libzmq` or `pyzmq`
    reason: str  # why the backend is not libzmq; empty if it is
    table: Any  # the `pccl_zmq *`, which must outlive all engines that use it

    def context(self, pointer: Any) -> zmq.Context[zmq.Socket[bytes]]:
        """A pyzmq context for an engine's context, only to create sockets in it."""
        address = address_of(pointer)
        if self.name == "pyzmq":
            context: zmq.Context[zmq.Socket[bytes]] = _objects[address]
            return context
        return zmq.Context.shadow(address)


@functools.cache
def load(choice: str = "") -> Backend:
    """The backend to use.

    Args:
        choice: `libzmq`, `pyzmq` or `auto`; empty: the value of PCCL_ENGINE, else `auto`.

    Raises:
        ValueError: the choice is none of these.
        ImportError: the choice is `libzmq`, which is not available.
    """
    choice = choice or os.environ.get("PCCL_ENGINE", "auto")
    if choice not in ("auto", "libzmq", "pyzmq"):
        raise ValueError(f"PCCL_ENGINE is {choice!r}: it can be libzmq, pyzmq or auto")
    if choice == "pyzmq":
        return Backend("pyzmq", "chosen by PCCL_ENGINE", _fill_from_pyzmq())
    try:
        return Backend("libzmq", "", _fill_from_libzmq())
    except (OSError, AttributeError, RuntimeError) as error:
        if choice == "libzmq":
            raise ImportError(f"libzmq's functions are out of reach: {error}") from error
        return Backend("pyzmq", str(error), _fill_from_pyzmq())


# ---- libzmq ----


def _fill_from_libzmq() -> Any:
    """Fills a table with libzmq's own functions, and tries it out. Raises what `load` catches."""
    library = _find_library()
    version = (ctypes.c_int * 3)()
    library.zmq_version(*(ctypes.byref(version, i * 4) for i in range(3)))
    if ".".join(map(str, version)) != zmq.zmq_version():
        raise RuntimeError(f"found libzmq {list(version)}, but pyzmq uses {zmq.zmq_version()}")
    table = ffi.new("pccl_zmq *")
    for name, field in ffi.typeof("pccl_zmq").fields:
        function = getattr(library, "zmq_" + name.rstrip("_"))
        address = ctypes.cast(function, ctypes.c_void_p).value
        setattr(table, name, ffi.cast(field.type, address))
    _try_out(table)
    return table


def _find_library() -> ctypes.CDLL:
    """The extension module of pyzmq's backend, through which libzmq's symbols can be looked up."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if name.startswith("zmq.backend.") and path.endswith(tuple(EXTENSION_SUFFIXES)):
            library = ctypes.CDLL(path)
            if hasattr(library, "zmq_msg_init_data"):
                return library
    raise RuntimeError("pyzmq's extension module does not show libzmq's functions")


def _try_out(table: Any) -> None:
    """Sends one message through the table. Raises RuntimeError: it did not arrive."""
    context, message = table.ctx_new(), ffi.new("pccl_msg *")
    sockets = [table.socket(context, zmq.PAIR) for _ in range(2)] if context else [ffi.NULL]
    try:
        if not all(sockets) or table.msg_init_size(message, 100):
            why = os.strerror(table.errno_())  # descriptors, more often than memory
            raise MemoryError(f"libzmq provides no socket or message: {why}")
        endpoint = b"inproc://pccl-try-out"
        failed = table.bind(sockets[0], endpoint) or table.connect(sockets[1], endpoint)
        ffi.memmove(table.msg_data(message), b"x" * 100, 100)
        sent = table.msg_send(message, sockets[0], zmq.DONTWAIT)
        table.msg_init(message)
        received = table.msg_recv(message, sockets[1], zmq.DONTWAIT)
        arrived = bytes(ffi.buffer(table.msg_data(message), table.msg_size(message)))
        table.msg_close(message)
    finally:
        for socket in filter(None, sockets):
            table.close(socket)
        if context:
            table.ctx_term(context)
    if failed or sent != 100 or received != 100 or arrived != b"x" * 100:
        raise RuntimeError("a message sent through libzmq's functions did not arrive")


# ---- pyzmq ----

# The objects behind the handles that C holds: contexts, sockets, and received frames whose bytes C
# still reads. Engines of several threads share this dict; each access is one atomic operation.
_objects: dict[int, Any] = {}
_handles = itertools.count(1)
_last_error = threading.local()
_plain = ffi.new("pccl_zmq *")
lib.pccl_plain_fill(_plain)


def _fill_from_pyzmq() -> Any:
    table = ffi.new("pccl_zmq *")
    lib.pccl_plain_fill(table)
    for name in _CALLBACKS:
        setattr(table, name, getattr(lib, f"pccl_py_{name}"))
    return table


def _register(thing: object) -> Any:
    handle = next(_handles)
    _objects[handle] = thing
    return ffi.cast("void *", handle)


def _find(handle: Any) -> Any:
    return _objects[address_of(handle)]


_CALLBACKS: list[str] = []


def _callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function the pccl_py_ callback of its name, which returns 0 to C if it returns None.

    A ZMQError sets errno and returns a failure to C. Any other exception is a bug: cffi prints it,
    and C gets the failure.
    """
    name = function.__name__.removeprefix("_")
    failure = ffi.NULL if name in ("ctx_new", "socket") else -1

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        _last_error.value = errno.EFAULT
        try:
            found = function(*arguments)
        except zmq.ZMQError as error:
            _last_error.value = error.errno
            return failure
        return 0 if found is None else found

    ffi.def_extern(name=f"pccl_py_{name}", error=failure)(call)
    _CALLBACKS.append(name)
    return call


@_callback
def _ctx_new() -> Any:
    return _register(zmq.Context())


@_callback
def _ctx_set(context: Any, option: int, value: int) -> None:
    _find(context).set(option, value)


@_callback
def _ctx_term(context: Any) -> None:
    _find(context).term()
    del _objects[address_of(context)]


@_callback
def _socket(context: Any, kind: int) -> Any:
    return _register(_find(context).socket(kind))


@_callback
def _close(socket: Any) -> None:
    _objects.pop(address_of(socket)).close()


_TEXT_OPTIONS = {
    zmq.PLAIN_USERNAME,
    zmq.PLAIN_PASSWORD,
    zmq.CURVE_PUBLICKEY,
    zmq.CURVE_SECRETKEY,
    zmq.CURVE_SERVERKEY,
    zmq.ZAP_DOMAIN,
}


@_callback
def _setsockopt(socket: Any, option: int, value: Any, size: int) -> None:
    data = ffi.buffer(value, size)[:]
    number = int.from_bytes(data, sys.byteorder, signed=True)
    _find(socket).setsockopt(option, data if option in _TEXT_OPTIONS else number)


@_callback
def _getsockopt(socket: Any, option: int, value: Any, size: Any) -> None:
    got = _find(socket).getsockopt(option)
    if isinstance(got, int):
        got = got.to_bytes(size[0], sys.byteorder, signed=True)
    if len(got) > size[0]:
        raise zmq.ZMQError(errno.EINVAL)
    ffi.memmove(value, got, len(got))
    size[0] = len(got)


@_callback
def _bind(socket: Any, endpoint: Any) -> None:
    _find(socket).bind(ffi.string(endpoint).decode())


@_callback
def _connect(socket: Any, endpoint: Any) -> None:
    _find(socket).connect(ffi.string(endpoint).decode())


@_callback
def _socket_monitor(socket: Any, endpoint: Any, events: int) -> None:
    address = None if endpoint == ffi.NULL else ffi.string(endpoint).decode()
    _find(socket).monitor(address, events)


@_callback
def _poll(items: Any, n: int, timeout_ms: int) -> int:
    ready = dict(zmq.zmq_poll([(items[i].fd, items[i].events) for i in range(n)], timeout_ms))
    for i in range(n):
        items[i].revents = ready.get(items[i].fd, 0)
    return len(ready)


@_callback
def _msg_send(message: Any, socket: Any, flags: int) -> int:
    size = int(_plain.msg_size(message))
    _find(socket).send(ffi.buffer(_plain.msg_data(message), size), flags, copy=True)
    _plain.msg_close(message)
    return size


@_callback
def _msg_recv(message: Any, socket: Any, flags: int) -> int:
    frame = _find(socket).recv(flags, copy=False)
    size = len(frame)
    _plain.msg_close(message)
    if size <= COPY_MAX:
        if _plain.msg_init_size(message, size) < 0:
            raise zmq.ZMQError(errno.ENOMEM)
        ffi.memmove(_plain.msg_data(message), frame.buffer, size)
    else:
        data = ffi.from_buffer("char[]", frame.buffer)
        handle = _register((frame, data))
        _plain.msg_init_data(message, data, size, lib.pccl_py_release, handle)
    lib.pccl_plain_set_more(message, frame.more)
    return size


@ffi.def_extern(name="pccl_py_release")
def _release(data: Any, handle: Any) -> None:
    del _objects[address_of(handle)]


@ffi.def_extern(name="pccl_py_errno_", error=errno.EFAULT)
def _errno() -> int:
    value: int = _last_error.value
    return value


_CALLBACKS.append("errno_")
