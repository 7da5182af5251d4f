"""A fixture that forbids processes and sockets, for tests that need neither."""

from __future__ import annotations

import socket
import subprocess

import pytest
import zmq


@pytest.fixture(autouse=True)
def no_processes_and_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test that needs this belongs to tests/integration")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(zmq, "Context", refuse)
