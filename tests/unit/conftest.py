"""Tests of one module or function: none starts a process, or opens a socket."""

from simulation.isolation import no_processes_and_no_sockets  # noqa: F401
