"""Golden trajectories of DiLoCo's modes: what the oracle in numpy gives for one fixed schedule.

Three founders train; one of them leaves where it should give its third pseudo-gradient, and some
rounds later another peer joins. `PYTHONPATH=tests/support python -m oracles.golden` writes the
files again; if they change, training means something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from oracles import diloco as diloco_oracle

FOLDER = Path(__file__).parents[2] / "integration" / "golden"
TARGETS = {"a": 1.0, "b": -3.0, "c": 7.0, "d": 2.5}
RATE = 0.25
OUTER = {"outer_lr": 0.3, "outer_momentum": 0.5}
SIZES = [6, 2]  # of the parameters, which are the fragments of "streaming"
START = np.linspace(-1, 1, sum(SIZES))
LOST_IN, JOINS_IN, ROUNDS = 2, 5, 9
MODES: dict[str, dict[str, Any]] = {
    "sync": {"inner_steps": 2},
    "delayed": {"inner_steps": 2},
    "streaming": {"inner_steps": 5, "fragments": 2, "overlap": 1, "alpha": 0.5},
}


def contributors() -> list[list[str]]:
    """Of each round."""
    return [
        *[["a", "b", "c"]] * LOST_IN,
        *[["a", "b"]] * (JOINS_IN + 1 - LOST_IN),
        *[["a", "b", "d"]] * (ROUNDS - JOINS_IN - 1),
    ]


def trajectory(mode: str) -> dict[str, Any]:
    """The model of each peer after each of its rounds, and theta at the end."""
    settings, peers = MODES[mode], contributors()
    problem = diloco_oracle.Problem(TARGETS, settings["inner_steps"], RATE)
    lr, momentum = OUTER["outer_lr"], OUTER["outer_momentum"]
    if mode == "streaming":
        places = np.split(np.arange(sum(SIZES)), [SIZES[0]])
        joining = [["d"] if i == JOINS_IN else [] for i in range(ROUNDS)]
        oracle = diloco_oracle.Streaming(
            problem, places, START, settings["overlap"], settings["alpha"], lr, momentum
        ).run(list(zip(peers, joining, strict=True)))
        theta = oracle.whole()
        models = [{p: ws[p] for p in who} for ws, who in zip(oracle.weights, peers, strict=True)]
    else:
        outer = diloco_oracle.Outer(START, lr, momentum)
        after = getattr(diloco_oracle, mode)(problem, outer, peers)
        theta = outer.theta
        models = [
            {p: of_round if mode == "sync" else of_round[p] for p in who}
            for of_round, who in zip(after, peers, strict=True)
        ]
    return {
        "settings": {"mode": mode, **settings, **OUTER},
        "targets": TARGETS,
        "rate": RATE,
        "start": _numbers(START),
        "models": [{p: _numbers(w) for p, w in of_round.items()} for of_round in models],
        "theta": _numbers(theta),
    }


def _numbers(array: Any) -> list[float]:
    return [round(float(x), 9) for x in array]


def path(mode: str) -> Path:
    """Of a mode's file."""
    return FOLDER / f"{mode}.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for mode in MODES:
        text = json.dumps(trajectory(mode), indent=1)
        path(mode).write_text(text + "\n", encoding="utf-8")
