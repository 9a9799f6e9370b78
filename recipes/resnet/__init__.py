"""Residual networks for image classification.

Imports core to engine.
"""
