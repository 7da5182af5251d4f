"""How messages travel: a frame holds one message, or several in order.

Whoever has several messages for the other side at one moment sends them in one frame, which costs
both sides one call of the socket instead of one for each. What a frame holds means the same as
these messages one by one: no state machine knows of frames.

A frame of several is the array [SEVERAL, [message, ...]].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pccl.protocol.messages.codec import ProtocolError
from pccl.protocol.messages.values import MESSAGE_BYTES_MAX

SEVERAL = 0  # no message has this tag
FRAME_MESSAGES_MAX = 64
FRAME_BYTES = 65536  # a frame with more holds one message

_HEAD = bytes((0x92, SEVERAL))
_Raws = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=FRAME_MESSAGES_MAX)]
_several: msgspec.msgpack.Decoder[tuple[int, list[msgspec.Raw]]]
_several = msgspec.msgpack.Decoder(tuple[int, _Raws])


def frames(messages: Sequence[bytes]) -> Sequence[bytes]:
    """Encoded messages, in as few frames as they fit into."""
    if len(messages) == 1:
        return messages
    made: list[bytes] = []
    together: list[bytes] = []
    nbytes = 0
    for message in messages:
        nbytes += len(message)
        if together and (nbytes > FRAME_BYTES or len(together) == FRAME_MESSAGES_MAX):
            made.append(_frame(together))
            together, nbytes = [], len(message)
        together.append(message)
    if together:
        made.append(_frame(together))
    return made


def _frame(messages: Sequence[bytes]) -> bytes:
    if len(messages) == 1:
        return messages[0]
    return b"".join((_HEAD, b"\xdc", len(messages).to_bytes(2, "big"), *messages))


def opened(frame: bytes) -> Sequence[bytes]:
    """The encoded messages of a frame.

    Raises:
        ProtocolError: it is no frame of this protocol. Its messages may still be none.
    """
    if not frame.startswith(_HEAD):
        return (frame,)
    if len(frame) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    try:
        return [bytes(message) for message in _several.decode(frame)[1]]
    except msgspec.DecodeError as error:
        raise ProtocolError(str(error)) from None
