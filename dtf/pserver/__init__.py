"""The parameter server: servers run the engine and hold the state, trainers compute. See docs/pserver.md."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported; it would tell of every connection that ends
