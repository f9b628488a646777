"""Segmented LoRA as two Triton kernels. Import `lora` only where `registry.available_ops` says that triton is there."""
