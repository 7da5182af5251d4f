"""`init_method="pccl://host:port"`: joins a run, which gives rank and size.

With `?reconfigure=1`, or `enable_reconfigure` of torch 2.14, joining begins, and the group when its
`reconfigure` names this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import Store

from pccl import Communicator
from pccl.torch.backend import is_to_be_reconfigured
from pccl.torch.creation import join, joined
from pccl.torch.group import TIMEOUT, ProcessGroup

SCHEME = "pccl"
PORT = 48148


def meet(url: str, timeout: timedelta = TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the run; yields its store, this peer's rank and the number of members.

    Raises:
        ValueError: the URL is malformed.
    """
    parts = urlsplit(url)
    asked = parse_qs(parts.query)
    unknown = asked.keys() - {"rank", "world_size", "reconfigure"}
    if unknown or parts.path not in ("", "/") or not parts.netloc:
        raise ValueError(f"{url!r}: it must be pccl://host:port, where a master is")
    host = parts.netloc if parts.port is not None else f"{parts.netloc}:{PORT}"
    if asked.get("reconfigure") == ["1"] or is_to_be_reconfigured():
        comm = Communicator(host, connect_timeout=timeout.total_seconds())
        group = ProcessGroup(comm, timeout=timeout, waits=True)
    else:
        size = int(asked.get("world_size", ["1"])[0])
        group = join(host, size, timeout=timeout, rank=int(asked.get("rank", ["-1"])[0]))
    joined.put(group)
    yield group.get_group_store(), group.getRank(), group.getSize()
    raise RuntimeError("a run is joined once: make the process group anew")
