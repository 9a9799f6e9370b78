"""A trainer process: it takes leases, pulls, computes and pushes.

Imports core to strategies, and of pserver what lies outside server and record.
"""
