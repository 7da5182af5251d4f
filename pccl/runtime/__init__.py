"""All I/O, threads and clocks: ROUTER server, DEALER client, lane engine, state transfer.

Nothing here decides anything about the run: decisions are the protocol's (pccl.protocol).
"""
