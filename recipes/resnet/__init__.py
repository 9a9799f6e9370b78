"""Residual networks for image classification."""
