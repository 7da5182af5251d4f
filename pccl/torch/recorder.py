"""Entries of torch's flight recorder, for pccl groups.

Only C++ backends can write to torch's buffer. So a function that adds the entries of this process's
groups replaces `torch._C._distributed_c10d._dump_fr_trace`. torch's own analyzer, `torchfrtrace`,
reads such dumps. TORCH_FR_BUFFER_SIZE is the number of latest calls to keep. Without it there are
no entries, because a stack trace of each small call would take a tenth of its time.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d_C

SIZE = int(os.environ.get("TORCH_FR_BUFFER_SIZE") or 0)

_entries: deque[dict[str, Any]] = deque(maxlen=SIZE)
_groups: dict[str, dict[str, str]] = {}
_numbers = itertools.count()


def record(
    group: Any, name: str, counts: bool, inputs: Sequence[Tensor], timeout_s: float
) -> Callable[[bool], None]:
    """Adds a call that begins. Returns a function that records its success or failure.

    `counts`: whether all members make the call; otherwise it is a send or recv.
    """
    own, number = (group.getGroupName(), group.getGroupDesc()), next(_numbers)
    ranks = list(range(group.getSize()))
    _groups[own[0]] = {"name": own[0], "desc": own[1], "ranks": str(ranks)}
    sizes = [list(tensor.shape) for tensor in inputs]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in inputs]
    sequence = group._get_sequence_number_for_group() + 1
    entry = {
        "frames": [
            {"name": frame.name, "filename": frame.filename, "line": frame.lineno}
            for frame in traceback.StackSummary.extract(
                traceback.walk_stack(None), lookup_lines=False
            )
        ],
        "record_id": number, "pg_id": list(_groups).index(own[0]), "process_group": own,
        "collective_seq_id": sequence if counts else 0, "p2p_seq_id": 0 if counts else number,
        "op_id": number, "profiling_name": name, "time_created_ns": time.time_ns(),
        "input_sizes": sizes, "input_dtypes": dtypes,
        "output_sizes": sizes, "output_dtypes": dtypes,
        "state": "started", "time_discovered_started_ns": time.time_ns(),
        "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": round(1000 * timeout_s), "is_p2p": not counts,
    }  # fmt: skip
    _entries.append(entry)

    def ended(well: bool) -> None:
        entry["retired"] = True
        if well:
            entry.update(state="completed", time_discovered_completed_ns=time.time_ns())

    return ended


def complete_dumps() -> None:
    """Replaces torch's function, once."""
    before = c10d_C._dump_fr_trace  # type: ignore[attr-defined]
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def dump(
        includeCollectives: bool | None = None,
        includeStackTraces: bool | None = None,
        onlyActive: bool | None = None,
    ) -> bytes:
        whole = pickle.loads(before(includeCollectives, includeStackTraces, onlyActive))
        if includeCollectives is not False:
            found = [dict(each) for each in _entries if not (onlyActive and each["retired"])]
            for each in found if includeStackTraces is False else ():
                del each["frames"]
            whole.setdefault("entries", []).extend(found)
        whole.setdefault("pg_config", {}).update(_groups)
        return pickle.dumps(whole)

    c10d_C._dump_fr_trace = dump  # type: ignore[attr-defined]
