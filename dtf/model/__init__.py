"""One model on one rank: initialisation, forward passes over micro-batches, activation checkpointing, losses, memory.

Imports core to checkpoint.
"""
