"""Compares what replicas of a model have and compute, to find bits that a machine has flipped."""
