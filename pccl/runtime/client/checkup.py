"""Asks a master what it sees of this machine, without joining its run: for `pccl doctor`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from pccl.errors import MasterLostError, PCCLError
from pccl.protocol import messages as m
from pccl.runtime import limits
from pccl.runtime.client.connection import Dealer, DealerEvent, Identity
from pccl.runtime.client.engine import Engine, EngineOptions
from pccl.runtime.config import Config
from pccl.runtime.resolve import everywhere, further_hosts, reachable
from pccl.security import Security
from pccl.support import address_text
from pccl.types import Result
from pccl.version import __version__


@dataclass(frozen=True, slots=True)
class Examination:
    report: m.Report  # the master's report
    address: str  # each `host:port` at which the master tried to reach this machine
    round_trip_s: float  # round trip to the master, from TCP's handshake
    # how far this machine's clock is ahead of the master's, within half a round trip
    clock_s: float


def examine(host: str, port: int, config: Config, security: Security | None) -> Examination:
    """Has the master at this address dial this machine back.

    Raises:
        MasterLostError: no master answers there.
        OSError: no port of PCCL_PORT_RANGE is free.
        PCCLError: INVALID_USAGE: keys are missing or unsafe, or the master does not allow ours.
    """
    where = address_text(host, port)
    began_s = time.monotonic()
    try:
        address = reachable(host, port, config.handshake_timeout_s)
    except OSError as error:
        why = f"nothing answers at {where} ({error.strerror or error})"
        raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why) from None
    round_trip_s = time.monotonic() - began_s
    identity = Identity.of(security)
    options = identity.guard(EngineOptions())
    first, others = config.first_host, further_hosts(config, address)
    engine = Engine(options, host=everywhere(address), ports=config.ports)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = Dealer(context, address, port, config, identity.secure)
        try:
            ask = m.Examine(
                m.PROTOCOL_VERSION,
                __version__,
                first,
                engine.port,
                identity.curve,
                identity.token,
                others,
            )
            dealer.send(ask)
            dealer.flush()
            report = _answer(dealer, where)
        finally:
            dealer.close()
    finally:
        context.term()
        engine.close()
    tried = dict.fromkeys((first or report.host, *others))
    address = " or ".join(address_text(each, engine.port) for each in tried)
    clock_s = time.time() - report.unix_s - round_trip_s / 2
    return Examination(report, address, round_trip_s, clock_s)


def _answer(dealer: Dealer, where: str) -> m.Report:
    poller = zmq.Poller()
    poller.register(dealer.socket, zmq.POLLIN)
    poller.register(dealer.monitor, zmq.POLLIN)
    until_s = time.monotonic() + limits.EXAMINATION_S
    while poller.poll(max(0, int((until_s - time.monotonic()) * 1000))):
        if dealer.socket.poll(0):
            for answer in dealer.receive():
                if isinstance(answer, m.Report):
                    return answer
        for event in dealer.events():
            if event is DealerEvent.NOT_ALLOWED:
                why = f"the master at {where} does not have this machine's key in `allowed`"
                raise PCCLError(Result.INVALID_USAGE, "doctor", why)
            if event is not DealerEvent.UP:
                why = (
                    f"what answers at {where} is not a pccl master of this version, or has other "
                    "keys (PCCL_CURVE_DIR)"
                )
                raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why)
    why = f"the master at {where} did not answer within {limits.EXAMINATION_S:g} s"
    raise MasterLostError(Result.MASTER_CONNECTION_FAILED, "doctor", why)
