"""A trainer process: it takes leases, pulls, computes and pushes.

Imports core to strategies, and of pserver neither strategy nor server nor record.
"""
