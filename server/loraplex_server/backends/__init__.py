"""Back ends by device: adapters, linears, attention, norms and heads on the reference, the CPU and CUDA."""
