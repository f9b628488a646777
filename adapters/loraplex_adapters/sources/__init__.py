"""Sources of adapters: a root directory, the Hub, buckets.

A source hands out open files, never paths.
"""
