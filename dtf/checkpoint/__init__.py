"""Checkpoints: what is in them, how they are committed to disk, found again and loaded under another world size.

Imports core to api.
"""
