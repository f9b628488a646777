"""The KV cache's book-keeping: which block belongs to whom, and what it holds. The tensors are the runner's."""
