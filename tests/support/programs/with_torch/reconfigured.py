"""A process of torch's reconfiguration. reconfigured.py ADDRESS FOLDER NUMBER FIRST LAST

It is in the reconfigurations FIRST to LAST; each is a file of the handles, which the test writes.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from peers.waiting import wait_until

import pccl.torch  # noqa: F401 - registers the backend


def main() -> None:
    address, folder, (number, first, last) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    dist.init_process_group("pccl", init_method=f"pccl://{address}", enable_reconfigure=True)
    assert dist._supports_reconfigure()
    print(json.dumps({"number": number, "handle": dist._get_reconfigure_handle()}), flush=True)
    for uuid in range(first, last + 1):
        asked = folder / str(uuid)
        wait_until(asked.exists)
        handles = json.loads(asked.read_text())
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30)).wait()
        mine = torch.tensor([float(number)])
        whole = torch.empty(dist.get_world_size())
        dist.all_gather_single(whole, mine)
        report = {"uuid": uuid, "rank": dist.get_rank(), "numbers": whole.tolist()}
        print(json.dumps(report), flush=True)
    wait_until((folder / "end").exists)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
