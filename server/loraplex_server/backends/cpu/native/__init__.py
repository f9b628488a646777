"""Native CPU kernels in C++: sources, build and loading.

Nothing in here needs torch to import.
"""
