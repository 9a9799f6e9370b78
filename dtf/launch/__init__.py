"""How rank processes start, are watched, restarted and ended: one file for each launcher, and what they share.

Imports core to runs.
"""
