"""One file for each strategy, and the programs that several of them share. Parameter servers have a package of their
own.

Imports core to config. Strategies never import each other.
"""
