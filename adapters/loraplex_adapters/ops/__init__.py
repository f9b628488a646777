"""Segmented LoRA matmuls: one Protocol (base), the obviously correct version (reference), and the fast ones."""
