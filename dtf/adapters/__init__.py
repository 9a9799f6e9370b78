"""Models and data that were written for other trainers, as recipes: what their hooks do, or that they are refused by
name. No module here is imported before a plugin asks for it.
"""
