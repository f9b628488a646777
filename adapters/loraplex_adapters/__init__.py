"""Adapters: identity, formats, sources, the cache with its tiers, LoRA weights, segmented kernels.

Knows nothing of requests, schedules, routers or gRPC.
"""
