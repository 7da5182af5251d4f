"""C and Python agree: constants, enumerations, and structs field by field."""

from __future__ import annotations

import ast
import dataclasses
import re
import struct
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import zmq
from oracles import collectives as oracle

from pccl.ext import build, ffi, lib, tables
from pccl.protocol import messages, ring, tuning
from pccl.protocol.messages import Spec
from pccl.protocol.peer.effects import End
from pccl.protocol.ring import RingPlace
from pccl.runtime import digest
from pccl.runtime.client import engine, memory
from pccl.runtime.server import dial
from pccl.types import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

C = Path(__file__).resolve().parents[2] / "c"
HEADER = (C / "pccl_core.h").read_text(encoding="utf-8")
ENUM = re.compile(r"enum (\w+) \{(.*?)\};", re.DOTALL)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def fields(name: str) -> dict[str, Any]:
    """The fields of a C struct, in order."""
    return dict(ffi.typeof(name).fields)


def constants(enum: str) -> dict[str, int]:
    """The constants of an enumeration of pccl_core.h, without the prefix."""
    body = dict(ENUM.findall(COMMENT.sub("", HEADER)))[enum]
    names = re.findall(r"PCCL_(\w+) =", body)
    return {name: getattr(lib, f"PCCL_{name}") for name in names}


def c_names(kind: type[Enum]) -> dict[str, int]:
    """The values of an enumeration of the API by the names that they have in C."""
    short = {"UINT": "U", "INT": "I", "FLOAT": "F", "BFLOAT": "BF", "DOUBLE": "F64"}

    def c_name(name: str) -> str:
        word, digits = re.fullmatch(r"([A-Z]+)(\d*)", name).groups()  # type: ignore[union-attr]
        return "F32" if name == "FLOAT" else short.get(word, word) + digits

    return {c_name(each.name): each.value for each in kind}


def test_every_function_has_its_type() -> None:
    """In the stub that mypy reads: the functions of pccl_core.h, and as many arguments of each."""
    stub = ast.parse((Path(build.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
    (typed,) = [
        node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "_Lib"
    ]
    counts = {
        method.name: len(method.args.args) - 1
        for method in typed.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("pccl_")
    }
    code = COMMENT.sub("", build.declarations())
    declared = re.findall(r"^[a-z].*?\b(pccl_\w+)\(", code, re.MULTILINE)
    assert counts == {name: len(ffi.typeof(getattr(lib, name)).args) for name in declared}


@pytest.mark.parametrize(
    ("enum", "kind"), [("pccl_dtype", DataType), ("pccl_redop", ReduceOp)], ids=str
)
def test_enumerations(enum: str, kind: type[Enum]) -> None:
    known = constants(enum)
    known.pop("I128", known.pop("PCCL_I128", None))  # the engine's own
    assert c_names(kind) == known


def test_element_sizes() -> None:
    for dtype in DataType:
        assert lib.pccl_dtype_size(dtype.value) == dtype.itemsize


def test_every_format_is_asked_for_by_some_algorithm() -> None:
    """And the order in the tests' own oracle is that of C."""
    asked = {
        algorithm: {
            memory.wire_format(Spec("all_reduce", 0, DataType.FLOAT.value, 1, *found))
            for target in DataType
            if (found := quantized(algorithm, target)) is not None
        }
        for algorithm in QuantizationAlgorithm
    }
    assert asked.pop(QuantizationAlgorithm.NONE) == {lib.PCCL_UNQUANTIZED}
    assert all(lib.PCCL_UNQUANTIZED not in formats for formats in asked.values())
    formats = {*constants("pccl_format").values()} - {lib.PCCL_UNQUANTIZED}
    assert sorted(code for each in asked.values() for code in each) == sorted(formats)


def quantized(algorithm: QuantizationAlgorithm, target: DataType) -> tuple[int, int] | None:
    """A Spec's numbers for an algorithm that can make elements of this type."""
    try:
        options = QuantizationOptions(target, algorithm)
        return memory.fingerprint(options, DataType.FLOAT, ReduceOp.SUM)
    except ValueError:
        return None


def test_collectives_go_by_their_names() -> None:
    named = {name.upper(): value for name, value in engine.COLLECTIVES.items()}
    assert named.pop("BARRIER") == lib.PCCL_ALL_REDUCE
    assert named == constants("pccl_collective")


def test_limits() -> None:
    assert messages.PARTS_MAX == lib.PCCL_PARTS_MAX
    assert messages.RINGS_MAX == lib.PCCL_RINGS_MAX
    assert messages.MEMBERS_MAX == lib.PCCL_PEERS_MAX
    assert ring.ALIGNMENT == oracle.ALIGNMENT == lib.PCCL_ALIGNMENT
    assert tuning.chunk_bytes(1 << 40, 2, True, False) == lib.PCCL_CHUNK_MAX
    assert digest.LEAF_BYTES % lib.PCCL_CHUNK_MAX == 0, "a leaf is whole messages"


def test_texts_that_both_know() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (C / "engine").glob("*.c"))
    assert f'"{engine.COMMANDS_ENDPOINT}"' in sources
    assert f'DIALLER[] = "{dial.NAME}"' in sources


@pytest.mark.parametrize(
    ("name", "field", "size"),
    [
        ("pccl_command", "endpoint", "PCCL_ENDPOINT_MAX"),
        ("pccl_command", "rings", "PCCL_RINGS_MAX"),
        ("pccl_command", "ends", "PCCL_ENDS_MAX"),
        ("pccl_event", "text", "PCCL_TEXT_MAX"),
    ],
)
def test_arrays_are_as_long_as_their_constants(name: str, field: str, size: str) -> None:
    assert fields(name)[field].type.length == getattr(lib, size)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("pccl_command", "curve_server"),
        ("pccl_options", "curve_public"),
        ("pccl_options", "curve_secret"),
        ("pccl_options", "dialler"),
    ],
)
def test_keys_have_room_for_their_end(name: str, field: str) -> None:
    assert fields(name)[field].type.length > lib.PCCL_KEY_CHARS


def test_an_event_is_read_as_c_writes_it() -> None:
    """Names, order, offsets, sizes and signs."""
    layout = fields("pccl_event")
    assert tuple(layout) == engine.Event._fields
    codes = re.findall(r"\d*[a-zA-Z]", engine.EVENT.format.removeprefix("@"))
    assert len(codes) == len(layout), "one code for each field"
    end = ""
    for code, (name, field) in zip(codes, layout.items(), strict=True):
        end += code
        assert struct.calcsize("@" + end) == field.offset + ffi.sizeof(field.type), name
        assert struct.calcsize(code) == ffi.sizeof(field.type), name
        assert code.islower() == field.type.cname.startswith(("int", "char")), name
    assert engine.EVENT.size == ffi.sizeof("pccl_event")


def test_options_and_places_have_the_fields_of_their_structs() -> None:
    assert [field.name for field in dataclasses.fields(engine.EngineOptions)] == [
        *fields("pccl_options")
    ]
    places = {field.name for field in dataclasses.fields(RingPlace)}
    assert places == {*fields("pccl_ring")} - {"call"}  # which StartOp has
    assert {*End.__struct_fields__} == {*fields("pccl_end")}
    assert engine.Part.__struct_fields__ == tuple(fields("pccl_part"))
    assert engine.PART.size == ffi.sizeof("pccl_part")


def test_the_table_names_functions_of_libzmq() -> None:
    """For pyzmq each has its callback, or is one that the plain messages fill in."""
    plain, filled = ffi.new("pccl_zmq *"), tables.load("pyzmq").table
    lib.pccl_plain_fill(plain)
    for name in fields("pccl_zmq"):
        callback = f"pccl_py_{name}"
        own = getattr(plain, name)
        assert bool(own) != (f"{callback}(" in build.CALLBACKS), name
        assert getattr(filled, name) == (own or getattr(lib, callback)), name
    if tables.load().name == "libzmq":
        assert all(getattr(tables.load().table, name) for name in fields("pccl_zmq"))


def test_constants_of_zeromq() -> None:
    """pyzmq's wheels carry no zmq.h, so zmqdefs.h repeats what the engine uses of it."""
    text = COMMENT.sub("", (C / "zmq" / "zmqdefs.h").read_text(encoding="utf-8"))
    found = re.findall(r"\bZMQ_(\w+) = (\w+)", text)
    assert len(found) > 40
    for name, value in found:
        pythonic = name.removeprefix("EVENT_") if not hasattr(zmq, name) else name
        assert getattr(zmq, pythonic) == int(value, 0), name


def test_the_extension_is_built_from_this_header() -> None:
    bound = HEADER.split("/* cdef begin */")[1].split("/* cdef end */")[0]
    assert not re.search(r"^\s*#", bound, re.MULTILINE), "cffi reads no preprocessor directives"
    code = re.sub(r"/\*.*?\*/", "", bound, flags=re.DOTALL)
    declared = re.findall(r"^[a-z].*?\b(pccl_\w+)\(", code, re.MULTILINE)
    constants = re.findall(r"\b(PCCL_\w+) = ([^,}\s][^,}]*)", code)
    assert len(declared) > 10 < len(constants)
    missing = [symbol for symbol in declared if not hasattr(lib, symbol)]
    stale = [
        symbol
        for symbol, value in constants
        if getattr(lib, symbol, None) != eval(value, {"__builtins__": {}})
    ]
    assert not missing + stale, "the extension is stale: pip install -e ."
    assert ffi.sizeof("pccl_msg") == 64
