"""This machine: its devices, network, load, signals, and the heartbeat of its processes.

No torch. Imports core.
"""
