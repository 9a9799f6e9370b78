"""Modules that hold slices of their weights and compute with the other ranks of their group as if whole."""
