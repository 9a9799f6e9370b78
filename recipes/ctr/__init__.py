"""Click-through rate: readers of click logs, a log that is generated, and models of who clicks.

Imports core to engine.
"""
