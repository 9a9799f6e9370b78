"""From a data set to the batches of a rank: samplers, splits, the loader.

Imports core to model.
"""
