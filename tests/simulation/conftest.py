"""Tests of the two state machines: none starts a process, or opens a socket."""

from simulation.isolation import no_processes_and_no_sockets  # noqa: F401
