"""Ray: each actor is a peer; Ray restarts an actor that dies, and it rejoins the run.

    pip install ray
    python examples/launch/ray_actors.py --peers 4

max_restarts restarts the actor, max_task_retries calls its method again: both are needed. Ray does
not count a restart that it causes itself, by preempting a node.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import train

import pccl


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=1)  # num_gpus=1, if it uses one
class Peer:
    """One peer of the run."""

    def process(self) -> int:
        """Its process id, which changes when it is restarted."""
        return os.getpid()

    def train(self, master: str, steps: int, peers: int) -> str:
        """Trains to the end; called again in a fresh process if the actor dies."""
        train.main(["--master-address", master, "--steps", str(steps), "--min-peers", str(peers)])
        return "done"


def start(master: str, steps: int, peers: int) -> tuple[list[Any], list[Any]]:
    """The actors, and the futures of their results."""
    # two calls at a time: train() and process()
    actors = [Peer.options(max_concurrency=2).remote() for _ in range(peers)]
    return actors, [actor.train.remote(master, steps, peers) for actor in actors]


def main() -> None:
    """Runs a master in this process, and actors wherever Ray puts them."""
    parser = argparse.ArgumentParser(description="Trains with peers that are Ray actors.")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    # the actors import train.py from here
    ray.init(runtime_env={"working_dir": os.path.dirname(os.path.abspath(__file__))})
    host = ray.util.get_node_ip_address()
    with pccl.MasterNode(f"{host}:48148") as master:
        _, answers = start(master.address, args.steps, args.peers)
        print(ray.get(answers))


if __name__ == "__main__":
    main()
