"""The protocol without I/O: the messages, the state machines of master and peer, and their rules.

These are pure functions and data, without sockets, threads, clocks, randomness or files. So a test
can simulate whole runs, event by event, from one seed.
"""
