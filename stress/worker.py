"""A worker of a stress run: one process, which `python -m stress` starts.

It joins the run of PCCL_MASTER, trains (trainings.py) until its stdin says "leave" or ends, and
does to itself what its stdin says else (mischief.py).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for all scripts of this directory

import diary
import mischief
import trainings

import pccl


class Worker:
    """Joins, and joins again where that is its right."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._notes = diary.Notes(args.number, args.diary)
        self._ending = threading.Event()
        port = int(os.environ["PCCL_MASTER"].rpartition(":")[2])
        self._mischief = mischief.Mischief(port, self._fail)
        threading.Thread(target=self._obey, daemon=True).start()

    def live(self) -> int:
        """Until it is told to leave, or is dropped; the exit code."""
        try:
            while self._belong() and not self._ending.is_set():
                pass
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        return 0

    def _fail(self, why: str) -> None:
        self._notes.write(diary.Out(diary.now(), "failed", why))

    def _obey(self) -> None:
        rest = b""
        while data := os.read(0, 4096):  # sys.stdin has a lock that would be in the way at the end
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"leave":
                    self._ending.set()
                else:
                    self._mischief.do(line.decode())
        self._ending.set()

    def _belong(self) -> bool:
        """One membership; whether another one should follow."""
        args = self._args
        comm = pccl.Communicator(os.environ["PCCL_MASTER"], args.group)
        try:
            self._mischief.joined(comm)
            comm.connect(n_attempts=30)
            self._notes.write(diary.Joined(diary.now(), args.group))
            member = trainings.Membership(
                comm, self._notes, args.number, args.elements, args.optimize, self._ending
            )
            trainings.PROGRAMS[args.program](member).run()
            self._notes.write(diary.Out(diary.now(), "left"))
        except (pccl.KickedError, pccl.MasterLostError) as error:
            how = "cut off" if self._mischief.cut_off else "dropped"
            self._notes.write(diary.Out(diary.now(), how, str(error)))
            return self._mischief.cut_off
        finally:
            comm.close()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=trainings.PROGRAMS, default="loop")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--optimize", action="store_true")
    parser.add_argument("--diary", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)
    return Worker(args).live()


if __name__ == "__main__":
    sys.exit(main())
