"""The wire format of the control plane: round trips, golden bytes, and whatever else arrives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pccl
from pccl import operands
from pccl.protocol import messages as m
from pccl.support import ADVERTISED_MAX

INFO = m.PeerInfo(3, 1, "10.0.0.2", 4000, "/tmp/x", "abc")
TOKEN = "0123456789abcdef" * 2
ENTRY = m.Entry("w", 10, 12, False, b"\1\2")
PARTS = (m.Part(10, 6, "w", "2x3/1,2"), m.Part(3, 1))
PACKAGE = m.Package(3, 2, b"c" * 16, 9, b"h" * 16, 1 << 40, b"b" * 16)
FAILURE = m.Failure(9, m.Called.COLLECTIVE, 7, (1, 2), 6, "they are apart", 0)
FROM_PEER: list[m.PeerMessage] = [
    m.Hello(1, "0.1.0", 0, "", 4000, "", "", b"", client=True),
    m.Publish(4, (PACKAGE,)),
    m.Holds((PACKAGE, PACKAGE), 3),
    m.Seek(3, 2, (7, 8)),
    m.Got(1 << 30),
    m.Slow(),
    m.Hello(1, "0.1.0", 2, "", 4000, "/tmp/x", "abc", b"\7"),
    m.TopologyVote(5),
    m.PendingVote(6),
    m.PendingVote(6, patient=True),
    m.Hurry(6),
    m.Inquire(6, 9),
    m.StartVote(7, 3, m.Spec("all_reduce", 0, 10, 1000, 1, 2)),
    m.StartVote(7, 3, m.Spec("all_reduce", 0, 10, 1), b"data", 6),
    m.StartVote(7, 3, m.Spec("broadcast", 0, 10, 6, layout="2x3/1,2")),
    m.StartVote(7, 3, m.Spec("all_gather", 0, 0, 0, parts=PARTS)),
    m.StartVote(7, 3, m.Spec("all_to_all", 0, 10, 6, members=2), gives=(1, 1 << 40), takes=(0, 2)),
    m.StartVote(7, 3, m.Spec("all_gather", 0, 10, 4, members=3, rows=(5, 0, 1 << 40))),
    m.StartVote(7, 3, m.Spec("send", 0, 10, 6), pair=(1, 1 << 40)),
    m.FinishVote(9, True),
    m.Progress(9, 1000),
    m.FinishVote(9, False, "a stream was lost"),
    m.FinishVote(9, False, "no memory", m.Cause.MEMORY),
    m.SyncVote(8, m.Manifest(4, 0, (ENTRY,))),
    m.FetchedVote(11, False, "digest"),
    m.Leave(),
    m.RendezvousRequest(3, TOKEN, 4001, 8),
    m.Hello(1, "0.1.0", 0, "", 4000, "", "", b"", outgoing=True),
    m.Hello(1, "0.1.0", 0, "", 4000, "", "", b"", relay=4001),
    m.Withdraw(7),
    m.OptimizeVote(5),
    m.Measured(12, 62_500_000, 1500),
    m.Resume(
        1,
        "0.1.0",
        b"\7",
        1 << 62,
        INFO,
        (INFO,),
        2,
        9,
        m.Done(1, 2, True, 3, 4, 11, True),
        (m.Open(9, (1, 2), None), m.Open(8, (1, 2), False)),
        ((7, True),),
        rings=(m.Ring((2, 1), 1),),
        failed=(FAILURE,),
    ),
]
FROM_MASTER: list[m.MasterMessage] = [
    m.Published(4),
    m.Available((PACKAGE,), 3),
    m.Source(3, 2, INFO, 1 << 63, 5),
    m.Serve(3, 2, INFO, 1 << 63, 5),
    m.Served(7),
    m.Welcome(1, "a warning"),
    m.Refused(4, "another version"),
    m.Plan(2, (INFO,), (m.Ring((1, 2, 3), 1),), 4, (1 << 64) - 1),
    m.WorldSizes(m.World(3, 2, 2, 2)),
    m.Admitted(1 << 62, m.Done(1, 2, True, 3, 4)),
    m.TopologyResult(5, 1),
    m.PendingResult(6, True, 2),
    m.Waiting(6, "for peer 3"),
    m.Started(7, 9, 2, nonce=(1 << 64) - 1),
    m.Started(7, 9, 2, b"data", True, 8),
    m.Missed(m.Small(9, 3, (1, 2), b"data")),
    m.Interrupt(9, "lost peer 3"),
    m.Finished(9, False, "lost peer 3"),
    m.SyncPlan(8, 11, (2,), (1,), (0,), (b"\1",), nonce=1 << 63),
    m.SyncResult(8, 4, 3, 11),
    m.CallError(8, 3, "no"),
    m.CallError(8, 3, "no", 1, 9, m.Called.COLLECTIVE, 7, (1, 2)),
    m.Failed(FAILURE),
    m.Kicked(4, "out of turn"),
    m.RendezvousJoin(INFO, TOKEN, "10.0.0.1", 4001, 8),
    m.RendezvousResult(TOKEN, INFO),
    m.RendezvousResult(TOKEN, why="nobody relays"),
    m.RendezvousRelay(TOKEN, INFO, INFO),
    m.Resumed(m.Done()),
    m.Probe(5, 12, (2, 3), 1 << 63),
    m.OptimizeResult(5, 3),
]


@pytest.mark.parametrize("message", FROM_PEER)
def test_peer_messages_survive(message: m.PeerMessage) -> None:
    assert m.decode_from_peer(m.encode(message)) == message


@pytest.mark.parametrize("message", FROM_MASTER)
def test_master_messages_survive(message: m.MasterMessage) -> None:
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
    hello = msgspec.structs.replace(FROM_PEER[0], others=hosts)
    for message, fits in ((m.Publish(4, (package,)), more == 0), (hello, more <= 0)):
        if fits:
            assert m.decode_from_peer(m.encode(message)) == message
        else:
            with pytest.raises(m.ProtocolError):
                m.decode_from_peer(m.encode(message))


def test_what_the_text_of_a_collective_says() -> None:
    quantized = m.Spec(m.CollectiveKind.ALL_REDUCE, 0, 10, 7, 1, 0)
    assert str(quantized) == "all_reduce(7 elements of float32, sum, quantized by MIN_MAX to uint8)"
    assert str(m.Part(10, 6)) == "a tensor of 6 elements of float32"
    assert str(PARTS[0]).startswith("w of 6 elements of float32")


def test_how_two_collectives_differ() -> None:
    def seen(members: int, ring: int = 5) -> m.Spec:
        return m.Spec(m.CollectiveKind.BROADCAST, 0, 10, 7, members=members, ring=ring)

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


@given(st.sampled_from(FROM_PEER), st.integers(0, 63), st.integers(0, 255))
def test_one_changed_byte_never_surprises(message: m.PeerMessage, at: int, value: int) -> None:
    data = bytearray(m.encode(message))
    data[at % len(data)] = value
    try:
        m.decode_from_peer(bytes(data))
    except m.ProtocolError:
        pass


@given(st.lists(st.sampled_from(FROM_PEER), max_size=200), st.integers(0, 3))
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
    what = m.Spec(m.CollectiveKind.REDUCE_SCATTER, 9, 0, 0, 9, 9, 1 << 31, 1 << 31, parts)
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
