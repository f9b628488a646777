"""Book-keeping of the KV cache: owners and contents of blocks. The tensors are the runner's."""
