"""What a command can do: one file for each job, and what its ranks do. `calls.py` offers them to Python.

Imports core to recipes. Jobs never import each other.
"""
