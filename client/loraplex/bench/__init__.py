"""Open-loop load against a running server: what `loraplex bench` does, and benchmarks use."""
