"""The master as a program: `python -m pccl.master`, `pccl master`, `pccl_master`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from pccl.cli.arguments import option
from pccl.cli.main import main as command
from pccl.cli.terminal import Refused, complain
from pccl.errors import PCCLError
from pccl.master_node import MasterNode, serve_until_signal
from pccl.runtime.config import configure_logging
from pccl.runtime.resources import raise_descriptor_limit
from pccl.runtime.server.journal import OnError
from pccl.support import DEFAULT_PORT
from pccl.types import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "where to listen for peers; port 0 takes a free one"
    option(parser, "--listen-address HOST:PORT", text, f"0.0.0.0:{DEFAULT_PORT}")
    text = "journal (SQLite) from which a restarted master resumes the run"
    option(parser, "--state FILE", text)
    text = (
        "when the journal cannot be written: continue without it, log that, and write again when "
        "that works; or end with status 1"
    )
    choices = [choice.value for choice in OnError]
    option(parser, "--on-journal-error", text, OnError.CONTINUE.value, choices=choices)
    text = (
        "record all inputs of the master in FILE, without payloads and keys, for `pccl replay` "
        "(default: nowhere)"
    )
    option(parser, "--event-log FILE", text)
    text = (
        "encrypt, and admit only peers that DIR allows; `pccl keys` creates it (default: "
        "PCCL_CURVE_DIR; without that there is no encryption)"
    )
    option(parser, "--curve-dir DIR", text)
    text = (
        "where the run can be watched over HTTP, read-only; without HOST, from this machine only "
        "(default: nowhere)"
    )
    option(parser, "--http [HOST:]PORT", text)
    text = (
        "do not dial peers to check whether they can be reached: for a master whose network is not "
        "that of the peers"
    )
    option(parser, "--no-dial-back", text)


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
            dial_back=not args.no_dial_back,
        )
    except ValueError as error:  # an address is malformed
        raise Refused(error) from None
    try:
        serve_until_signal(master)
    except PCCLError as error:
        complain("master", error)
        return 2 if error.result is Result.INVALID_USAGE else 1  # 2: it could not start
    return 0


def main(argv: list[str] | None = None) -> int:
    return command(["master", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
