"""The router: one address in front of several workers, relaying bytes to the one it picks.

Knows nothing of models, tokenizers, batches or adapters' files, and never imports torch.
"""
