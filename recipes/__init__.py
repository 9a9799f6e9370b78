"""The recipes dtf ships: models, data and settings. Imported as `dtf.recipes`.

Imports core to engine.
"""
