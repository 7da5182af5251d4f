"""How collectives travel: the rules, and that all members choose alike."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.ring import checksum, places, plan_rings
from pccl.protocol.tuning import (
    DEFAULTS,
    DIRECT_MAX,
    KIB,
    MIB,
    ONE_SHOT_LOCAL_MAX,
    STEP,
    Algorithm,
    Conditions,
    Settings,
    Tuning,
    choose,
    chunk_bytes,
)
from pccl.types import CollectiveKind, DataType, ReduceOp

WORK = m.Spec("all_reduce", 0, 10, 1000)
RINGS = (m.Ring((1, 2), 1),)
NEAR = Conditions(1, 2, RINGS, together=True, local=True)
FAR = Conditions(1, 2, RINGS, together=False, local=False)
THREE = Conditions(1, 3, (m.Ring((3, 1, 2), 1), m.Ring((2, 1, 3), 1)), together=False, local=False)


def plain(count: int, **changes: object) -> m.Spec:
    return m.Spec("all_reduce", 0, 10, count, **changes)  # type: ignore[arg-type]


def inline(nbytes: int, members: int, here: bool = True, most: int | None = None) -> Tuning:
    known = dataclasses.replace(NEAR if here else FAR, members=members, settings=Settings(most))
    return choose(m.Spec("all_reduce", 0, DataType.UINT8.value, nbytes), nbytes, known)


@pytest.mark.parametrize(
    ("nbytes", "members", "here", "most", "travels"),
    [
        (65536, 1000, True, None, True),
        (65536, 1000, False, None, True),
        (65540, 16, True, None, False),
        (65540, 15, True, None, True),
        (65540, 8, False, None, False),
        (65540, 7, False, None, True),
        (131072, 4, False, None, True),
        (131076, 4, False, None, False),
        (262144, 4, True, None, True),
        (262144, 5, True, None, False),
        (262144, 2, False, None, True),
        (262148, 2, True, None, False),
        (262144, 2, True, 262143, False),
        (262144, 3, False, 262144, True),
        (0, 2, True, 0, True),
    ],
)
def test_the_more_members_the_less_travels_with_the_votes(
    nbytes: int, members: int, here: bool, most: int | None, travels: bool
) -> None:
    found = inline(nbytes, members, here, most)
    assert found.inline is travels
    depends = most is None and 65536 < nbytes <= 262144
    assert found.spec.members == (members if depends else 0)


def test_only_plain_arrays_travel_with_the_votes_of_few() -> None:
    quantized = plain(1 << 14, algorithm=1)
    assert choose(quantized, 65536, NEAR).spec == quantized
    assert choose(quantized, 65536, NEAR).inline
    for spec in (
        plain(25_000, algorithm=1),
        m.Spec("all_reduce", 0, 0, 0, parts=(m.Part(10, 2, ""),)),
        m.Spec("broadcast", 0, 10, 2, members=2),
    ):
        assert (choose(spec, 100_000, NEAR).spec, choose(spec, 0, NEAR).inline) == (spec, False)


def test_two_on_different_machines_need_no_ring() -> None:
    for spec in (WORK, plain(1 << 32), plain(1000, algorithm=4)):
        assert choose(spec, 0, FAR).algorithm is Algorithm.ONE_SHOT
    for spec in (m.Spec("reduce_scatter", 0, 10, 1000, members=2), m.Spec("broadcast", 0, 10, 9)):
        assert choose(spec, 0, FAR).algorithm is Algorithm.RING
    assert choose(WORK, 0, THREE).algorithm is Algorithm.RINGS
    assert choose(WORK, 0, dataclasses.replace(FAR, members=1, rings=())).algorithm == "ring"


def test_quantized_contributions_of_three_or_more_go_to_the_owners_of_segments() -> None:
    quantized = plain(1 << 20, algorithm=4)
    for spec, members, algorithm in (
        (quantized, 2, Algorithm.ONE_SHOT),
        (quantized, 3, Algorithm.TWO_STAGE),
        (quantized, DIRECT_MAX, Algorithm.TWO_STAGE),
        (quantized, DIRECT_MAX + 1, Algorithm.RINGS),
        (plain(1 << 20), 3, Algorithm.RINGS),
        (m.Spec("reduce", 0, 10, 1 << 20, algorithm=4), 3, Algorithm.RINGS),
    ):
        known = dataclasses.replace(THREE, members=members)
        found = choose(spec, 1 << 20, known)
        assert (found.algorithm, found.direct) == (algorithm, algorithm is Algorithm.TWO_STAGE)
        few = dataclasses.replace(known, settings=Settings(direct_max=members - 1))
        assert choose(spec, 1 << 20, few).algorithm is algorithm, "others cannot know that"
        assert not choose(spec, 1 << 20, few).direct


def test_two_on_one_machine_need_no_ring_within_the_caches() -> None:
    for spec in (WORK, plain(ONE_SHOT_LOCAL_MAX)):
        assert choose(spec, 0, NEAR).algorithm is Algorithm.ONE_SHOT
    for spec in (
        plain(ONE_SHOT_LOCAL_MAX + 1),
        plain(0, algorithm=4),
        m.Spec("broadcast", 0, 10, 1000),
    ):
        assert choose(spec, 0, NEAR).algorithm is Algorithm.RING


def test_specs_that_may_start_eagerly() -> None:
    good = [WORK, plain(1000, members=3, ring=checksum((3, 1, 2)))]
    bad = [
        plain(1000, members=2),
        plain(1000, ring=checksum((1, 2, 3))),
        m.Spec(CollectiveKind.BARRIER, 0, 0, 0),
        m.Spec(CollectiveKind.ALL_TO_ALL, 0, 10, 1000, members=3),
        plain(1000, algorithm=4),
    ]
    assert all(choose(spec, 0, THREE).eager for spec in good)
    assert not any(choose(spec, 0, THREE).eager for spec in bad)
    assert not choose(WORK, 0, dataclasses.replace(THREE, rings=())).eager


def test_devices_are_copied_in_steps_where_the_result_needs_no_second_look() -> None:
    integers = m.Spec("all_reduce", ReduceOp.AVG.value, DataType.INT32.value, STEP + 1)
    assert choose(plain(STEP + 1), 0, FAR).step == STEP
    for spec in (plain(STEP), integers, m.Spec("broadcast", 0, 10, STEP + 1)):
        assert choose(spec, 0, FAR).step == 0


def test_only_averages_of_integers_need_a_wider_type() -> None:
    whole, real = DataType.INT32.value, DataType.FLOAT.value
    for op in ReduceOp:
        for what in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.BROADCAST):
            averages = op is ReduceOp.AVG and what is not CollectiveKind.BROADCAST
            assert choose(m.Spec(what, op.value, whole, 9), 36, FAR).wide is averages
            assert not choose(m.Spec(what, op.value, real, 9), 36, FAR).wide
    parts = (m.Part(real, 2), m.Part(whole, 2))
    assert choose(m.Spec("all_reduce", ReduceOp.AVG.value, 0, 0, parts=parts), 16, FAR).wide


def test_users_have_the_last_word_on_lanes() -> None:
    for known, settings, lanes in (
        (NEAR, DEFAULTS, 1),
        (FAR, DEFAULTS, 0),
        (NEAR, Settings(lanes=4), 1),
        (FAR, Settings(lanes=4), 4),
        (NEAR, Settings(pool_size=2, lanes=4), 2),
    ):
        assert choose(WORK, 0, dataclasses.replace(known, settings=settings)).lanes == lanes


@pytest.mark.parametrize(
    ("machines", "hosts", "ipc", "together", "local"),
    [
        ("aaa", "111", "yyy", True, True),
        ("aaa", "112", "yyy", False, True),
        ("aba", "111", "yyy", False, False),
        ("abc", "123", "yyy", False, False),
        ("aaa", "111", "yny", True, False),
    ],
)
def test_a_member_knows_whether_its_group_is_on_one_machine(
    machines: str, hosts: str, ipc: str, together: bool, local: bool
) -> None:
    infos = tuple(
        m.PeerInfo(number, 0, f"10.0.0.{host}", number, "ipc" if has == "y" else "", machine)
        for number, (machine, host, has) in enumerate(zip(machines, hosts, ipc, strict=True), 1)
    )
    rings = plan_rings(infos)
    known = Conditions.of(m.Plan(1, infos, rings, 0), 1, DEFAULTS)
    assert (known.members, known.rings) == (3, rings)
    assert (known.together, known.local) == (together, local)


@pytest.mark.parametrize(
    ("total", "members", "near", "far", "quantized"),
    [
        (0, 0, 256, 32, 32),
        (MIB, 2, 256, 128, 32),
        (4 * MIB, 2, 512, 256, 128),
        (8 * MIB, 1, 1024, 256, 256),
        (1 << 40, 4, 1024, 256, 256),
    ],
)
def test_a_segment_has_several_chunks_within_the_limits(
    total: int, members: int, near: int, far: int, quantized: int
) -> None:
    assert chunk_bytes(total, members, True, False) == near * KIB
    assert chunk_bytes(total, members, False, False) == far * KIB
    for local in (True, False):
        assert chunk_bytes(total, members, local, True) == quantized * KIB


def test_two_members_on_one_machine_exchange_two_halves_which_may_go_before_the_start() -> None:
    for dtype, nbytes, chunk in (
        (DataType.FLOAT, MIB, 512 * KIB),
        (DataType.FLOAT, 400 * KIB, 256 * KIB),
        (DataType.DOUBLE, 2 * MIB, 512 * KIB),
    ):
        spec = m.Spec("all_reduce", 0, dtype.value, nbytes // dtype.itemsize)
        assert choose(spec, nbytes, NEAR).algorithm is Algorithm.ONE_SHOT
        assert choose(spec, nbytes, NEAR).chunk_bytes == chunk
        assert choose(spec, nbytes, FAR).chunk_bytes <= 256 * KIB


def test_a_choice_in_words_has_the_size_of_chunks_in_its_unit() -> None:
    assert str(choose(WORK, 4000, NEAR)) == "inline"
    for known, chunk in ((NEAR, "1 MiB"), (FAR, "256 KiB")):
        assert f"chunks of {chunk}," in str(choose(plain(1 << 22), 16 * MIB, known))


SPECS = st.builds(
    m.Spec,
    what=st.sampled_from(CollectiveKind),
    redop=st.sampled_from(ReduceOp).map(lambda op: op.value),
    dtype=st.sampled_from(DataType).map(lambda dtype: dtype.value),
    count=st.one_of(st.integers(0, 3 << 20), st.sampled_from([1 << 14, 1 << 16, 1 << 18, 1 << 40])),
    algorithm=st.sampled_from([0, 4]),
)
HOSTS = st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2"]), st.sampled_from("ab"))


@given(SPECS, st.lists(HOSTS, min_size=2, max_size=6), st.integers(1, 3))
def test_all_members_choose_alike(spec: m.Spec, hosts: list[tuple[str, str]], weight: int) -> None:
    """The tuning does not depend on settings, except inline_bytes, where the votes differ."""
    infos = tuple(
        m.PeerInfo(10 + i, 0, host, 1, f"ipc{i}", machine)
        for i, (host, machine) in enumerate(hosts)
    )
    order = tuple(info.peer for info in infos)
    rings = plan_rings(infos, (m.Ring(order, weight), m.Ring(order[::-1], 1)))
    plan, found = m.Plan(1, infos, rings, 0), set()
    for number in order:
        settings = Settings(lanes=number)
        tuning = choose(spec, 1000, Conditions.of(plan, number, settings))
        seats = places(spec, rings, number, (1,) * len(rings))
        assert [one.position for one in seats] == [ring.order.index(number) for ring in rings]
        shares = tuple((one.members, one.begin, one.count) for one in seats)
        cut = tuning.chunk_bytes if tuning.algorithm is Algorithm.TWO_STAGE else 0
        found.add((tuning.spec, tuning.inline, tuning.algorithm, tuning.eager, shares, cut))
    assert len(found) == 1
