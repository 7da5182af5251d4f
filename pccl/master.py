"""The master as a program: `python -m pccl.master`, `pccl master`, `pccl_master`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from pccl.errors import PCCLError
from pccl.master_node import MasterNode, serve_until_signal
from pccl.runtime.config import configure_logging
from pccl.runtime.resources import raise_descriptor_limit
from pccl.runtime.server.journal import OnError
from pccl.support import DEFAULT_PORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen-address",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where to listen for peers; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="journal (SQLite) from which a restarted master resumes the run",
    )
    parser.add_argument(
        "--on-journal-error",
        choices=[choice.value for choice in OnError],
        default=OnError.CONTINUE.value,
        help="when the journal cannot be written: continue without it, log that, and write again "
        "when that works; or end with status 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--event-log",
        metavar="FILE",
        help="record all inputs of the master in FILE, without payloads and keys, for "
        "`pccl replay` (default: nowhere)",
    )
    parser.add_argument(
        "--curve-dir",
        metavar="DIR",
        help="encrypt, and admit only peers that DIR allows; `pccl keys` creates it "
        "(default: PCCL_CURVE_DIR; without that there is no encryption)",
    )
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="where the run can be watched over HTTP, read-only; without HOST, from this machine "
        "only (default: nowhere)",
    )
    parser.add_argument(
        "--no-dial-back",
        dest="dial_back",
        action="store_false",
        help="do not dial peers to check whether they can be reached: for a master whose "
        "network is not that of the peers",
    )


def run(args: argparse.Namespace) -> int:
    """`pccl master`: serves until Ctrl-C or SIGTERM."""
    configure_logging()
    raise_descriptor_limit()
    logging.getLogger("pccl").info("pccl master, process %d", os.getpid())
    try:
        master = MasterNode(
            args.listen_address,
            security=args.curve_dir,
            state=args.state,
            on_journal_error=args.on_journal_error,
            event_log=args.event_log,
            http=args.http,
            dial_back=args.dial_back,
        )
        serve_until_signal(master)
    except (PCCLError, ValueError) as error:  # ValueError: a setting is malformed
        print(f"pccl master: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pccl_master", description="The master of a pccl run.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
