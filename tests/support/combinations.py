"""Which settings of DiLoCo go together: the table of docs/howto/diloco.md, which a test walks.

A cell is a combination that the test runs, unless `WHY_NOT` has a reason.
"""

from __future__ import annotations

from typing import Any, get_args

from pccl.kernels import Wire
from pccl.types import Mode

MODES: dict[str, dict[str, Any]] = {
    **{mode: {"inner_steps": 4} for mode in get_args(Mode) if mode != "eager"},
    "streaming": {"inner_steps": 4, "fragments": 2, "overlap": 1, "alpha": 0.5},
    "decoupled": {"inner_steps": 4, "fragments": 2},
}
# the peers end each round together
IN_STEP = {mode: options for mode, options in MODES.items() if mode != "decoupled"}
LEDGER = "a ledger"
SHARDED = "a sharded model"
FEATURES: dict[str, dict[str, Any]] = {
    **{f'`wire="{wire}"`': {"wire": wire} for wire in get_args(Wire)},
    '`weight="samples"`': {"weight": "samples"},
    '`weight="rate"`': {"weight": "rate"},
    "`inner_steps` as points": {"inner_steps": [(0, 4), (2, 6)]},
    "`inner_seconds`": {"inner_steps": None, "inner_seconds": 0.01},
    "`inner_seconds`, `deadline_peers`": {
        **{"inner_steps": None, "inner_seconds": 0.01, "grace": 5.0},
        "deadline_peers": 2,
    },
    "`deadline_peers`": {"deadline_peers": 2, "grace": 5.0},
    "`quarantine`": {"quarantine": 3},
    '`quarantine`, `outliers="clip"`': {"quarantine": 3, "outliers": "clip"},
    '`merge="radial"`': {"merge": "radial"},
    '`buffers="local"`': {"buffers": "local"},
    '`buffers="first"`': {"buffers": "first"},
    "`checkpoints`": {"checkpoints": True},
    LEDGER: {"ledger": True},
    SHARDED: {"sharded": True},
}
_CLOCKS = "each learner has its own clock"
WHY_NOT: dict[tuple[str, str], str] = {
    ("`inner_seconds`", "decoupled"): _CLOCKS,
    ("`inner_seconds`, `deadline_peers`", "decoupled"): _CLOCKS,
    ('`buffers="first"`', "decoupled"): "they would be read while the learner changes them",
    (SHARDED, "decoupled"): (
        "its processes would call collectives in two threads each, in no common order"
    ),
}
NOTES: dict[tuple[str, str], str] = {
    (LEDGER, "streaming"): "once in each fragment [^1]",
    (LEDGER, "decoupled"): "once in each fragment [^1]",
    ("`deadline_peers`", "decoupled"): "always",
    **{(SHARDED, mode): "yes [^2]" for mode in MODES if mode != "decoupled"},
    ('`buffers="first"`', "streaming"): "yes [^3]",
}


def table() -> str:
    """The table in Markdown."""
    lines = ["| | " + " | ".join(f'`"{mode}"`' for mode in MODES) + " |"]
    lines.append("| --- |" + " --- |" * len(MODES))
    for feature in FEATURES:
        cells = [
            f"no: {WHY_NOT[feature, mode]}"
            if (feature, mode) in WHY_NOT
            else NOTES.get((feature, mode), "yes")
            for mode in MODES
        ]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)
