"""`pccl keys`: creates the keys of an encrypted run.

DIR becomes the master's directory. By default all peers share one key pair, which is also in DIR.
With --peers each peer has its own key pair, in a separate directory to be copied to its machine. It
keeps existing keys, so a later call with a larger number adds peers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pccl.cli.arguments import option, whole_number
from pccl.runtime.encryption import new_keys, require_curve
from pccl.security import ALLOWED, MASTER_KEY, MASTER_SECRET, PEER_SECRET, Security


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "dir DIR", "where to put them", kind=Path)
    text = "a key pair for each of N peers, in DIR/peer-1 and so on (default: one for all)"
    option(parser, "--peers N", text, kind=whole_number(1, 65_536))


def run(args: argparse.Namespace) -> int:
    """Makes the missing keys, and prints what to do with them."""
    require_curve()
    master: Path = args.dir
    _report("the master's key pair", int(_make_pair(master, MASTER_SECRET)), 1)
    public = Security(master).master_keys().public
    (master / ALLOWED).touch()
    homes = {f"peer-{i}": master / f"peer-{i}" for i in range(1, (args.peers or 0) + 1)}
    made = 0
    for name, home in (homes or {"all-peers": master}).items():
        if _make_pair(home, PEER_SECRET):
            made += 1
            with (master / ALLOWED).open("a", encoding="ascii") as allowed:
                allowed.write(f"{Security(home).peer_keys().public} {name}\n")
        _write(home / MASTER_KEY, f"{public} master\n")
    _report(f"a key pair for {'each peer' if homes else 'all peers'}", made, len(homes) or 1)
    what = f"one of {master}{os.sep}peer-*" if homes else f"{master} without {MASTER_SECRET}"
    print(f"on the master's machine: pccl master --curve-dir {master}")
    print(f"on each peer's: PCCL_CURVE_DIR=..., a copy of {what}")
    return 0


def _report(what: str, made: int, wanted: int) -> None:
    if made and made < wanted:
        print(f"{what}: {made} made; {wanted - made} were there, and are kept")
    else:
        print(f"{what}: {'made' if made else 'it was there, and is kept'}")


def _make_pair(directory: Path, name: str) -> bool:
    """Writes a new key pair that only this user can read; False if there is one already."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / name
    if path.exists():
        return False
    keys = new_keys()
    _write(path, f"{keys.public} {keys.secret}\n", 0o600)
    return True


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
