"""How messages are written: as MessagePack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pccl.protocol.messages.from_master import MasterMessage
from pccl.protocol.messages.from_peers import PeerMessage
from pccl.protocol.messages.values import MESSAGE_BYTES_MAX

T = TypeVar("T")


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


_encoder = msgspec.msgpack.Encoder()
_from_peer: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_from_master: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)


def encode(message: PeerMessage | MasterMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_from_peer(data: bytes | memoryview) -> PeerMessage:
    """The message a peer sent. Raises ProtocolError for anything else."""
    return _decode(_from_peer, data)


def decode_from_master(data: bytes | memoryview) -> MasterMessage:
    """The message the master sent. Raises ProtocolError for anything else."""
    return _decode(_from_master, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(str(error)) from None
