"""Open-loop load generator, used by `loraplex bench` and the benchmarks."""
