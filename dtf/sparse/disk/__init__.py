"""Rows of a sparse table that are larger than memory: a cache of records over immutable files of sorted records."""
