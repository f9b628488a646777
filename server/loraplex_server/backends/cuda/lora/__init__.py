"""Segmented LoRA in Triton."""
