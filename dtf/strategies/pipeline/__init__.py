"""strategy=pipeline: the planner that cuts a model into stages, the schedules, the program that runs them.

Imports what strategies imports.
"""
