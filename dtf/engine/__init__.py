"""The life of a rank: settings, program, clock, loop, evaluation.

Imports core to launch. Names no strategy.
"""
