"""The command line: the entry point, sweeps, and what the fork server imports beforehand.

Imports everything.
"""
