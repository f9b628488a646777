"""KV cache bookkeeping: owners and content keys of blocks.

The tensors are the runner's.
"""
