"""Attention over the paged KV cache: the contract, its implementations, and how Transformers' models reach it."""
