"""Rehearses faults on a run: starts the run's own command in a process of its own, disturbs it at a random moment, and
judges what came of it.
"""
