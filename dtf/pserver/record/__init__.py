"""The record of an asynchronous run, and its sequential replay.

Imports core to strategies, and all of pserver but strategy.
"""
