"""strategy=pserver: parameter servers and their trainers.

Imports core to strategies. grpc only in net.rpc.
"""
