"""All I/O, threads and clocks: ROUTER server, DEALER client, lane engine, state transfer.

pccl.protocol makes all decisions about the run.
"""
