"""The public face of dtf: what users subclass and call.

Imports no torch before a name that needs it is asked for. Imports core, host and distributed.
"""
