"""Sends the vote of a small collective from its caller's thread, which saves one thread switch.

The caller's thread does no other protocol work, and no exception can interrupt it halfway. It
queues the command that enters the call in the inbox, where nothing overtakes it; then a single C
call sends the vote and records that it was sent. Whatever happens next (the answer, a broken
connection, an exception that ends the call), the control thread first enters the call, and knows
whether the vote was sent.
"""

from __future__ import annotations

from typing import Any

from pccl.ext import ffi, lib, tables
from pccl.runtime.client.connection import Dealer


class Shortcut:
    """The shortcut of one call."""

    def __init__(self) -> None:
        self._sent: Any = ffi.new("int32_t *")
        self.entered = False  # whether the control thread has already entered the call

    @property
    def sent(self) -> bool:
        return bool(self._sent[0])

    def send(self, dealer: Dealer, vote: bytes) -> bool:
        """Sends the vote; the caller must hold the lock of the connection.

        Returns:
            True on success. False if the control thread must be woken: the vote was not sent, or
            the socket has messages to read that would otherwise go unnoticed.
        """
        backend = tables.load()
        if backend.name != "libzmq":  # the other backend calls back into Python
            return False
        table, socket = backend.table, ffi.cast("void *", dealer.socket.underlying)
        return bool(lib.pccl_mail_send(table, socket, vote, len(vote), self._sent) == 0)
