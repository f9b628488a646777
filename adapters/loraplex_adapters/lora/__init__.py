"""LoRA weights in the form that kernels read."""
