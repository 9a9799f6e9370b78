"""Ranks that work together: the world, the device mesh, collectives, point-to-point messages, sharding arithmetic.

Imports core and host.
"""
