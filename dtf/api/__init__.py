"""The contracts: what users subclass, and the values these get. Users import from dtf.

No torch when imported. Imports core, host and distributed.
"""
