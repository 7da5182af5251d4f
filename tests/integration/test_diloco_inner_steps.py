"""Inner steps that change by the round: alike on all peers, newcomers, and after a restart."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from combinations import IN_STEP

torch = pytest.importorskip("torch")

from training.small import PATIENCE_S, Model, make, random, refuse, together  # noqa: E402

import pccl  # noqa: E402
from pccl.diloco import DiLoCo, quadratic_steps  # noqa: E402

POINTS = [(0, 2), (2, 2), (4, 5)]  # so 2, 2, 2, 3, 5, 5, ...
STEPS = [2, 2, 2, 3, 5, 5, 5]


@pytest.fixture
def address() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0") as master:
        yield master.address


def train(
    diloco: DiLoCo, model: Model, last: int, steps: list[tuple[int, int]], number: int
) -> dict[int, str]:
    """To outer step `last`. Notes how many inner steps the rounds have had, by k before them."""
    digests: dict[int, str] = {}
    taken = 0
    while diloco.outer_step < last:
        k = diloco.outer_step
        model.move(random(100 * number + taken))
        outer = diloco.step()
        taken += 1
        if outer:
            steps.append((k, taken))
            digests[diloco.outer_step] = diloco.state_digest()
            taken = 0
    return digests


@pytest.mark.parametrize("mode", IN_STEP)
def test_rounds_have_the_steps_of_their_number(address: str, mode: str) -> None:
    """Two peers, a newcomer, and a run that resumes from their checkpoint."""
    begun = threading.Event()
    fragments = 2 if mode == "streaming" else 1
    lengths = [{steps // fragments, -(-steps // fragments)} for steps in STEPS]

    def peer(number: int, master: str, last: int, state: Any = None) -> Callable[[], Any]:
        def body() -> Any:
            steps: list[tuple[int, int]] = []
            assert number < 2 or begun.wait(PATIENCE_S)
            model = Model()
            with pccl.Communicator(master) as comm:
                diloco = make(
                    comm,
                    model,
                    mode=mode,
                    fragments=fragments,
                    inner_steps=POINTS,
                    min_peers=1 if number == 2 else 2,
                    state=state,
                )
                digests: dict[int, str] = {}
                if number < 2 and state is None:
                    digests = train(diloco, model, 2, steps, number)
                    begun.set()
                    while not comm.are_peers_pending():
                        pass
                digests |= train(diloco, model, last, steps, number)
                saved = diloco.state_dict()
            return steps, digests, saved

        return body

    found = together(*(peer(number, address, 6) for number in range(3)))
    for steps, digests, _ in found:
        assert all(taken in lengths[k] for k, taken in steps), steps
        assert digests.items() <= found[0][1].items()
    assert len(found[0][0]) >= 6
    saved = found[0][2]
    with pccl.MasterNode("127.0.0.1:0") as master:
        resumed = together(*(peer(number, master.address, 7, saved) for number in range(2)))
    for steps, _, _ in resumed:
        assert steps and all(taken in lengths[6] for _, taken in steps), steps


def test_peers_with_other_points_are_refused(address: str) -> None:
    why = r"inner_steps is \[\[0, 2\], \[4, 8\]\] in the run and 2 here"
    refuse(address, why, {"inner_steps": [(0, 2), (4, 8)]}, {"inner_steps": 2})


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(0, 2), (0, 3)], "ascending order"),
        ([(0, 2), (5, 0)], "at least 1"),
        ([], "ascending order"),
    ],
)
def test_points_out_of_order_or_range_are_refused(address: str, steps: Any, why: str) -> None:
    with pccl.Communicator(address) as comm, pytest.raises(ValueError, match=why):
        make(comm, Model(), inner_steps=steps)


def test_the_quadratic_rule() -> None:
    """H grows as the learning rate falls: (alpha / lr)^2, within its limits."""

    def cosine(progress: float) -> float:
        return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    found = quadratic_steps(cosine, 150, alpha=5e-3, least=20, most=400)
    assert found[0] == (0, 25) and found[-1] == (150, 400)
    assert [k for k, _ in found] == list(range(0, 151, 10))
    assert [steps for _, steps in found] == sorted(steps for _, steps in found)
    assert found[7][1] == int((5e-3 / cosine(70 / 150)) ** 2)
    assert quadratic_steps(lambda _: 1e-3, 3, alpha=1e-3, least=30) == [(k, 30) for k in range(4)]
