"""Back ends by device: the plain reference, the CPU, CUDA."""
