"""What a command can do: one file for each job, and what its ranks do.

Imports core to recipes. Jobs never import each other.
"""
