"""A server process: its state, its request handlers, and its metrics.

Imports core to strategies, and of pserver neither strategy nor trainer; of record only recorder.
"""
