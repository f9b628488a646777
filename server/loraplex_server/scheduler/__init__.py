"""The scheduler: pure decisions over plain data.

No torch, gRPC, clock or asyncio in here.
"""
