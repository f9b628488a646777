"""Fleet: workers and routers on many machines, placed and replaced by Ray Serve."""
