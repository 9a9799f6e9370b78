"""What crosses the wire between trainers and servers: gRPC calls, codec, messages, shared memory.

Imports core to strategies, and of pserver only leases, which messages carry.
"""
