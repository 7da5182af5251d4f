"""The shared state: named memory that all peers of a group hold bit-identically.

`Communicator.sync_shared_state` synchronizes it; `save` and `load` write and read a file.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from pccl.errors import ArgumentError, error_for, not_picklable
from pccl.membership import Membership
from pccl.protocol import messages as m
from pccl.protocol.peer import effects
from pccl.runtime import checkpoint
from pccl.runtime.client.call import Deadline, error_of
from pccl.runtime.client.client import PeerClient
from pccl.runtime.client.memory import HostView
from pccl.runtime.client.sync import Synchronization
from pccl.runtime.digest import digests, root_digest
from pccl.support import require, whole
from pccl.tensors import (
    Array,
    Buffer,
    Exporter,
    in_c_order,
    is_numpy,
    is_torch,
    like,
    native,
    put_back,
)
from pccl.types import (
    DataType,
    DeviceType,
    EntryDivergence,
    Result,
    SharedStateProgress,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

log = logging.getLogger("pccl")


class TensorInfo:
    """One entry of the shared state: a name and memory.

    Args:
        name: the same on all peers; at most 256 characters.
        data_ptr: address of the first element; may be 0 if there is none.
        numel: elements.
        dtype: type of an element.
        device_type: where the memory is. Each use copies CUDA memory (of the current device, for an
            address) to pinned host memory, and back if it has changed.
        allow_content_inequality: whether peers may differ in this entry. If so, peers do not
            compare it, and only newcomers and peers with a lower revision receive it.

    Attributes:
        shape: of the array, or (numel,) for an address; only files use it.

    Raises:
        ValueError: elements at address 0, a negative count, or a name that is empty or too long.
    """

    def __init__(
        self,
        name: str,
        data_ptr: int,
        *,
        numel: int,
        dtype: DataType,
        device_type: DeviceType,
        allow_content_inequality: bool,
    ) -> None:
        if not 0 < len(name) <= m.NAME_CHARS_MAX:
            raise ValueError(f"a name has 1 to {m.NAME_CHARS_MAX} characters, not {len(name)}")
        try:
            self._buffer = Buffer.at(data_ptr, numel, dtype, None, device_type)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        self.name = name
        self.shape: tuple[int, ...] = (numel,)
        self._array: Any = None  # the given array
        self._is_copy = False  # because the given one is read-only
        self._torn = False
        self.allow_content_inequality = allow_content_inequality

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._buffer.address

    @property
    def numel(self) -> int:
        """Elements."""
        return self._buffer.count

    @property
    def dtype(self) -> DataType:
        """Type of an element."""
        return self._buffer.dtype

    @property
    def device_type(self) -> DeviceType:
        """The device that holds the memory."""
        return self._buffer.device_type

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._buffer.nbytes

    @property
    def _layout(self) -> str:
        return "" if self._buffer.layout is None else str(self._buffer.layout)

    @classmethod
    def from_torch(
        cls, tensor: torch.Tensor, name: str, *, allow_content_inequality: bool = False
    ) -> TensorInfo:
        """An entry for a torch tensor, which it keeps alive.

        Raises:
            ValueError: not a torch tensor, a DTensor, or of an unsupported element type; or its
                elements are not contiguous in memory.
            UnsupportedError: it is neither in host memory nor on a CUDA device.
        """
        if not is_torch(tensor):
            raise ValueError(f"{name!r}: {type(tensor).__name__} is not a torch.Tensor")
        return cls._from_array(tensor, name, allow_content_inequality)

    @classmethod
    def from_numpy(
        cls, tensor: np.ndarray[Any, Any], name: str, *, allow_content_inequality: bool = False
    ) -> TensorInfo:
        """An entry for a numpy array, which it keeps alive.

        Raises:
            ValueError: not a numpy array, read-only, or of an unsupported element type; or its
                elements are not contiguous in memory.
        """
        if not is_numpy(tensor):
            raise ValueError(f"{name!r}: {type(tensor).__name__} is not a numpy.ndarray")
        return cls._from_array(tensor, name, allow_content_inequality)

    @classmethod
    def _from_array(cls, array: Any, name: str, allow_content_inequality: bool) -> TensorInfo:
        try:
            seen, is_copy = native(array, written=True)
            buffer = Buffer.of(seen, writable=True)
        except ValueError as error:
            raise type(error)(f"{name!r}: {error}") from None
        made = cls(
            name,
            buffer.address,
            numel=buffer.count,
            dtype=buffer.dtype,
            device_type=buffer.device_type,
            allow_content_inequality=allow_content_inequality,
        )
        made._buffer = buffer  # with the owner
        made.shape = tuple(seen.shape)
        made._array, made._is_copy = array, is_copy
        return made

    @property
    def array(self) -> Any:
        """The given array, or a new one with the current content if it is read-only.

        None if only an address was given.
        """
        return like(self._array, self._buffer.owner) if self._is_copy else self._array

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self, "it is memory of this process; SharedState.save() writes a file")

    def __repr__(self) -> str:
        return f"TensorInfo({self.name!r}, {self.numel} x {self.dtype.name})"


class SharedState:
    """An ordered list of entries and the revision of their content.

    Args:
        tensor_infos: the entries; names, order, types, sizes and memory orders must be the same on
            all peers.

    Raises:
        ValueError: there are no entries; or two entries have the same name; or the entries do not
            fit in one message to the master (about a hundred thousand do).
    """

    def __init__(self, tensor_infos: Sequence[TensorInfo]) -> None:
        if not tensor_infos:
            raise ArgumentError("a shared state has at least one entry")
        for info in tensor_infos:
            require("an entry of a shared state", info, TensorInfo)
        names = Counter(info.name for info in tensor_infos)
        twice = [name for name, uses in names.items() if uses > 1]
        if twice:
            raise ValueError(f"several entries are named {', '.join(map(repr, twice))}")
        layouts = sum(len(info._layout) for info in tensor_infos)
        nbytes = sum(len(name.encode()) + m.ENTRY_BYTES_MAX for name in names) + layouts
        if nbytes > m.LIST_BYTES_MAX:
            raise ValueError(
                f"{len(names)} entries take {nbytes} bytes of a message to the master, with their "
                f"names: it must be at most {m.LIST_BYTES_MAX}. Make it fewer, larger tensors"
            )
        self.tensor_infos = list(tensor_infos)
        self._module: torch.nn.Module | None = None  # the one with these entries
        self._revision = 0

    @property
    def torn(self) -> bool:
        """True if a failed `sync_shared_state` has overwritten a part of the content.

        This happens only to a peer whose revision was behind. The content is useless until another
        synchronization, or `load`, succeeds: pccl neither offers it to other peers nor saves it.
        """
        return any(info._torn for info in self.tensor_infos)

    def _tear(self, entries: Sequence[int]) -> None:
        for index in entries:
            self.tensor_infos[index]._torn = True

    def _mend(self) -> None:
        for info in self.tensor_infos:
            info._torn = False

    @property
    def revision(self) -> int:
        """The version of the content, an unsigned 64-bit integer; see `push_revision`."""
        return self._revision

    @revision.setter
    def revision(self, value: int) -> None:
        self._revision = whole("revision", value, range(1 << 64), OverflowError)

    def push_revision(self) -> None:
        """Adds 1 to the revision; call it when the content has advanced."""
        self.revision += 1

    def _check(self) -> None:
        """Raises ArgumentError if a tensor has other memory by now."""
        now = {} if self._module is None else self._module.state_dict()
        for info in self.tensor_infos:
            info._buffer.check(info.name, now.get(info.name, info._array))

    def _digest(self) -> bytes:
        """The digest of the content that must be equal on all peers."""
        like = [info for info in self.tensor_infos if not info.allow_content_inequality]
        memory = HostView([info._buffer for info in like]).buffers
        found = digests([(one.address, one.nbytes) for one in memory])
        return root_digest(b"".join(one.root for one in found))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes entries and revision to a file in the safetensors format, atomically.

        In the file, all entries are in C order. When this returns, the file is complete and on
        disk. If it fails, or the process dies meanwhile, the previous file is unchanged.

        Raises:
            OSError: the file cannot be written.
            ValueError: an entry is named __metadata__, the content is `torn`, or a tensor has
                other memory by now.
        """
        self._check()
        if self.torn:
            raise ValueError(
                "the shared state is torn: a sync_shared_state() that failed has overwritten a "
                "part of it. Call it again with peers that hold it, or load()"
            )
        memory = HostView([in_c_order(buffer) for buffer in self._buffers])
        checkpoint.save(path, self._entries(memory), self._revision)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads the entries and the revision from a file written by `save`.

        The highest revision wins the first synchronization of a run, so only one peer needs the
        latest file. The whole file is checked before memory is touched.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged or holds other entries; the message names the first
                difference. Or a tensor has other memory by now. Memory and revision are unchanged.
        """
        self._check()
        ordered = [in_c_order(buffer) for buffer in self._buffers]
        memory = HostView(ordered, range(len(ordered)))
        revision = checkpoint.load(path, self._entries(memory))
        memory.write_back(range(len(ordered)))
        for buffer, copy in zip(self._buffers, ordered, strict=True):
            put_back(buffer, copy)
        self._mend()
        self.revision = revision

    def tensors(self) -> dict[str, Any]:
        """The given arrays, by name.

        A new array of the same library, with the current content, replaces a read-only one.
        """
        return {info.name: info.array for info in self.tensor_infos}

    @property
    def _buffers(self) -> list[Buffer]:
        return [info._buffer for info in self.tensor_infos]

    def _entries(self, memory: HostView) -> list[checkpoint.Entry]:
        each = zip(self.tensor_infos, memory.buffers, strict=True)
        return [checkpoint.Entry(info.name, info.shape, buffer) for info, buffer in each]

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Array] | Mapping[str, Exporter] | Mapping[str, Array | Exporter]
    ) -> SharedState:
        """The shared state of named arrays, in the mapping's order.

        The state copies read-only arrays, such as those of JAX; `tensors` returns their content
        after a synchronization.

        Raises:
            ValueError, UnsupportedError: as for `TensorInfo.from_torch`.
        """
        require("tensors", tensors, Mapping)
        return cls([TensorInfo._from_array(array, name, False) for name, array in tensors.items()])

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> SharedState:
        """The shared state of a module's parameters and persistent buffers, by `state_dict()`.

        Raises:
            ValueError, UnsupportedError: as for `TensorInfo.from_torch`; also if
                the state is not a tensor.
        """
        if not hasattr(module, "state_dict"):
            raise TypeError(f"module is {module!r}, which has no state_dict()")
        made = cls.from_tensors(module.state_dict())
        made._module = module
        return made


# ---- sync_shared_state ----

TORN = (
    "the shared state of this peer is torn, because newer content had begun to arrive: another "
    "sync_shared_state() with peers that hold one, or load(), makes it whole"
)


def sync_shared_state(
    membership: Membership,
    shared_state: SharedState,
    deadline: Deadline,
    strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    strict: bool = False,
    min_peers: int = 1,
    progress: Callable[[SharedStateProgress], None] | None = None,
) -> SharedStateSyncInfo:
    """Makes the shared state of all peers of the group bit-identical; see `Communicator`."""
    client = membership.client("sync_shared_state")
    shared_state._check()
    if shared_state.torn and strategy is SharedStateSyncStrategy.SEND_ONLY:
        raise error_for(Result.INVALID_ARGUMENT, "sync_shared_state", f"SEND_ONLY, but {TORN}")
    entries = tuple(
        m.Entry(i.name, i.dtype.value, i.numel, i.allow_content_inequality, b"", i._layout)
        for i in shared_state.tensor_infos
    )
    state = shared_state.revision, strategy.value, entries, strict, min_peers, shared_state.torn
    call = client.call()
    try:
        membership.calls.enter("sync_shared_state", call)
        view = HostView(shared_state._buffers)

        def tear(entries: Sequence[int]) -> None:  # content on a device changes only at the end
            shared_state._tear([i for i in entries if not view.copied(i)])

        def adopt(synced: effects.Synced, overwritten: Sequence[int]) -> None:
            view.write_back(overwritten)
            shared_state._mend()
            shared_state.revision = membership.revision = synced.revision
            membership.synced = True

        one = Synchronization(
            client,
            call,
            m.Manifest(*state),
            view.buffers,
            (shared_state, view),
            tear,
            adopt,
            progress,
        )
        end = deadline.follow(client, call, one.run())
        membership.calls.leave(call)
    except BaseException as error:
        membership.cancel(client, call)
        _note(error, shared_state)
        raise
    if one.error is not None:
        _note(one.error, shared_state)
        raise one.error
    if isinstance(end, effects.Fail):
        if shared_state.torn:
            end = replace(end, why=f"{end.why}; {TORN}")
        raise error_of("sync_shared_state", end, call.began_s)
    divergence = tuple(_divergence(end, shared_state, client))
    for found in divergence:
        log.warning("content has diverged at revision %d: %s", end.revision, found)
    return SharedStateSyncInfo._found(
        end.tx_bytes,
        end.rx_bytes,
        hashed_bytes=sum(info.nbytes for info in shared_state.tensor_infos),
        hash_seconds=one.hash_seconds,
        divergence=divergence,
    )


def _note(error: BaseException, shared_state: SharedState) -> None:
    if shared_state.torn:
        error.add_note(TORN)


def _divergence(
    synced: effects.Synced, shared_state: SharedState, client: PeerClient
) -> Iterator[EntryDivergence]:
    peers, infos = client.knowledge.plan.names, shared_state.tensor_infos
    for one in synced.divergence:
        for found in one.differences:
            if found.entry < len(infos):
                info, peer = infos[found.entry], peers.get(one.peer, f"peer {one.peer}")
                differ = found.nbytes, found.ulp, found.nans, found.nans_elected
                yield EntryDivergence(peer, info.name, info.nbytes, *differ)
