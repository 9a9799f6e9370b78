"""Optimizers by name, and the update that a rank makes of its gradients.

Imports core to sparse.
"""
