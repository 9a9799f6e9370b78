"""Language models over bytes.

Imports core to engine.
"""
