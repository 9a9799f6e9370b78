"""A server process: its state, its request handlers, leases, and the sync modes.

Imports core to strategies, and of pserver what lies outside trainer and record.
"""
