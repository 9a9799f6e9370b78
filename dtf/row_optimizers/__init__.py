"""Row optimizers of sparse tables: one registered class per file, without torch, numpy and numba until they step."""
