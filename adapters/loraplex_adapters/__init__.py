"""Adapters: their formats, sources, disk store and cache.

Knows nothing of requests, schedules, routers or gRPC.
"""
