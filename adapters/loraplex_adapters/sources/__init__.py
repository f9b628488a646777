"""Sources of adapters: a root directory, the Hub.

A source hands out open files, never paths.
"""
