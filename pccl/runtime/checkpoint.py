"""Shared state in a file, in the safetensors format.

A file holds the length of its header (8 bytes, little-endian), the header (JSON: element type,
shape and place of each entry) and the bytes of all entries without gaps, so every reader of
safetensors (https://huggingface.co/docs/safetensors) can open it. The header's metadata adds what a
run needs to resume: the revision, and a digest of each entry to detect corruption.

A file is written under a temporary name and renamed once it is on disk. So a crash leaves either
the old file or the new one. Loading checks the whole file before it overwrites any memory.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pccl.ext import address_of, ffi
from pccl.runtime.digest import digest
from pccl.tensors import Buffer
from pccl.types import DataType

METADATA = "__metadata__"  # a name that no entry can have
_HEADER_BYTES_MAX = 100 << 20  # the limit of other readers of the format


def _code(dtype: DataType) -> str:
    """The format's name for an element type, such as BF16."""
    name = dtype.common_name.upper()
    return name.replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    memory: Buffer

    def header(self, begin: int) -> dict[str, object]:
        offsets = [begin, begin + self.memory.nbytes]
        return {"dtype": _code(self.memory.dtype), "shape": self.shape, "data_offsets": offsets}


def save(path: str | os.PathLike[str], entries: Sequence[Entry], revision: int) -> None:
    """Writes a file; on failure an existing one stays unchanged.

    Raises:
        OSError: the file cannot be written.
        ValueError: an entry is named __metadata__.
    """
    header = _header(entries, revision)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for entry in entries:
            address = ffi.cast("char *", entry.memory.address)
            file.write(ffi.buffer(address, entry.memory.nbytes))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that replaces the one at `path` when its content is on disk.

    If the body raises, or the process dies meanwhile, the old file stays. Raises OSError: the file
    cannot be written; this replaces the RuntimeError that torch.save raises in that case.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        lacking = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(lacking, OSError) and lacking.filename is None:
            raise OSError(lacking.errno, lacking.strerror, str(path)) from error
        raise
    sync_directory(path.parent)


def load(path: str | os.PathLike[str], entries: Sequence[Entry]) -> int:
    """Fills the entries' memory from a file and returns its revision; all or nothing.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or has other entries; the memory is unchanged.
    """
    with open(path, "rb") as file, _mapped(file) as data:
        try:
            header, begin = _read_header(data)
            metadata = header.pop(METADATA, {})
            places = _places(header, entries, len(data) - begin)
            revision = int(metadata["revision"])
            if not 0 <= revision < 1 << 64:
                raise ValueError(f"its revision is {revision}")
            digests = dict(json.loads(metadata["digests"]))
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{path} is not a shared state that was saved here") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        with ffi.from_buffer("char[]", data) as source:
            base = address_of(source) + begin
            for entry, place in zip(entries, places, strict=True):
                if digest(base + place, entry.memory.nbytes).hex() != digests.get(entry.name):
                    raise ValueError(f"{path} is damaged: {entry.name!r} is not what was saved")
            for entry, place in zip(entries, places, strict=True):
                target = ffi.cast("char *", entry.memory.address)
                ffi.memmove(target, ffi.cast("char *", base + place), entry.memory.nbytes)
    return revision


def _mapped(file: BinaryIO) -> mmap.mmap:
    if os.fstat(file.fileno()).st_size < 8:  # an empty file cannot be mapped
        raise ValueError(f"{file.name} is truncated, or not a safetensors file")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header(entries: Sequence[Entry], revision: int) -> bytes:
    digests = {name: digest(memory.address, memory.nbytes).hex() for name, _, memory in entries}
    header: dict[str, object] = {
        METADATA: {"format": "pccl", "revision": str(revision), "digests": json.dumps(digests)}
    }
    begin = 0
    for entry in entries:
        if entry.name in header:
            raise ValueError(f"a file cannot hold an entry named {entry.name}")
        header[entry.name] = entry.header(begin)
        begin += entry.memory.nbytes
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)  # so that the data is aligned


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header and where the data begins."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(len(data) - 8, _HEADER_BYTES_MAX):
        raise ValueError("it is truncated, or not a safetensors file")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise TypeError
    return header, 8 + size


def _places(header: Mapping[str, Any], entries: Sequence[Entry], size: int) -> list[int]:
    """The offset of each entry in the data; raises ValueError for the first wrong entry.

    The data has `size` bytes.
    """
    places = []
    for entry in entries:
        if entry.name not in header:
            raise ValueError(f"it has no entry {entry.name!r}")
        found = header[entry.name]
        begin, end = map(operator.index, found["data_offsets"])
        wanted = entry.header(begin)
        if found["dtype"] != wanted["dtype"] or end - begin != entry.memory.nbytes:
            raise ValueError(
                f"entry {entry.name!r} is {found['dtype']} {found['shape']} there and "
                f"{wanted['dtype']} {list(entry.shape)} here"
            )
        if not 0 <= begin <= end <= size:
            raise ValueError(f"it is truncated: entry {entry.name!r} ends at {end} of {size} bytes")
        places.append(begin)
    if len(header) > len(entries):
        more = next(iter(header.keys() - {entry.name for entry in entries}))
        raise ValueError(f"it has an entry {more!r} that is not wanted here")
    return places


def sync_directory(directory: Path) -> None:
    """Makes a rename survive a crash of the machine, if directories can be opened."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
