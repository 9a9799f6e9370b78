"""Sparse tables: rows by 64-bit id, their row optimizers, and how tables are sharded over ranks.

Imports core to data.
"""
