"""The parameter server: servers run the engine and hold the state, trainers compute. See docs/pserver.md."""
