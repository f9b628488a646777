"""CPU kernels in C++: their sources, what builds them, and what loads them. Nothing in here needs torch to import."""
