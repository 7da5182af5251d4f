"""Has the master's state machine order runs of up to 4,096 peers in ten sites. No sockets.

    python stress/sites.py [--peers 10 100 1000 4096] [--sites 10]

Prints how many links are measured, in how many slots, what the master works for that, and what the
ring is like before and after; docs/internals/performance.md quotes it. The exit code is 1 if a ring
leaves a site more than once, or if what is measured grows faster than the run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from manual_run import SitesRun

from pccl.protocol.survey import ALL_MAX, SLOTS_MAX, crossings

HEADS = (
    "peers",
    "links",
    "measured",
    "slots",
    "master s",
    "leaves",
    "",
    "around s",
    "",
    "Mbit/s",
    "",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1000, 4096])
    parser.add_argument("--sites", type=int, default=10)
    args = parser.parse_args()
    print("  ".join(f"{head:>9}" for head in HEADS))
    good = True
    for peers in args.peers:
        planet = SitesRun(peers, min(args.sites, peers))
        before = planet.master.run.groups[0].planned[0].order
        after = planet.optimize()
        leaves = [crossings(order, planet.site_of) for order in (before, after)]
        around = [planet.round_s(order) for order in (before, after)]
        rates = [planet.rate(order) * 8e-6 for order in (before, after)]
        row = [peers, peers * (peers - 1), planet.probes, planet.slots]
        cells = [f"{number:,}" for number in row] + [f"{planet.seconds:.2f}"]
        cells += [f"{number:,}" for number in leaves]
        cells += [f"{number:.2f}" for number in around] + [f"{rate:.0f}" for rate in rates]
        print("  ".join(f"{cell:>9}" for cell in cells), flush=True)
        if peers > ALL_MAX:
            few = planet.slots <= SLOTS_MAX and planet.probes <= SLOTS_MAX * peers
            good = good and few and leaves[1] == args.sites
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
