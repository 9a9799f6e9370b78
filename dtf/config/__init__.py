"""From a command line to typed settings: composing, checking, messages, help.

No torch. Imports core to optim.
"""
