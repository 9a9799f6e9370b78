"""Who reports on a run: one file for each observer, and what draws or measures for them.

Imports core, host, api and model.
"""
