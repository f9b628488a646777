"""The router: one address in front of several workers.

Knows nothing of models, tokenizers, batches or adapters' files, and never imports torch.
"""
