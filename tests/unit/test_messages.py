"""The wire format of the control plane: round trips, golden bytes, and whatever else arrives."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.hostile import anything, kinds

import pccl
from pccl import operands
from pccl.protocol import messages as m
from pccl.support import ADVERTISED_MAX
from pccl.types import CollectiveKind

PARTS = (m.Part(10, 6, "w", "2x3/1,2"), m.Part(3, 1))
PACKAGE = m.Package(3, 2, b"c" * 16, 9, b"h" * 16, 1 << 40, b"b" * 16)
FROM_PEER, FROM_MASTER = kinds(m.PeerMessage), kinds(m.MasterMessage)
draws = st.randoms(use_true_random=False)
said_by_peers = st.builds(anything, draws, st.sampled_from(FROM_PEER))


@pytest.mark.parametrize("kind", FROM_PEER)
@given(draws)
def test_peer_messages_survive(kind: type[m.PeerMessage], draw: random.Random) -> None:
    message = anything(draw, kind)
    assert m.decode_from_peer(m.encode(message)) == message


@pytest.mark.parametrize("kind", FROM_MASTER)
@given(draws)
def test_master_messages_survive(kind: type[m.MasterMessage], draw: random.Random) -> None:
    message = anything(draw, kind)
    assert m.decode_from_master(m.encode(message)) == message


def test_golden_bytes() -> None:
    # Changing these breaks every older peer: raise PROTOCOL_VERSION if you must.
    start = m.StartVote(7, 3, m.Spec("all_reduce", 0, 10, 1000))
    assert (
        m.encode(start).hex()
        == "9a0407039caa616c6c5f726564756365000acd03e80000000090a09000c000c2909090"
    )
    assert m.encode(m.FinishVote(9, True)).hex() == "950509c3a000"
    assert m.encode(m.Finished(9, True)).hex() == "954909c3a000"
    assert [*m.Cause] == [*range(7)] and [*m.Called] == [*range(6)]


def test_appended_fields_are_ignored() -> None:
    appended = msgspec.msgpack.encode([2, 5, False, "a field of a later version"])
    assert m.decode_from_peer(appended) == m.TopologyVote(5)


@pytest.mark.parametrize("what", ["all_reduce_twice", "", 5])
def test_a_kind_of_collective_that_does_not_exist_is_refused(what: object) -> None:
    vote = msgspec.msgpack.encode([4, 7, 3, [what, 0, 10, 1000]])
    with pytest.raises(m.ProtocolError):
        m.decode_from_peer(vote)


def test_the_other_side_s_messages_are_refused() -> None:
    with pytest.raises(m.ProtocolError):
        m.decode_from_peer(m.encode(m.Resumed(m.Done())))
    with pytest.raises(m.ProtocolError):
        m.decode_from_master(m.encode(m.Leave()))


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_hashes_have_one_length_and_peers_a_limited_number_of_hosts(more: int) -> None:
    package = msgspec.structs.replace(PACKAGE, body=b"b" * (16 + more))
    hosts = tuple(f"10.0.0.{i}" for i in range(ADVERTISED_MAX - 1 + more))
    hello = m.Hello(1, "0.1.0", 0, "", 4000, "", "", b"", others=hosts)
    for message, fits in ((m.Publish(4, (package,)), more == 0), (hello, more <= 0)):
        if fits:
            assert m.decode_from_peer(m.encode(message)) == message
        else:
            with pytest.raises(m.ProtocolError):
                m.decode_from_peer(m.encode(message))


def test_what_the_text_of_a_collective_says() -> None:
    quantized = m.Spec(CollectiveKind.ALL_REDUCE, 0, 10, 7, 1, 0)
    assert str(quantized) == "all_reduce(7 elements of float32, sum, quantized by MIN_MAX to uint8)"
    assert str(m.Part(10, 6)) == "a tensor of 6 elements of float32"
    assert str(PARTS[0]).startswith("w of 6 elements of float32")


def test_how_two_collectives_differ() -> None:
    def seen(members: int, ring: int = 5) -> m.Spec:
        return m.Spec(CollectiveKind.BROADCAST, 0, 10, 7, members=members, ring=ring)

    assert seen(3).sees_others_than(seen(2)) and seen(2, 6).sees_others_than(seen(2))
    assert not any(seen(a).sees_others_than(seen(b)) for a, b in ((2, 2), (0, 2), (2, 0)))
    one, other = (m.Spec("all_reduce", 0, 0, 0, parts=(PARTS[0], m.Part(3, n))) for n in (1, 2))
    what = "; tensor 1 is a tensor of 1 element of uint16, and a tensor of 2 elements of uint16"
    assert one.difference(other) == what and one.difference(one) == ""
    turned = msgspec.structs.replace(one, parts=(m.Part(10, 6, "w"), PARTS[1]))
    assert "lie" in one.difference(turned)


def test_what_a_transfer_has_overwritten_is_unknown() -> None:
    entries = tuple(m.Entry(name, 10, 12, False, b"digest") for name in "abc")
    manifest = m.Manifest(3, 0, entries)
    torn = manifest.overwritten([1])
    assert [entry.digest for entry in torn.entries] == [b"digest", b"", b"digest"]
    assert manifest.whole and torn.torn and not torn.whole and manifest.overwritten([]) == manifest


def test_oversized_messages_are_refused_unread() -> None:
    with pytest.raises(m.ProtocolError, match="bytes"):
        m.decode_from_peer(bytes(m.MESSAGE_BYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for decode in (m.decode_from_peer, m.decode_from_master):
        try:
            decode(data)
        except m.ProtocolError:
            pass


@given(said_by_peers, st.integers(0, 63), st.integers(0, 255))
def test_one_changed_byte_never_surprises(message: m.PeerMessage, at: int, value: int) -> None:
    data = bytearray(m.encode(message))
    data[at % len(data)] = value
    try:
        m.decode_from_peer(bytes(data))
    except m.ProtocolError:
        pass


@given(st.lists(said_by_peers, max_size=200), st.integers(0, 3))
def test_frames_hold_messages_in_their_order(said: list[m.PeerMessage], large: int) -> None:
    work = m.Spec("all_reduce", 0, 1, m.INLINE_BYTES_MAX)
    said[:large] = [m.StartVote(7, 3, work, bytes(m.INLINE_BYTES_MAX))] * large
    made = m.frames([m.encode(message) for message in said])
    heard = [m.decode_from_peer(data) for frame in made for data in m.opened(frame)]
    assert heard == said
    assert all(len(frame) < 70_000 or len(m.opened(frame)) == 1 for frame in made)
    small = [m.encode(message) for message in said[large:]]
    assert len(made) <= 2 * large + 1 + len(small) // 64 + sum(map(len, small)) // 32768


def test_a_frame_of_one_message_is_that_message() -> None:
    said = m.encode(m.FinishVote(9, True))
    assert m.frames([said]) == [said] and m.frames([]) == []
    assert m.frames([said, said])[0].hex() == "9200dc0002" + 2 * "950509c3a000"


@pytest.mark.parametrize(
    "rest",
    ["", "c0", "90", "9195", "dc0041" + 65 * "9108", "ddffffffff", "dc000191c1", "91910800"],
)
def test_malformed_frames_are_refused(rest: str) -> None:
    """Also one of no message, and one of more than 64, before any of them is looked at."""
    with pytest.raises(m.ProtocolError):
        for data in m.opened(bytes.fromhex("9200" + rest)):
            m.decode_from_peer(data)


def test_nested_frames_are_refused() -> None:
    inner = m.frames([m.encode(m.Leave())] * 2)
    outer = m.frames(inner * 2)[0]
    with pytest.raises(m.ProtocolError):
        m.decode_from_peer(m.opened(outer)[0])


def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(m.ProtocolError, match="bytes"):
        m.opened(bytes.fromhex("9200") + bytes(m.MESSAGE_BYTES_MAX))


def test_a_vote_for_the_longest_list_of_tensors_fits_in_a_message() -> None:
    text, most = "x" * m.NAME_CHARS_MAX, (1 << 64) - 1
    part = m.Part((1 << 16) - 1, most, text, text)
    parts = (part,) * (m.LIST_BYTES_MAX // (m.PART_BYTES_MAX + 2 * len(text)))
    what = m.Spec(CollectiveKind.REDUCE_SCATTER, 9, 0, 0, 9, 9, 1 << 31, 1 << 31, parts)
    rows = (most,) * m.MEMBERS_MAX
    vote = m.encode(m.StartVote(most, most, what, None, most, True, rows, rows))
    assert m.MESSAGE_BYTES_MAX - 2048 < len(vote) <= m.MESSAGE_BYTES_MAX


@pytest.mark.slow
def test_longer_lists_of_tensors_are_an_error() -> None:
    rows = np.zeros((m.PARTS_MAX, 1), np.float32)
    long = {f"{i:05}" + "\u00e9" * 251: row for i, row in enumerate(rows)}
    with pytest.raises(ValueError, match=f"{m.PARTS_MAX} arrays take"):
        operands.all_reduce(long, long, pccl.ReduceOp.SUM, None)
    fewer = dict(list(long.items())[: m.LIST_BYTES_MAX // (507 + m.PART_BYTES_MAX)])
    assert len(operands.all_reduce(fewer, fewer, pccl.ReduceOp.SUM, None).work.parts) == len(fewer)
