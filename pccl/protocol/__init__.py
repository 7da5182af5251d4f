"""The protocol, sans I/O: messages, both state machines, elections, ring planning.

Pure functions and data. Nothing here knows sockets, threads, clocks, randomness or files, so a test
can run whole runs of it, event by event, from one seed.
"""
