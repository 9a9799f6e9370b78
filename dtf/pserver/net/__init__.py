"""What crosses the wire between trainers and servers: gRPC calls, codec, messages, shared memory.

Imports core to strategies, and of pserver only leases, which messages carry.
"""

import os

# Read when grpc is imported. Otherwise it reports every connection that ends.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
