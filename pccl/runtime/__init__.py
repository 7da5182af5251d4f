"""All I/O, threads and clocks: ROUTER server, DEALER client, lane engine, state transfer.

All decisions about the run are the protocol's (pccl.protocol).
"""
