"""The router: it knows which workers there are and how busy they are, picks one for each request and relays bytes.

Knows nothing of models, tokenizers, batches or adapters' files, and never imports torch.
"""
