"""All I/O, threads and clocks: the ROUTER server, the DEALER client, the lane engine, state transfer.

Nothing here decides anything about the run: decisions are the protocol floor's (pccl.protocol).
"""
