"""Native decoder: search, packing, proof and the call of a stack of layers."""
