"""Optimizers: one registered class per file, torch-free until they step."""
