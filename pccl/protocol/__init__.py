"""The protocol, sans I/O: the messages, the state machines of master and peer, and their rules.

Pure functions and data. Nothing here knows sockets, threads, clocks, randomness or files, so a test
can run whole runs of it, event by event, from one seed.
"""
