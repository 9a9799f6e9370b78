"""Values, errors and text that every other package uses.

No torch. Imports nothing of dtf.
"""
